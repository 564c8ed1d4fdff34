"""What counted work takes on a device of a data sheet.

Each operation takes

    max( FLOPs / rate of its arithmetic,  bytes / memory bandwidth,  launch floor )

(the roofline of Williams et al., CACM 52(4), 2009, with a floor). The host asks for one operation after the other while
the device works on earlier ones, so a pass is a queue, and a layer takes by what it ends later than the layer before
it: however finely a model is cut, its layers add up to the same.

Rates are the data sheet's times an efficiency that is stated and, where a device of the kind has been measured, fitted
(`profiler.timing.rate_fit`). Operations without a FLOP formula are priced by their bytes alone;
`Estimate.without_formula` lists them with their share of all bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from profiler.datasheets import data_sheet
from profiler.errors import ArgumentError
from profiler.record import Estimate, OptimizerCost, WithoutFormula
from profiler.timing.counted_work import Arithmetic, LayerWork, Operations
from profiler.timing.optimizers import cost_with_state, state_bytes

MATRIX_EFFICIENCY = 0.84
"""Of the rate that the largest matrix products reach (`DataSheet.matrix_share`), what training's do [fitted: 0.72 of
an A100's printed rate. GPTs of 1 and 7 billion parameters in plain PyTorch without pipeline, at 60 and 64 % of it
(https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking), ask for 0.70 and 0.72, products alone in table 9
of arXiv 2401.10241 for 0.77 to 0.81].
"""
UNALIGNED_EFFICIENCY = 0.4
"""Of that rate, what products reach whose rows do not begin where matrix units can load, such as logits of 50,257 words
[fitted: 0.4 to 240 published runs without pipeline, see `tests/benchmarks/published_runs.md`]."""
MEMORY_EFFICIENCY = 0.7
"""Share of the printed bandwidth that operations reach that only move data [fitted: forward passes in table 9 of arXiv
2401.10241 ask for 0.6 to 0.75, the published runs without pipeline for 0.5 in a block and 0.8 in the optimizer].
"""
LAUNCH_S = 2e-6
"""Least seconds of a kernel on an accelerator [assumed]."""
DISPATCH_S = 52e-6
"""Seconds in which the host asks for an operation of a training step, in PyTorch without a compiler [fitted: 52e-6 to
240 published runs without pipeline, see `tests/benchmarks/published_runs.md`]."""
MEMORY, LAUNCH = len(Arithmetic), len(Arithmetic) + 1
"""Positions of `Rates.memory_bytes_per_s` and `Rates.launch_s` among the fields."""


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
        matrix = MATRIX_EFFICIENCY * sheet.matrix_share
        return cls(
            float32_flops_per_s=matrix * sheet.float32_flops_per_s,
            convolution_flops_per_s=matrix * sheet.tf32_flops_per_s,
            half_flops_per_s=matrix * sheet.half_flops_per_s,
            bfloat16_flops_per_s=matrix * sheet.bfloat16_flops_per_s,
            float64_flops_per_s=matrix * (sheet.float64_flops_per_s or 0.0),
            memory_bytes_per_s=MEMORY_EFFICIENCY * sheet.memory_bytes_per_s,
            launch_s=LAUNCH_S,
            dispatch_s=0.0 if sheet.compiles else DISPATCH_S,
            unaligned=1.0 if sheet.compiles else UNALIGNED_EFFICIENCY,
        )


def operation_seconds(operations: Operations, rates: Rates) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each operation takes.

    Raises:
        ArgumentError: some multiply in float64, and the device cannot.
    """
    if not rates.float64_flops_per_s and np.any(operations.flops[operations.arithmetic == Arithmetic.FLOAT64]):
        raise ArgumentError(
            "the model multiplies in float64, which a device of the cluster has no arithmetic for; plan it in "
            "float32, or take other devices"
        )
    return roofline_s(operations, np.array(astuple(rates)), rates.unaligned)


def roofline_s(
    operations: Operations, rates: np.ndarray[Any, np.dtype[np.float64]], unaligned: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each operation takes, whatever it multiplies in.

    Args:
        operations: the work.
        rates: the first fields of `Rates`, `launch_s` the last that is read.
        unaligned: the field of that name.
    """
    reached = rates[operations.arithmetic] * np.where(operations.aligned, 1.0, unaligned)
    arithmetic_s = np.divide(operations.flops, reached, out=np.zeros(len(operations.flops)), where=operations.flops > 0)
    return np.asarray(np.maximum(np.maximum(arithmetic_s, operations.size_bytes / rates[MEMORY]), rates[LAUNCH]))


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
            known[id(part)] = operation_seconds(part, rates).tolist()
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
    size_bytes, states = sum(tensor.nbytes for tensor in trained), state_bytes(name, trained)
    moved_bytes = 4 * size_bytes + 2 * sum(
        states
    )  # parameters and state read and written, gradients read and set to zero
    moved_bytes += size_bytes + rounded_bytes if rounded_bytes else 0
    moved_bytes += size_bytes + added_bytes if added_bytes else 0
    return cost_with_state(name, kind, moved_bytes / rates.memory_bytes_per_s / size_bytes, trained, states)
