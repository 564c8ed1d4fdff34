"""What part of each layer's backward pass can wait for a pass of its own, and what is kept until then.

    F, B; F, I and W of one layer after the other, the latter as `profiler.run.split_backward` runs them

What counts is how much sooner than B the gradients of the inputs are there: I's seconds are those of the whole backward
pass, which were measured where the layer stands, less that share. Calls and graphs of single operations make the passes
together longer than F and B, for small layers much; that counts in W, but for what F takes longer, which I does, too.

Layers within a stage share calls and graphs, and W finds less in the cache that I has left there. So the same passes of
a whole stage say what its layers come to together, as for F and B in `profiler.timing.sweeps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from profiler.machine.stopwatches import Stopwatch
from profiler.run.layer_runner import LayerRunner, Uncut, backward, keep
from profiler.run.split_backward import DeferredWeights
from profiler.run.stage_function import KeptPass, leaves_of, roots_of, run_backward
from profiler.timing.repeats import collecting_no_garbage
from profiler.tracing.sequence import BoundaryValue, LayerSequence

ROUNDS = 3
"""Passes of each distinct layer that count, at most; one more warms up."""
ENOUGH_S = 0.3
"""No more are made than take so long: of layers that take long one says enough, even the first [chosen]."""
ENOUGH_OF_STAGES_S = 3.0
"""The same of whole stages: there are few, and one that the system interrupts would count for all layers [chosen]."""
ENOUGH_IN_HASTE_S = 0.03
"""The same where no second is given to repeat anything [chosen]."""


class WeightPass(NamedTuple):
    """What a layer leaves for W.

    Attributes:
        share: by how much of the backward pass I is shorter; 0 where it makes all gradients, or takes as long.
        more: by what part of the backward pass all passes together are longer.
        kept_bytes: what lives from I until W.
    """

    share: float
    more: float
    kept_bytes: int


NOTHING = WeightPass(0.0, 0.0, 0)


def measured_weights(
    sequence: LayerSequence,
    runner: LayerRunner,
    size: int,
    watch: Stopwatch,
    layer_s: Sequence[float],
    *,
    in_haste: bool = False,
) -> list[WeightPass]:
    """By layer; equal layers are measured once, on values that are made up.

    Args:
        sequence: the layers.
        runner: with a micro-batch, on real tensors.
        size: of the micro-batch.
        watch: of their device.
        layer_s: seconds of each layer's forward and backward pass, by which passes are as many as they are: by the
            passes themselves, one that the system interrupts would be the only one.
        in_haste: with as few repeats as can be.
    """
    enough_s = ENOUGH_IN_HASTE_S if in_haste else ENOUGH_S
    known: dict[tuple[str, bool, tuple[bool, ...]], WeightPass] = {}
    found = []
    runner.run_prelude()
    for layer in sequence.layers:
        deferred = runner.deferred(layer.index)
        key = (layer.signature, layer.index == len(sequence) - 1, deferred)
        if any(deferred) and key not in known:
            runner.hold(range(layer.index, layer.index + 1))
            values = _values_at(sequence, layer.index, size, runner)
            rounds = _rounds(enough_s, layer_s[layer.index])
            with collecting_no_garbage():
                known[key] = _measured(runner, layer.index, values, watch, rounds)
        found.append(known.get(key, NOTHING))
    return found


def as_stages(
    sequence: LayerSequence,
    runner: LayerRunner,
    size: int,
    watch: Stopwatch,
    passes: Sequence[tuple[float, float]],
    found: Sequence[WeightPass],
    runs: Sequence[range],
) -> list[WeightPass]:
    """What layers leave for W as parts of a stage: all by one factor such that they add up to what stages do.

    Args:
        sequence: the layers.
        runner: with a micro-batch, on real tensors.
        size: of the micro-batch.
        watch: of their device.
        passes: seconds of each layer's forward and backward pass.
        found: what each leaves for W by itself.
        runs: layers that are run as one stage.
    """
    runner.run_prelude()
    by_layers, by_stages = [0.0, 0.0], [0.0, 0.0]  # seconds by which I is shorter, and by which all passes are longer
    for run in runs:
        backward_s = sum(passes[index][1] for index in run)
        if not any(found[index].share for index in run) or not backward_s:
            continue
        rounds = max(1, _rounds(ENOUGH_OF_STAGES_S, sum(map(sum, passes[run.start : run.stop]))))
        runner.hold(run)
        with collecting_no_garbage():
            stage = _measured_stage(runner, run, _values_at(sequence, run.start, size, runner), watch, rounds)
        for which in (0, 1):
            by_layers[which] += sum(found[index][which] * passes[index][1] for index in run)
            by_stages[which] += stage[which] * backward_s
    if not by_layers[0]:
        return list(found)
    factors = [stage / layer if layer else 1.0 for stage, layer in zip(by_stages, by_layers, strict=True)]
    return [WeightPass(min(one.share * factors[0], 1.0), one.more * factors[1], one.kept_bytes) for one in found]


def _rounds(enough_s: float, passes_s: float) -> int:
    """How many rounds count, of passes that take so long: once in one and once in three."""
    return int(min(ROUNDS, enough_s / (2 * passes_s))) if passes_s else ROUNDS


def _values_at(sequence: LayerSequence, boundary: int, size: int, runner: LayerRunner) -> dict[str, Tensor]:
    return {value.name: _made_up(value, size, runner.device) for value in sequence.boundaries[boundary]}


def _measured_stage(
    runner: LayerRunner, run: range, values: Mapping[str, Tensor], watch: Stopwatch, rounds: int
) -> tuple[float, float]:
    """By what part of its backward pass I of a whole stage is shorter, and all passes are longer; of so many rounds."""
    whole, split = (runner.uncut(run.start, run.stop, splits=splits) for splits in (False, True))
    shares, more = [], []
    for _round in range(1 + rounds):
        store = DeferredWeights()
        forward_s, whole_s = _went_through(runner, whole, values, watch, None)
        split_forward_s, inputs_s, weights_s = _went_through(runner, split, values, watch, store)
        if whole_s:
            inputs_s += split_forward_s - forward_s
            shares.append(1 - inputs_s / whole_s)
            more.append((inputs_s + weights_s) / whole_s - 1)
    return max(0.0, median(shares[1:] or [0.0])), max(0.0, median(more[1:] or [0.0]))


def _went_through(
    runner: LayerRunner, stage: Uncut, values: Mapping[str, Tensor], watch: Stopwatch, store: DeferredWeights | None
) -> list[float]:
    """Seconds of F and B of a stage, or with a store of F, I and W."""
    leaves = leaves_of(values, stage.function.entering)
    leaving = watch.lap(partial(runner.run_uncut, stage, leaves, store=store), (stage, "forward"))
    passed = KeptPass(leaves, roots_of(leaving))
    gradients = {name: torch.ones_like(leaving[name]) for name in passed.roots}
    del leaving
    watch.lap(partial(run_backward, passed, gradients), (stage, "backward"))
    if store is not None:
        watch.lap(store.run, (stage, "weights"))
    return watch.take()


def _made_up(value: BoundaryValue, size: int, device: torch.device) -> Tensor:
    """A value of a boundary as it comes from the stage before."""
    shape = value.shape_at(size)
    memory = torch.empty([shape[dim] for dim in value.dim_order], dtype=value.dtype, device=device)
    memory = memory.normal_() if memory.is_floating_point() or memory.is_complex() else memory.zero_()
    return memory.permute([value.dim_order.index(dim) for dim in range(len(shape))])


def _measured(
    runner: LayerRunner, index: int, values: Mapping[str, Tensor], watch: Stopwatch, rounds: int
) -> WeightPass:
    """With so many passes that count; with none the one that warms up does."""
    shares, more = [], []
    kept_bytes = 0
    for number in range(1 + rounds):
        going_back = watch.lap(partial(gone_forward, runner, index, values, None, None), (index, "forward"))
        watch.lap(going_back, (index, "backward"))
        store = runner.store(index, watching=not number)
        going_back = watch.lap(partial(gone_forward, runner, index, values, None, store), (index, "split forward"))
        watch.lap(going_back, (index, "inputs"))
        kept_bytes = kept_bytes or store.kept_bytes()
        watch.lap(store.run, (index, "weights"))
        forward_s, whole_s, split_forward_s, inputs_s, weights_s = watch.take()
        if whole_s:
            inputs_s += max(0.0, split_forward_s - forward_s)
            shares.append(max(0.0, 1 - inputs_s / whole_s))
            more.append(max(0.0, (inputs_s + weights_s) / whole_s - 1))
    return WeightPass(median(shares[1:] or shares or [0.0]), median(more[1:] or more or [0.0]), kept_bytes)


def gone_forward(
    runner: LayerRunner,
    index: int,
    values: Mapping[str, Tensor],
    trained: Set[str] | None,
    store: DeferredWeights | None,
) -> Callable[[], None]:
    """The backward pass of a layer that has gone forward, or with a store I, ready to be called.

    Args:
        runner: of the layer.
        index: of the layer.
        values: alive at the boundary before it.
        trained: names of what is alive after it and gets a gradient; None for all that can have one.
        store: takes what can wait for W; None for a backward pass in one.
    """
    entered = runner.enter(index, values)
    leaving = runner.leaving(index, entered, runner.forward(index, entered, store=store))
    gradients = {
        name: torch.ones_like(value)
        for name, value in leaving.items()
        if value.requires_grad and (trained is None or name in trained)
    }
    return backward(keep(entered, leaving), gradients)
