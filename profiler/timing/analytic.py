"""Costs of layers without the hardware: counted work over the rates of a data sheet.

Each operation of a layer, forward and backward, is seen once on fake tensors: its FLOPs by `profiler.observe.flops`,
the bytes of what it reads and writes. It takes

    max( FLOPs / rate of its arithmetic,  bytes / memory bandwidth,  launch floor )

(the roofline of Williams et al., CACM 52(4), 2009, with a floor). The host asks for one operation after the other while
the device works on earlier ones, so a pass is a queue, and a layer takes by what it ends later than the layer before
it: however finely a model is cut, its layers add up to the same.

Rates are the data sheet's times an efficiency that is stated and, where a device of the kind has been measured, fitted
(`fitted_rates`). Operations without a FLOP formula are priced by their bytes alone; `Estimate.without_formula` lists
them with their share of all bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.between_sizes import on_line, whole_bytes
from profiler.datasheets import data_sheet
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST
from profiler.observe.both_branches import sees_both_branches
from profiler.observe.flops import FLOP_FORMULAS
from profiler.record import Estimate, LayerCost, OptimizerCost, WithoutFormula
from profiler.run.layer_runner import LayerRunner, backward, keep
from profiler.timing.optimizers import state_bytes
from profiler.timing.weight_passes import gone_forward
from profiler.torch_private import schema_of, storage_of
from profiler.tracing.sequence import BoundaryValue, LayerSequence

MATRIX_EFFICIENCY = 0.65
"""Share of the printed FLOP/s that large matrix products reach in training [assumed; 0.9 and more fits published runs
on A100 without pipeline, see `tests/benchmarks/published_runs.md`]."""
UNALIGNED_EFFICIENCY = 0.4
"""Of that rate, what products reach whose rows do not begin at multiples of `ALIGNED_BYTES`, such as logits of 50,257
words [fitted: 0.4 to 240 published runs without pipeline, see `tests/benchmarks/published_runs.md`]."""
ALIGNED_BYTES = 16
"""What matrix units load at once; for rows that begin elsewhere libraries have slower kernels (NVIDIA, "Matrix
multiplication background user's guide", table 1)."""
MEMORY_EFFICIENCY = 0.75
"""Share of the printed bandwidth that operations reach that only move data [assumed]."""
LAUNCH_S = 2e-6
"""Least seconds of a kernel on an accelerator [assumed]."""
DISPATCH_S = 44e-6
"""Seconds in which the host asks for an operation of a training step, in PyTorch without a compiler [fitted: 44e-6 to
240 published runs without pipeline, see `tests/benchmarks/published_runs.md`]."""
WITHOUT_DATA = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that only take memory: no kernel runs for them."""
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Products of matrices."""
WIDEST_FIT = np.log(100.0)
"""Fitted rates lie within this factor of those that the fit starts from."""
MARGIN = 2.0
"""A model that was not fitted to may be off by this many times the deviation of those that were [assumed]."""
ERROR = 0.5
"""Relative error to expect of a sum of times that nothing was fitted to [assumed]."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second.

    Attributes:
        float32_flops_per_s: matrix products in float32.
        convolution_flops_per_s: convolutions in float32.
        half_flops_per_s: matrix products and convolutions in float16.
        bfloat16_flops_per_s: those in bfloat16.
        float64_flops_per_s: those in float64; 0 where the device has no such arithmetic.
        memory_bytes_per_s: bytes read and written.
        launch_s: least seconds of an operation.
        dispatch_s: seconds in which the host asks for one, while the device works on earlier ones; 0 where the host
            computes itself.
        unaligned: share of their rates that products of two-byte numbers reach whose rows are not aligned.
    """

    float32_flops_per_s: float
    convolution_flops_per_s: float
    half_flops_per_s: float
    bfloat16_flops_per_s: float
    float64_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    dispatch_s: float = 0.0
    unaligned: float = 1.0

    @classmethod
    def of(cls, kind: str) -> Rates:
        """The rates of a data sheet, with the efficiencies of this module."""
        sheet = data_sheet(kind)
        return cls(
            float32_flops_per_s=MATRIX_EFFICIENCY * sheet.float32_flops_per_s,
            convolution_flops_per_s=MATRIX_EFFICIENCY * sheet.tf32_flops_per_s,
            half_flops_per_s=MATRIX_EFFICIENCY * sheet.half_flops_per_s,
            bfloat16_flops_per_s=MATRIX_EFFICIENCY * sheet.bfloat16_flops_per_s,
            float64_flops_per_s=MATRIX_EFFICIENCY * (sheet.float64_flops_per_s or 0.0),
            memory_bytes_per_s=MEMORY_EFFICIENCY * sheet.memory_bytes_per_s,
            launch_s=LAUNCH_S,
            dispatch_s=0.0 if sheet.compiles else DISPATCH_S,
            unaligned=1.0 if sheet.compiles else UNALIGNED_EFFICIENCY,
        )


FLOAT32, CONVOLUTION, HALF, BFLOAT16, FLOAT64, MEMORY, LAUNCH = range(7)
"""Positions of the fields of `Rates` that say what one operation takes."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Work, one entry an operation; arrays of shape (n,).

    Attributes:
        names: schema names.
        flops: multiply-adds counted as two.
        size_bytes: read and written.
        rate: index of the arithmetic's rate among the fields of `Rates`.
        aligned: whether it may be as fast as that.
    """

    names: tuple[str, ...]
    flops: np.ndarray[Any, np.dtype[np.float64]]
    size_bytes: np.ndarray[Any, np.dtype[np.float64]]
    rate: np.ndarray[Any, np.dtype[np.intp]]
    aligned: np.ndarray[Any, np.dtype[np.bool_]]

    def seconds(self, rates: Rates) -> np.ndarray[Any, np.dtype[np.float64]]:
        """What each operation takes.

        Raises:
            ArgumentError: some multiply in float64, and the device cannot.
        """
        if not rates.float64_flops_per_s and np.any(self.flops[self.rate == FLOAT64]):
            raise ArgumentError(
                "the model multiplies in float64, which a device of the cluster has no arithmetic for; plan it in "
                "float32, or take other devices"
            )
        return self._seconds(np.array(astuple(rates)), rates.unaligned)

    def _seconds(
        self, rates: np.ndarray[Any, np.dtype[np.float64]], unaligned: float
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        reached = rates[self.rate] * np.where(self.aligned, 1.0, unaligned)
        arithmetic = np.divide(self.flops, reached, out=np.zeros(len(self.flops)), where=self.flops > 0)
        return np.asarray(np.maximum(np.maximum(arithmetic, self.size_bytes / rates[MEMORY]), rates[LAUNCH]))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a layer does with one micro-batch.

    Attributes:
        forward: its forward pass.
        backward: its backward pass.
        inputs: what is left of that if it is split and gradients of parameters wait; nothing where none can.
        weight_kept_bytes: what lives until then.
    """

    forward: Operations
    backward: Operations
    inputs: Operations
    weight_kept_bytes: int


@sees_both_branches
class _Meter(TorchDispatchMode):
    """Notes every operation that touches data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[tuple[str, float, float, int, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        written = [item for item in pytree.tree_leaves(out) if isinstance(item, Tensor)]
        if not written or (not schema_of(func).is_mutable and {*map(storage_of, written)} <= {*map(storage_of, read)}):
            return out  # a view, or a question about shapes
        if schema_of(func).name in WITHOUT_DATA:
            return out
        formula = FLOP_FORMULAS.get(func.overloadpacket)
        flops = float(formula(*args, **(kwargs or {}), out_val=out)) if formula is not None else 0.0
        size_bytes = sum(item.nbytes for item in {id(item): item for item in (*read, *written)}.values())
        name = schema_of(func).name
        aligned = all(map(_is_aligned, (*read, *written))) if name in PRODUCTS else True
        self._seen.append((name, flops, float(size_bytes), _rate(name, read), aligned))
        return out

    def take(self) -> Operations:
        """What was noted since the last call."""
        columns = zip(*self._seen, strict=True) if self._seen else ((), (), (), (), ())
        names, flops, size_bytes, rate, aligned = columns
        self._seen = []
        return Operations(
            tuple(names), np.array(flops), np.array(size_bytes), np.array(rate, dtype=np.intp), np.array(aligned, bool)
        )


def _is_aligned(tensor: Tensor) -> bool:
    """Whether each row begins where matrix units can load; numbers of four and more bytes are not asked for it."""
    if tensor.dim() < 2 or tensor.element_size() != 2:
        return True
    return max(tensor.stride()[-2:]) * tensor.element_size() % ALIGNED_BYTES == 0


def _rate(name: str, read: Sequence[Tensor]) -> int:
    dtypes = {item.dtype for item in read}
    if dtypes & {torch.float64, torch.complex128}:
        return FLOAT64
    if torch.bfloat16 in dtypes:
        return BFLOAT16
    if torch.float16 in dtypes:
        return HALF
    return CONVOLUTION if "convolution" in name else FLOAT32


def work_of_layers(sequence: LayerSequence, runner: LayerRunner, micro_batch_size: int) -> list[LayerWork]:
    """The work of every layer with the runner's micro-batch, on fake tensors; equal layers are seen once.

    Args:
        sequence: the layers.
        runner: of fake tensors, inside their mode.
        micro_batch_size: of the runner's inputs.
    """
    meter = _Meter()
    known: dict[tuple[Any, ...], tuple[LayerWork, list[bool]]] = {}
    work = []
    trained: Set[str] | None = None
    runner.run_prelude()
    for layer in reversed(sequence.layers):  # a gradient comes from a later layer, or none does
        entering = sequence.boundaries[layer.index]
        alike = None if trained is None else tuple(name in trained for name in (*layer.outputs, *layer.values))
        if trained is not None and (layer.signature, alike) in known:
            seen, reached = known[layer.signature, alike]
            passing = trained - {*layer.values, *layer.outputs}
            trained = passing | {name for name, comes in zip(layer.values, reached, strict=True) if comes}
        else:
            values = {value.name: _entering(value, micro_batch_size) for value in entering}
            seen, trained = _seen(runner, layer.index, values, trained, meter)
            known[layer.signature, alike] = seen, [name in trained for name in layer.values]
        work.append(seen)
    return work[::-1]


def _entering(value: BoundaryValue, size: int) -> Tensor:
    """A tensor as it comes across a boundary; of fake kind inside the mode."""
    shape = value.shape_at(size)
    memory = torch.empty([shape[dim] for dim in value.dim_order], dtype=value.dtype, device=HOST)
    return memory.permute([value.dim_order.index(dim) for dim in range(len(shape))])


def _seen(
    runner: LayerRunner, index: int, values: Mapping[str, Tensor], trained: Set[str] | None, meter: _Meter
) -> tuple[LayerWork, Set[str]]:
    """Run one layer forward and backward.

    Only what has a part in the loss has a gradient. The backward pass of anything else is none of training's, and may
    be impossible: what it would need may be written in place.

    Args:
        runner: of fake tensors.
        index: of the layer.
        values: alive at the boundary before it, by name.
        trained: names of what is alive after the layer and gets a gradient; None after the last layer.
        meter: counts.

    Returns:
        The work, and names of those of `values` that get a gradient.
    """
    entered = runner.enter(index, values)
    with meter:
        computed = runner.forward(index, entered)
    leaving = runner.leaving(index, entered, computed)
    gradients = {
        name: torch.ones_like(value)
        for name, value in leaving.items()
        if value.requires_grad and (trained is None or name in trained)
    }
    go_back = backward(keep(entered, leaving), gradients)
    forward = meter.take()
    with meter:
        go_back()
    whole = meter.take()
    parts = _parts(runner, index, values, gradients.keys(), meter)
    return LayerWork(forward, whole, *parts), entered.caught.keys()


def _parts(
    runner: LayerRunner, index: int, values: Mapping[str, Tensor], trained: Set[str], meter: _Meter
) -> tuple[Operations, int]:
    """I of a layer, and the bytes that wait for W."""
    if not any(runner.deferred(index)):
        return meter.take(), 0
    store = runner.store(index, watching=True)
    go_back = gone_forward(runner, index, values, trained, store)
    with meter:
        go_back()
    return meter.take(), store.kept_bytes()


def work_between(below: LayerWork, above: LayerWork, share: float) -> LayerWork | None:
    """The work at a micro-batch size between two others: FLOPs and bytes grow along a line.

    Returns:
        None when the operations are not the same ones.
    """
    if below.forward.names != above.forward.names or below.backward.names != above.backward.names:
        return None
    if below.inputs.names != above.inputs.names:
        return None
    return LayerWork(
        _between(below.forward, above.forward, share),
        _between(below.backward, above.backward, share),
        _between(below.inputs, above.inputs, share),
        int(whole_bytes(on_line(below.weight_kept_bytes, above.weight_kept_bytes, share))),
    )


def _between(below: Operations, above: Operations, share: float) -> Operations:
    return Operations(
        below.names,
        on_line(below.flops, above.flops, share),
        on_line(below.size_bytes, above.size_bytes, share),
        below.rate,
        below.aligned,
    )


def seconds_of(layers: Sequence[LayerWork], rates: Rates) -> list[tuple[float, float, float]]:
    """Seconds of layers that run one after the other, and back.

    Returns:
        Of each layer its forward pass, its backward pass, and by how much that is shorter if gradients of parameters
        wait.
    """
    forward = _in_a_queue([layer.forward for layer in layers], rates)
    backward = _in_a_queue([layer.backward for layer in reversed(layers)], rates)[::-1]
    split = [layer.inputs if layer.weight_kept_bytes else layer.backward for layer in reversed(layers)]
    inputs = _in_a_queue(split, rates)[::-1]
    weights = [max(0.0, whole_s - inputs_s) for whole_s, inputs_s in zip(backward, inputs, strict=True)]
    return list(zip(forward, backward, weights, strict=True))


def _in_a_queue(parts: Sequence[Operations], rates: Rates) -> list[float]:
    """By how many seconds each part ends later than the one before.

    The device begins an operation when it has been asked for it and the one before has ended. `ahead_s` is for how long
    it still has work when the host has asked for the last. How many operations may wait in a queue is not limited here.
    """
    known: dict[int, list[float]] = {}
    ahead_s, found = 0.0, []
    for part in parts:
        if id(part) not in known:
            known[id(part)] = part.seconds(rates).tolist()
        took_s = 0.0
        for seconds in known[id(part)]:
            idle_s = max(0.0, rates.dispatch_s - ahead_s)
            took_s += idle_s + seconds
            ahead_s += idle_s + seconds - rates.dispatch_s
        found.append(float(f"{took_s:.9e}"))  # equal layers take the same, and not what sums were rounded to
    return found


def estimate_of(kind: str, work: Sequence[LayerWork], rates: Rates, error: float) -> Estimate:
    """What the profile says about estimated times: rates, error, and operations without a formula."""
    touched: defaultdict[str, float] = defaultdict(float)
    total = 0.0
    for operations in (part for layer in work for part in (layer.forward, layer.backward)):
        total += float(operations.size_bytes.sum())
        for name, flops, size_bytes in zip(operations.names, operations.flops, operations.size_bytes, strict=True):
            if not flops:
                touched[name] += float(size_bytes)
    shares = sorted(((share / total, name) for name, share in touched.items()), reverse=True) if total else []
    return Estimate(
        device_kind=kind,
        error=error,
        float32_flops_per_s=rates.float32_flops_per_s,
        convolution_flops_per_s=rates.convolution_flops_per_s,
        half_flops_per_s=rates.half_flops_per_s,
        bfloat16_flops_per_s=rates.bfloat16_flops_per_s,
        float64_flops_per_s=rates.float64_flops_per_s,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        launch_s=rates.launch_s,
        dispatch_s=rates.dispatch_s,
        without_formula=tuple(WithoutFormula(operation=name, share_of_bytes=share) for share, name in shares),
    )


def estimated_optimizer(
    name: str, kind: str, parameters: Iterable[Tensor], rates: Rates, *, rounded_bytes: int = 0, added_bytes: int = 0
) -> OptimizerCost:
    """A step that reads parameters, gradients and state and writes parameters and state.

    Args:
        name: of the optimizer.
        kind: of device.
        parameters: what it steps; only shape, type and `requires_grad` matter.
        rates: of the device.
        rounded_bytes: of what master weights are rounded to after the step: they are read once more.
        added_bytes: of gradients that are cast for the step: they are read, and written in the optimizer's type.

    Raises:
        ArgumentError: the optimizer cannot train these parameters.
    """
    trained = [tensor for tensor in parameters if tensor.requires_grad and tensor.numel()]
    if not trained:
        return OptimizerCost(name=str(name), device_kind=kind, seconds_per_byte=0.0, state_bytes_per_byte=0.0)
    size_bytes, state = sum(tensor.nbytes for tensor in trained), state_bytes(name, trained)
    moved_bytes = 4 * size_bytes + 2 * state  # parameters and state read and written, gradients read and set to zero
    moved_bytes += size_bytes + rounded_bytes if rounded_bytes else 0
    moved_bytes += size_bytes + added_bytes if added_bytes else 0
    return OptimizerCost(
        name=str(name),
        device_kind=kind,
        seconds_per_byte=moved_bytes / rates.memory_bytes_per_s / size_bytes,
        state_bytes_per_byte=state / size_bytes,
    )


def fitted_rates(
    models: Iterable[tuple[Mapping[int, Sequence[LayerWork]], Sequence[LayerCost]]], start: Rates
) -> tuple[Rates, float]:
    """Rates of a device that has been measured, and that computes what it is asked for at once.

    Minimizes the squared logarithm of predicted over measured time, over layers, sizes and both directions.

    Args:
        models: of each model the work by micro-batch size and layer, and times of these layers on the device.
        start: rates to begin with.

    Returns:
        The rates, and the error to state: `MARGIN` times the sum of all deviations as a share of the sum of all times.
    """
    parts, times = [], []
    for work, measured in models:
        for cost in measured:
            layer = work[cost.micro_batch_size][cost.layer]
            for operations, seconds in ((layer.forward, cost.forward_s), (layer.backward, cost.backward_s)):
                if seconds > 0 and operations.names:
                    parts.append(operations)
                    times.append(seconds)
    owner = np.repeat(np.arange(len(parts)), [len(part.names) for part in parts])
    everything = Operations(
        (),
        np.concatenate([part.flops for part in parts]),
        np.concatenate([part.size_bytes for part in parts]),
        np.concatenate([part.rate for part in parts]),
        np.concatenate([part.aligned for part in parts]),
    )
    truth = np.array(times)

    def predicted(logarithms: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.bincount(owner, everything._seconds(np.exp(logarithms), start.unaligned), len(truth)).astype(
            np.float64
        )

    weights = np.sqrt(truth / truth.sum())  # what takes long counts

    def residuals(logarithms: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(weights * np.log(predicted(logarithms) / truth))

    begin = np.log(astuple(start)[: LAUNCH + 1])
    found = least_squares(residuals, begin, bounds=(begin - WIDEST_FIT, begin + WIDEST_FIT))
    rates = replace(Rates(*(float(value) for value in np.exp(found.x))), unaligned=start.unaligned)
    error = MARGIN * float(np.abs(predicted(found.x) - truth).sum() / truth.sum())
    return rates, error
