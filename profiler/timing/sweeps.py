"""Timing layers where they stand: sweeps over the whole sequence, each layer timed by itself.

A layer that is called many times with the same tensors finds them in the cache and seems faster than it is in
training. So a sweep runs all layers forward and then all backward, as training does, with a lap of the stopwatch for
each; equal layers share their laps. A second run of the same layers as one stage says what they take together, without
a call, an autograd graph and a Python frame for each: single layers are corrected so that they add up to that. Where
no second is given to repeat sweeps, layers that take long go without it.

    forward    | 0 | 1 | 2 | 3 | loss |                       | uncut |
    backward                          | 3 | 2 | 1 | 0 |               | uncut |

The device's pace is watched meanwhile, and drift divided out: `profiler.timing.pace`.

Where the device cannot hold what all layers keep at once, or not their parameters, a sweep goes through windows of
layers that it can hold. Of many equal layers a few are swept, see `profiler.run.sampled_layers`.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from profiler.left_out_sizes import Refusals
from profiler.machine.backend import backend_of
from profiler.machine.stopwatches import Watch
from profiler.observe.allocator_record import KernelMemory
from profiler.run.layer_runner import Kept, LayerRunner, backward, keep
from profiler.run.parameter_pool import ParameterPool
from profiler.run.sampled_layers import BoundaryValues, swept_layers, windows
from profiler.run.stage_function import KeptPass, leaves_of, roots_of, run_backward
from profiler.timing.pace import PacedStopwatch
from profiler.timing.repeats import Timing, collecting_no_garbage, rounds
from profiler.tracing.sequence import LayerSequence

FIRST_SIZES = 3  # swept before the others
FEWEST_SWEEPS = 3
MOST_SWEEPS = 9
LONG_SWEEP_S = 1.0  # of a processor; one such is enough where no second is given to repeat it [chosen]
LONG_LAYER_S = 0.01  # of a processor; to call one that takes longer costs next to nothing [chosen]
MOST_OF_A_LAYER = 0.5  # of the shortest one may be the cost of calling it


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Times of one layer.

    Attributes:
        forward_s: median of forward passes, as part of a stage.
        backward_s: median of backward passes, as part of a stage.
        spread: interquartile range of forward and backward together, as a share of their median.
        slowdown: by what share all laps took longer than at the device's usual pace, which the times are given at.
        drift: by what share nine of ten steps differ from that pace, on a device without other work.
        workspace_bytes: the most that a kernel allocated inside itself; None where nobody looked.
        weight_s: the part of `backward_s` that can be a pass of its own.
        split_s: by how much all passes together take longer if it is one.
        weight_kept_bytes: what lives from the rest of the backward pass until that one.
    """

    forward_s: float
    backward_s: float
    spread: float
    slowdown: float = 0.0
    drift: float = 0.0
    workspace_bytes: int | None = None
    weight_s: float = 0.0
    split_s: float = 0.0
    weight_kept_bytes: int = 0


Pair: TypeAlias = tuple[float, float]  # seconds of a forward and of a backward pass
_Key: TypeAlias = tuple[str, bool, bool]


@dataclass(slots=True)
class _Laps:
    """What the sweeps at one micro-batch size took.

    Attributes:
        layers: by key the laps of all layers with that key.
        uncut: by window the laps of all its layers as one stage.
        workspace_bytes: by key the most that a kernel allocated inside itself.
    """

    layers: dict[_Key, list[Pair]]
    uncut: list[list[Pair]]
    workspace_bytes: dict[_Key, int]


@dataclass(frozen=True, slots=True, eq=False)
class TimedLayers:
    """Layers that are ready to be timed on one device.

    Attributes:
        sequence: the layers.
        pool: where the runners have their parameters.
        runners: by size; with a micro-batch of that size, on real tensors.
        kept_bytes: by size; what each layer keeps for its backward pass.
        device: where the tensors are.
        memory_bytes: what a window's parameters, their gradients and all that it keeps may occupy together.
    """

    sequence: LayerSequence
    pool: ParameterPool
    runners: Mapping[int, LayerRunner]
    kept_bytes: Mapping[int, Sequence[int]]
    device: torch.device
    memory_bytes: int

    def runs(self, kept_bytes: Sequence[int], besides_bytes: int = 0) -> list[range]:
        """Windows of layers to sweep.

        Args:
            kept_bytes: by layer, what it keeps for its backward pass.
            besides_bytes: of the device's memory, what is taken by others.
        """
        most_enqueued = backend_of(self.device).most_enqueued
        launches = [0 if most_enqueued is None else len(layer.operations) for layer in self.sequence.layers]
        placed = [self.pool.bytes_of(index) for index in range(len(self.sequence))]
        held = [sum(pair) for pair in zip(kept_bytes, placed, strict=True)]
        limits = (self.memory_bytes - besides_bytes, most_enqueued or 0, self.pool.capacity_bytes)
        swept = swept_layers(_keys(self.sequence), held)
        return windows(swept, list(zip(held, launches, placed, strict=True)), limits)


def time_layers(
    layers: TimedLayers, refusals: Refusals, *, budget_s: float, sweep_done: Callable[[], object] = lambda: None
) -> dict[int, list[LayerTiming]]:
    """Time every layer on micro-batches of several sizes, which take turns: a slow moment of the machine hits all.

    Args:
        layers: what is timed, and on which device.
        refusals: takes the sizes that cannot be run.
        budget_s: seconds after which no further sweep starts; at least `FEWEST_SWEEPS` of each size run, and one where
            no second is given and a sweep takes more than `LONG_SWEEP_S`.
        sweep_done: called after each sweep, at most `1 + MOST_SWEEPS` times for each size.

    Returns:
        The times by size. A size that cannot be run is missing. Interrupted from the keyboard, the sizes
        that were swept by then: the first `FIRST_SIZES` of the runners' come first.
    """
    turns = _Turns(layers, refusals, sweep_done)
    sizes = list(layers.runners)
    start = time.perf_counter()
    try:
        with collecting_no_garbage():
            for group in (sizes[:FIRST_SIZES], sizes[FIRST_SIZES:]):
                begin = time.process_time()  # whatever else the machine does
                brief = not budget_s
                for number in range(1 + FEWEST_SWEEPS):
                    taken = turns.take(group, counted=number > 0, brief=brief)  # first it warms up, memory is watched
                    if not number:
                        brief = not budget_s and time.process_time() - begin > LONG_LAYER_S * taken
                    taken_s = (time.process_time() - begin) / (number + 1)
                    if number > 0 and not budget_s and taken_s > LONG_SWEEP_S * len(group):
                        break
            left_s = budget_s - (time.perf_counter() - start)
            for _ in rounds(at_least=0, at_most=MOST_SWEEPS - FEWEST_SWEEPS, budget_s=left_s):
                turns.take(sizes, counted=True, brief=False)
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

    def __init__(self, layers: TimedLayers, refusals: Refusals, sweep_done: Callable[[], object]) -> None:
        sequence = layers.sequence
        self._keys = _keys(sequence)
        self._pool = layers.pool
        self._device = layers.device
        self._refusals = refusals
        self._backend = backend_of(layers.device)
        self._watch = PacedStopwatch(self._backend.stopwatch(layers.device), layers.device, layers.memory_bytes)
        self._sweep_done = sweep_done
        self._sweeps: dict[int, _Sweep] = {}
        self._laps: dict[int, _Laps] = {}
        for size, runner in layers.runners.items():
            runs = layers.runs(layers.kept_bytes[size], self._watch.reference_bytes)
            self._sweeps[size] = _Sweep(sequence, runner, runs, self._keys)
            self._laps[size] = _Laps(defaultdict(list), [[] for _ in runs], {})

    def take(self, sizes: Sequence[int], *, counted: bool, brief: bool) -> int:
        """One sweep at each of these sizes; one that cannot be run is left out from then on.

        Args:
            sizes: of micro-batches.
            counted: timed; otherwise what kernels allocate is watched.
            brief: without the layers' run as one stage.

        Returns:
            How many layers were run.
        """
        taken = 0
        for size in sizes:
            if size not in self._sweeps:
                continue
            self._pool.tidy()
            with self._refusals.noting(size):
                if counted:
                    self._note(self._laps[size], *self._sweeps[size].run(self._watch, brief))
                else:
                    self._warm_up(size, brief)
                self._sweep_done()
                taken += sum(map(len, self._sweeps[size].windows))
                continue
            self._sweeps.pop(size)
            self._watch.take()
        return taken

    def _warm_up(self, size: int, brief: bool) -> None:
        if not self._backend.can_watch():
            self._sweeps[size].run(self._watch, brief)
            return
        layers, _ = self._sweeps[size].run(KernelMemory(self._device), brief)
        found = self._laps[size].workspace_bytes
        for index, pair in layers.items():
            found[self._keys[index]] = max(found.get(self._keys[index], 0), *map(int, pair))

    def _note(self, laps: _Laps, layers: Mapping[int, Pair], uncut: Sequence[Pair]) -> None:
        for index, pair in layers.items():
            laps.layers[self._keys[index]].append(pair)
        for noted, pair in zip(laps.uncut, uncut, strict=True):
            noted.append(pair)

    def summaries(self) -> dict[int, list[LayerTiming]]:
        """The times of all layers, of each size that was swept at least once."""
        scale, slowdown, drift = self._watch.to_usual, self._watch.slowdown, self._watch.drift
        return {
            size: [
                replace(
                    timing,
                    forward_s=timing.forward_s * scale,
                    backward_s=timing.backward_s * scale,
                    slowdown=slowdown,
                    drift=drift,
                )
                for timing in _summary(self._keys, sweep.windows, self._laps[size])
            ]
            for size, sweep in self._sweeps.items()
            if self._laps[size].layers
        }


def _summary(keys: Sequence[_Key], runs: Sequence[range], laps: _Laps) -> list[LayerTiming]:
    """Medians of the laps, corrected by window to add up to the window's; of layers left out, what equal ones take.

    The medians of one key are the same in all windows, the corrections are not.
    """
    medians = {key: _medians(pairs) for key, pairs in laps.layers.items()}
    spreads = {key: Timing.of([sum(pair) for pair in pairs]).spread for key, pairs in laps.layers.items()}
    scaled: dict[int, Pair] = {}
    of_key: dict[_Key, list[Pair]] = defaultdict(list)
    for window, uncut in zip(runs, laps.uncut, strict=True):
        columns = zip(*(medians[keys[index]] for index in window), strict=True)
        together = [_as_one(parts, whole) for parts, whole in zip(columns, _medians(uncut), strict=True)]
        for index, forward_s, backward_s in zip(window, *together, strict=True):
            scaled[index] = (forward_s, backward_s)
            of_key[keys[index]].append((forward_s, backward_s))
    means = {key: (fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)) for key, pairs in of_key.items()}
    return [
        LayerTiming(*scaled.get(index, means[key]), spreads[key], workspace_bytes=laps.workspace_bytes.get(key))
        for index, key in enumerate(keys)
    ]


def _as_one(parts: Sequence[float], whole: float) -> list[float]:
    """Times of layers as they are within one stage, which takes `whole` seconds.

    A call, an autograd graph and a Python frame cost a small layer as much as a large one, and no layer takes less; so
    a surplus of the single layers is taken from all alike first. What is left of the difference grows with the layer.
    """
    surplus = max(0.0, sum(parts) - whole) / len(parts)
    own = [part - min(surplus, MOST_OF_A_LAYER * min(parts)) for part in parts]
    scale = whole / sum(own) if sum(own) > 0 else 1.0
    return [scale * part for part in own]


def _medians(pairs: Sequence[Pair]) -> Pair:
    forward, backward = zip(*pairs, strict=True)
    return Timing.of(forward).median_s, Timing.of(backward).median_s


def _keys(sequence: LayerSequence) -> list[_Key]:
    """Equal for layers that take equally long; the last one computes the loss, readers of the prelude bear it."""
    last, readers = len(sequence) - 1, _readers(sequence)
    return [(layer.signature, layer.index == last, layer.index in readers) for layer in sequence.layers]


def _readers(sequence: LayerSequence) -> list[int]:
    """Layers that read values of the prelude; each stage computes those that its own layers read."""
    return [layer.index for layer in sequence.layers if not sequence.prelude_names.isdisjoint(layer.values)]


class _Sweep:
    """One sweep after the other.

    Attributes:
        windows: of layers that are run forward and then backward.
    """

    def __init__(
        self, sequence: LayerSequence, runner: LayerRunner, runs: Sequence[range], keys: Sequence[_Key]
    ) -> None:
        self.windows = runs
        self._runner = runner
        self._readers = _readers(sequence)
        self._boundary_values = BoundaryValues(sequence, keys, [index for window in runs for index in window])

    def run(self, watch: Watch, brief: bool) -> tuple[dict[int, Pair], list[Pair]]:
        """Seconds of each layer, where the readers of the prelude are charged with it alike, and of each window.

        A brief one takes for the window what its layers take one by one.
        """
        watch.lap(self._runner.run_prelude, (self, "prelude"))
        (prelude_s,) = watch.take()
        layers: dict[int, Pair] = {}
        uncut: list[Pair] = []
        values: dict[str, Tensor] = {}
        reached = 0
        for window in self.windows:
            values = self._boundary_values.pass_over(reached, window.start, values)
            self._runner.hold(window)
            if not brief:
                uncut.append(self._uncut(window, values, watch))
            pairs, values = self._one_by_one(window, values, watch)
            if brief:
                forward, backward = zip(*pairs, strict=True)
                uncut.append((sum(forward), sum(backward)))
            layers.update(zip(window, pairs, strict=True))
            reached = window.stop
        self._boundary_values.clear()
        for index in layers.keys() & set(self._readers):
            forward_s, backward_s = layers[index]
            layers[index] = (forward_s + prelude_s / len(self._readers), backward_s)
        return layers, uncut

    def _one_by_one(
        self, window: range, values: dict[str, Tensor], watch: Watch
    ) -> tuple[list[Pair], dict[str, Tensor]]:
        kept: list[Kept] = []
        for index in window:
            entered = self._runner.enter(index, values)
            computed = watch.lap(partial(self._runner.forward, index, entered), (self, index, "forward"))
            self._boundary_values.note(index, computed)
            leaving = self._runner.leaving(index, entered, computed)
            kept.append(keep(entered, leaving))
            values = {name: value.detach() for name, value in leaving.items()}
        del entered, computed, leaving
        forward = watch.take()
        gradients = {name: torch.ones_like(values[name]) for name in kept[-1].roots}
        for index in reversed(window):
            passed = kept.pop()
            watch.lap(backward(passed, gradients), (self, index, "backward"))
            gradients = passed.caught
        return list(zip(forward, reversed(watch.take()), strict=True)), values

    def _uncut(self, window: range, values: dict[str, Tensor], watch: Watch) -> Pair:
        layers = self._runner.uncut(window.start, window.stop)
        leaves = leaves_of(values, layers.function.entering)
        kept = KeptPass(leaves, {})
        leaving = watch.lap(lambda: self._runner.run_uncut(layers, leaves), (self, window, "forward"))
        kept.roots = roots_of(leaving)
        gradients = {name: torch.ones_like(leaving[name]) for name in kept.roots}
        del leaving
        watch.lap(lambda: run_backward(kept, gradients), (self, window, "backward"))
        forward_s, backward_s = watch.take()
        return forward_s, backward_s
