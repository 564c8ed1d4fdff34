"""Cheap reasons why an M cannot win, without looking at all stages: most M end here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs import Floats, prefix_sums
from planner.micro_batches import MicroBatches
from planner.path_terms import steady_mean
from planner.problem import Problem
from profiler.device import Device


def work_bound_s(problem: Problem, split: MicroBatches) -> float:
    """A step time that no plan with that M is below: even shares of the least work, and the largest layer.

    Device d is at least ratio[d] times as slow as the first one on every layer, so the shares weigh by 1 / ratio.
    """
    devices = problem.devices[: problem.stage_numbers(split.count)[-1]]
    layer_work = np.stack([np.diff(_least_work(problem, device, split)) for device in devices])
    largest = float(layer_work.min(axis=0).max())
    counted = layer_work[0] > 0
    ratio = np.min(layer_work[:, counted] / layer_work[0, counted], axis=1, initial=np.inf)
    shares = np.sum(1 / ratio) if (ratio > 0).all() else np.inf
    even = float(layer_work[0].sum() / shares) if shares else 0.0
    return _passing_s(problem, split) + (split.count - 1) * max(largest, even)


def cannot_win(problem: Problem, split: MicroBatches, step_s: float) -> bool:
    """Whether no partition with that M has a bottleneck small enough for a step time up to `step_s`.

    The bottlenecks of forward and backward phase are together at least the largest f + b + r of a stage, and a stage
    is recomputed at least where what it keeps alone is too much. A part of a stage below that cap stays below it, so
    giving each stage in turn as many layers as the cap allows reaches as far as any partition.
    """
    if split.count == 1:
        return False
    cap_s = (step_s - _passing_s(problem, split)) / (split.count - 1) * (1 + 1e-9)
    reaches: dict[tuple[str, int], _Reach] = {}
    position = 0
    for device in problem.devices[: problem.stage_numbers(split.count)[-1]]:
        key = (device.kind, device.memory_bytes)
        if key not in reaches:
            reaches[key] = _reach_of(problem, device, split)
        position = reaches[key].stop(problem, position, cap_s)
    return position < problem.layers


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """What decides how far a stage can reach on a device; arrays of shape (L + 1,) are prefix sums.

    Attributes:
        device: where the stage runs.
        kept: seconds of forward and backward for a steady micro-batch.
        again: the same with recompute.
        held_bytes: bytes that all micro-batches keep.
        state_bytes_per_byte: of the optimizer.
    """

    device: Device
    kept: Floats
    again: Floats
    held_bytes: Floats
    state_bytes_per_byte: float

    def stop(self, problem: Problem, first: int, cap_s: float) -> int:
        """The last layer position that a stage from `first` can reach with at most `cap_s` for a micro-batch."""
        again = _last_up_to(self.again, self.again[first] + cap_s)
        if problem.recompute == "always":
            return again
        fitting = self._last_kept(problem, first)
        kept = min(_last_up_to(self.kept, self.kept[first] + cap_s), fitting)
        return kept if problem.recompute == "never" else max(kept, again)

    def _last_kept(self, problem: Problem, first: int) -> int:
        """The last position up to which a stage from `first` may fit without recompute: it needs at least this."""
        held = problem.parameters
        least_bytes = (
            held.unique[first]
            + held.buffers[first]
            + held.gradients[first]
            + self.state_bytes_per_byte * held.trainable[first]
            + (self.held_bytes - self.held_bytes[first])
        )
        always_bytes = problem.costs.profile.reserve_bytes + problem.batch_size * problem.costs.profile.input_bytes
        return first + _last_up_to(least_bytes[first:], float(self.device.memory_bytes - always_bytes))


def _reach_of(problem: Problem, device: Device, split: MicroBatches) -> _Reach:
    large, small = (problem.costs.layers(device.kind, size) for size in (split.largest, split.smallest))
    number_small = split.count - split.number_largest
    kept = steady_mean(split, large.forward_s + large.backward_s, small.forward_s + small.backward_s)
    return _Reach(
        device=device,
        kept=prefix_sums(kept),
        again=prefix_sums(kept + steady_mean(split, large.recompute_s, small.recompute_s)),
        held_bytes=prefix_sums(
            split.number_largest * large.in_stage.least_kept() + number_small * small.in_stage.least_kept()
        ),
        state_bytes_per_byte=problem.costs.optimizer(device.kind, problem.optimizer).state_bytes_per_byte,
    )


def _last_up_to(ascending: Floats, limit: float) -> int:
    """Position of the last value up to `limit`; 0 when there is none."""
    return max(0, int(np.searchsorted(ascending, limit, side="right")) - 1)


def _least_work(problem: Problem, device: Device, split: MicroBatches) -> Floats:
    """Prefix sums of what a steady micro-batch takes on the device, whether or not stages recompute."""
    reach = _reach_of(problem, device, split)
    return reach.again if problem.recompute == "always" else reach.kept


def _passing_s(problem: Problem, split: MicroBatches) -> float:
    """Seconds that one micro-batch takes through all layers, at least."""
    layers = []
    for device in problem.devices[: problem.stage_numbers(split.count)[-1]]:
        large, small = (problem.costs.layers(device.kind, size) for size in (split.largest, split.smallest))
        layers.append(np.minimum(large.forward_s, small.forward_s) + np.minimum(large.backward_s, small.backward_s))
    return float(np.min(layers, axis=0).sum())
