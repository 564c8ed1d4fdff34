"""Timing layers where they stand: sweeps over the whole sequence, each layer timed by itself.

A layer that is called again and again with the same tensors finds them in the cache and looks faster than it is in
training. So a sweep runs all layers forward and then all backward, as training does, with a lap of the stopwatch for
each; equal layers share their laps. A second run of the same layers as one stage says what they take together, without
a call, an autograd graph and a Python frame for each: single layers are scaled so that they add up to that.

    forward    | 0 | 1 | 2 | 3 | loss |                       | uncut |
    backward                          | 3 | 2 | 1 | 0 |               | uncut |

Where the device cannot hold what all layers keep at once, a sweep goes through windows of layers that it can hold.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from profiler.layer_runner import Kept, LayerRunner, Stage, backward, keep
from profiler.sequence import LayerSequence
from profiler.stage_function import Pass, leaves_of, roots_of, run_backward
from profiler.timing import Stopwatch, Timing, collecting_no_garbage, rounds, stopwatch

FIRST_SIZES = 3  # swept before the others
FEWEST_SWEEPS = 3
MOST_SWEEPS = 9
# A CUDA queue takes 1024 launches before the CPU has to wait; an operation launches up to 3 kernels backward.
OPERATIONS_IN_CUDA_WINDOW = 300


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Times of one layer.

    Attributes:
        forward_s: median of forward passes, as part of a stage.
        backward_s: median of backward passes, as part of a stage.
        spread: interquartile range of forward and backward together, as a share of their median.
    """

    forward_s: float
    backward_s: float
    spread: float


Pair: TypeAlias = tuple[float, float]  # seconds of a forward and of a backward pass
_Key: TypeAlias = tuple[str, bool]


@dataclass(slots=True)
class _Laps:
    """What the sweeps at one micro-batch size took.

    Attributes:
        layers: by `_key` the laps of all layers with that key.
        uncut: by window the laps of all its layers as one stage.
    """

    layers: dict[_Key, list[Pair]]
    uncut: list[list[Pair]]


def time_layers(
    sequence: LayerSequence,
    runners: Mapping[int, LayerRunner],
    kept_bytes: Mapping[int, Sequence[int]],
    device: torch.device,
    *,
    memory_bytes: int,
    budget_s: float,
    sweep_done: Callable[[], object] = lambda: None,
) -> dict[int, list[LayerTiming]]:
    """Time every layer on micro-batches of several sizes, which take turns: a slow moment of the machine hits all.

    Args:
        sequence: the layers.
        runners: by size; with a micro-batch of that size, on real tensors.
        kept_bytes: by size; what each layer keeps for its backward pass.
        device: where the tensors are.
        memory_bytes: what one sweep may keep.
        budget_s: seconds after which no further sweep starts; at least `FEWEST_SWEEPS` of each size run.
        sweep_done: called after each sweep, at most `1 + MOST_SWEEPS` times for each size.

    Returns:
        The times by size. A size that the memory does not hold is missing. Interrupted from the keyboard, the sizes
        that were swept by then: the first `FIRST_SIZES` of `runners` come first.
    """
    turns = _Turns(sequence, runners, kept_bytes, device, memory_bytes, sweep_done)
    sizes = list(runners)
    start = time.perf_counter()
    try:
        with collecting_no_garbage():
            for group in (sizes[:FIRST_SIZES], sizes[FIRST_SIZES:]):
                for number in range(1 + FEWEST_SWEEPS):
                    turns.take(group, counted=number > 0)  # the first one warms up
            left_s = budget_s - (time.perf_counter() - start)
            for _ in rounds(at_least=0, at_most=MOST_SWEEPS - FEWEST_SWEEPS, budget_s=left_s):
                turns.take(sizes, counted=True)
    except KeyboardInterrupt:
        if not turns.summaries():
            raise
        warnings.warn(
            f"interrupted: the profile holds micro-batches of {sorted(turns.summaries())} of {sorted(sizes)} samples",
            stacklevel=2,
        )
    return turns.summaries()


class _Turns:
    """Sweeps at several sizes that take turns."""

    def __init__(
        self,
        sequence: LayerSequence,
        runners: Mapping[int, LayerRunner],
        kept_bytes: Mapping[int, Sequence[int]],
        device: torch.device,
        memory_bytes: int,
        sweep_done: Callable[[], object],
    ) -> None:
        self._sequence = sequence
        self._watch = stopwatch(device)
        self._sweep_done = sweep_done
        self._sweeps = {}
        self._laps = {}
        for size, runner in runners.items():
            runs = _windows_on(device, sequence, kept_bytes[size], memory_bytes)
            self._sweeps[size] = _Sweep(sequence, runner, runs)
            self._laps[size] = _Laps(defaultdict(list), [[] for _ in runs])

    def take(self, sizes: Sequence[int], *, counted: bool) -> None:
        """One sweep at each of these sizes; a size for which the memory is too small is left out from then on."""
        for size in sizes:
            if size not in self._sweeps:
                continue
            try:
                layers, uncut = self._sweeps[size].run(self._watch)
            except (MemoryError, RuntimeError) as problem:
                if not is_out_of_memory(problem):
                    raise
                warnings.warn(f"no memory for micro-batches of {size} samples; they are left out", stacklevel=3)
                self._sweeps.pop(size)
                self._watch.take()
                continue
            if counted:
                _note(self._sequence, self._laps[size], layers, uncut)
            self._sweep_done()

    def summaries(self) -> dict[int, list[LayerTiming]]:
        """The times of all layers, of each size that was swept at least once."""
        return {
            size: _summary(self._sequence, sweep.windows, self._laps[size])
            for size, sweep in self._sweeps.items()
            if self._laps[size].layers
        }


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that a device has no memory left."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and "not enough memory" in str(problem)  # of torch's CPU allocator


def _windows_on(
    device: torch.device, sequence: LayerSequence, kept_bytes: Sequence[int], memory_bytes: int
) -> list[range]:
    operations = [len(layer.operations) if device.type == "cuda" else 0 for layer in sequence.layers]
    return windows(list(zip(kept_bytes, operations, strict=True)), (memory_bytes, OPERATIONS_IN_CUDA_WINDOW))


def _note(sequence: LayerSequence, laps: _Laps, layers: Sequence[Pair], uncut: Sequence[Pair]) -> None:
    for index, pair in enumerate(layers):
        laps.layers[_key(sequence, index)].append(pair)
    for noted, pair in zip(laps.uncut, uncut, strict=True):
        noted.append(pair)


def _summary(sequence: LayerSequence, runs: Sequence[range], laps: _Laps) -> list[LayerTiming]:
    """Medians of the laps, scaled window by window to add up to the window's."""
    medians = {key: _medians(pairs) for key, pairs in laps.layers.items()}
    timings = []
    for window, uncut in zip(runs, laps.uncut, strict=True):
        keys = [_key(sequence, index) for index in window]
        together = [sum(column) for column in zip(*(medians[key] for key in keys), strict=True)]
        scales = [whole / parts if parts > 0 else 1.0 for whole, parts in zip(_medians(uncut), together, strict=True)]
        for key in keys:
            forward_s, backward_s = (scale * median for scale, median in zip(scales, medians[key], strict=True))
            spread = Timing.of([sum(pair) for pair in laps.layers[key]]).spread
            timings.append(LayerTiming(forward_s, backward_s, spread))
    return timings


def _medians(pairs: Sequence[Pair]) -> Pair:
    forward, backward = zip(*pairs, strict=True)
    return Timing.of(forward).median_s, Timing.of(backward).median_s


def windows(sizes: Sequence[tuple[int, ...]], limits: tuple[int, ...]) -> list[range]:
    """Runs of layers that stay within every limit; a layer that does not is a run by itself.

        >>> windows([(3,), (3,), (3,), (9,)], (6,))
        [range(0, 2), range(2, 3), range(3, 4)]

    Args:
        sizes: per layer one number for each limit.
        limits: what the numbers of a run may add up to.
    """
    starts, held = [0], (0,) * len(limits)
    for index, size in enumerate(sizes):
        together = tuple(map(sum, zip(held, size, strict=True)))
        if index > starts[-1] and any(sum_ > limit for sum_, limit in zip(together, limits, strict=True)):
            starts.append(index)
            together = size
        held = together
    return [range(first, stop) for first, stop in pairwise((*starts, len(sizes)))]


def _key(sequence: LayerSequence, index: int) -> _Key:
    """Equal for layers that take equally long; the last layer is its own, it computes the loss."""
    return sequence.layers[index].signature, index == len(sequence) - 1


class _Sweep:
    """One sweep after the other over all layers.

    Attributes:
        windows: of layers that are run forward and then backward.
    """

    def __init__(self, sequence: LayerSequence, runner: LayerRunner, runs: Sequence[range]) -> None:
        self.windows = runs
        self._runner = runner
        self._stages = [runner.stage(window.start, window.stop) for window in runs]
        readers = (layer.index for layer in sequence.layers if sequence.prelude_names & set(layer.values))
        self._first_reader = next(readers, 0)

    def run(self, watch: Stopwatch) -> tuple[list[Pair], list[Pair]]:
        """Seconds of each layer, where the first reader of the prelude is charged with it, and of each window."""
        watch.lap(self._runner.run_prelude)
        (prelude_s,) = watch.take()
        layers: list[Pair] = []
        uncut: list[Pair] = []
        values: dict[str, Tensor] = {}
        for window, stage in zip(self.windows, self._stages, strict=True):
            uncut.append(self._uncut(stage, values, watch))
            pairs, values = self._one_by_one(window, values, watch)
            if self._first_reader in window:
                forward_s, backward_s = pairs[self._first_reader - window.start]
                pairs[self._first_reader - window.start] = (forward_s + prelude_s, backward_s)
            layers.extend(pairs)
        return layers, uncut

    def _one_by_one(
        self, window: range, values: dict[str, Tensor], watch: Stopwatch
    ) -> tuple[list[Pair], dict[str, Tensor]]:
        kept: list[Kept] = []
        for index in window:
            entered = self._runner.enter(index, values)
            computed = watch.lap(partial(self._runner.forward, index, entered))
            leaving = self._runner.leaving(index, entered, computed)
            kept.append(keep(entered, leaving))
            values = {name: value.detach() for name, value in leaving.items()}
        del entered, computed, leaving
        forward = watch.take()
        gradients = {name: torch.ones_like(values[name]) for name in kept[-1].roots}
        while kept:
            passed = kept.pop()
            watch.lap(backward(passed, gradients))
            gradients = passed.caught
        return list(zip(forward, reversed(watch.take()), strict=True)), values

    def _uncut(self, stage: Stage, values: dict[str, Tensor], watch: Stopwatch) -> Pair:
        leaves = leaves_of(values, stage.function.entering)
        kept = Pass(leaves, {})
        leaving = watch.lap(lambda: self._runner.run_stage(stage, leaves))
        kept.roots = roots_of(leaving)
        gradients = {name: torch.ones_like(leaving[name]) for name in kept.roots}
        del leaving
        watch.lap(lambda: run_backward(kept, gradients))
        forward_s, backward_s = watch.take()
        return forward_s, backward_s
