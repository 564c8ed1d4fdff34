"""The work of layers, counted without the hardware: what each operation computes and what it moves.

Each operation of a layer, forward and backward, is seen once on fake tensors: its FLOPs by `profiler.observe.flops`,
the bytes of what it reads and writes. What it takes on a device says `profiler.timing.roofline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.between_sizes import on_line, whole_bytes
from profiler.machine.backend import HOST
from profiler.observe.both_branches import sees_both_branches
from profiler.observe.flops import FLOP_FORMULAS
from profiler.run.layer_runner import LayerRunner, backward, keep
from profiler.timing.weight_passes import gone_forward
from profiler.torch_private import parts_of, schema_of, storage_of
from profiler.tracing.sequence import BoundaryValue, LayerSequence

ALIGNED_BYTES = 16
"""What matrix units load at once; for rows that begin elsewhere libraries have slower kernels (NVIDIA, "Matrix
multiplication background user's guide", table 1)."""
WITHOUT_DATA = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that only take memory: no kernel runs for them."""
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Products of matrices."""
READ_TWICE: Final = MappingProxyType(
    {
        "aten::native_batch_norm": (0,),
        "aten::native_batch_norm_backward": (0, 1),
        "aten::native_group_norm": (0,),
        "aten::native_group_norm_backward": (0, 1),
    }
)
"""Positions of arguments that are read once for sums over all their samples or places, and again with these: between
the two, more goes by than a cache holds (torch, aten/src/ATen/native/cuda/Normalization.cuh, group_norm_kernel.cu)."""
READ_FOR_EACH: Final = MappingProxyType(
    {"aten::convolution_backward": (0,), "aten::native_layer_norm_backward": (0, 1)}
)
"""Positions of arguments that one kernel reads for the gradient of the input and another for those of parameters."""


class Arithmetic(IntEnum):
    """What an operation's FLOPs are done in; the fields of `profiler.timing.roofline.Rates` in their order."""

    FLOAT32 = 0
    CONVOLUTION = 1
    HALF = 2
    BFLOAT16 = 3
    FLOAT64 = 4


@dataclass(frozen=True, slots=True)
class Operations:
    """Work, one entry an operation; arrays of shape (n,).

    Attributes:
        names: schema names.
        flops: multiply-adds counted as two.
        size_bytes: read and written.
        arithmetic: of its FLOPs.
        aligned: whether it may be as fast as that.
    """

    names: tuple[str, ...]
    flops: np.ndarray[Any, np.dtype[np.float64]]
    size_bytes: np.ndarray[Any, np.dtype[np.float64]]
    arithmetic: np.ndarray[Any, np.dtype[np.intp]]
    aligned: np.ndarray[Any, np.dtype[np.bool_]]


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


@dataclass(slots=True)
class _Seen:
    """One operation, and where what it wrote begins and ends: its storage, and elements of it."""

    name: str
    flops: float
    size_bytes: float
    arithmetic: Arithmetic
    aligned: bool
    written: tuple[Any, int, int]


@sees_both_branches
class _Meter(TorchDispatchMode):
    """Notes every operation that touches data.

    What is done to a tensor in place and in pieces, one behind the other, as the host adds up large gradients, is one
    operation: an accelerator has no use for the pieces.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[_Seen] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = _with_memory((args, kwargs)), _with_memory(out)
        in_place = bool(schema_of(func).is_mutable)
        if not written or (not in_place and {*map(storage_of, written)} <= {*map(storage_of, read)}):
            return out  # a view, or a question about shapes
        name = schema_of(func).name
        if name in WITHOUT_DATA:
            return out
        formula = FLOP_FORMULAS.get(func.overloadpacket)
        flops = float(formula(*args, **(kwargs or {}), out_val=out)) if formula is not None else 0.0
        size_bytes = sum(item.nbytes for item in {id(item): item for item in (*read, *written)}.values())
        size_bytes += sum(args[place].nbytes for place in _read_again(name, written))
        aligned = all(map(_is_aligned, (*read, *written))) if name in PRODUCTS else True
        first = int(written[0].storage_offset())
        place = (storage_of(written[0]), first, first + written[0].numel())
        now = _Seen(name, flops, float(size_bytes), _arithmetic(name, read), aligned, place)
        if in_place and self._seen and _goes_on(self._seen[-1], now):
            last = self._seen.pop()
            now.flops, now.size_bytes = last.flops + now.flops, last.size_bytes + now.size_bytes
        self._seen.append(now)
        return out

    def take(self) -> Operations:
        """What was noted since the last call."""
        seen, self._seen = self._seen, []
        return Operations(
            names=tuple(one.name for one in seen),
            flops=np.array([one.flops for one in seen]),
            size_bytes=np.array([one.size_bytes for one in seen]),
            arithmetic=np.array([one.arithmetic for one in seen], dtype=np.intp),
            aligned=np.array([one.aligned for one in seen], bool),
        )


def _with_memory(values: Any) -> list[Tensor]:
    """The tensors with a storage of their own in a tree; of a sparse one its indices and values."""
    tensors = [item for item in pytree.tree_leaves(values) if isinstance(item, Tensor)]
    return [part for item in tensors for part in (parts_of(item) if item.is_sparse else (item,))]


def _read_again(name: str, written: Sequence[Tensor]) -> tuple[int, ...]:
    """Positions of arguments that are read twice."""
    return READ_TWICE.get(name) or (READ_FOR_EACH.get(name, ()) if len(written) > 1 else ())


def _goes_on(last: _Seen, now: _Seen) -> bool:
    """Whether an operation in place does to the next piece of a tensor what was done to the piece before it."""
    (before, _, end), (storage, begin, _) = last.written, now.written
    return last.name == now.name and before == storage and end == begin


def _is_aligned(tensor: Tensor) -> bool:
    """Whether each row begins where matrix units can load; numbers of four and more bytes are not asked for it."""
    if tensor.dim() < 2 or tensor.element_size() != 2:
        return True
    return max(tensor.stride()[-2:]) * tensor.element_size() % ALIGNED_BYTES == 0


def _arithmetic(name: str, read: Sequence[Tensor]) -> Arithmetic:
    dtypes = {item.dtype for item in read}
    if dtypes & {torch.float64, torch.complex128}:
        return Arithmetic.FLOAT64
    if torch.bfloat16 in dtypes:
        return Arithmetic.BFLOAT16
    if torch.float16 in dtypes:
        return Arithmetic.HALF
    return Arithmetic.CONVOLUTION if "convolution" in name else Arithmetic.FLOAT32


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
        below.arithmetic,
        below.aligned,
    )
