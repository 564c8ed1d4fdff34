"""The balancer: K, cuts, M and recompute with the smallest step time, and how far from optimal that may be.

Every M that the batch allows is a candidate. For each, `planner.partition` finds the best cuts for every K at once.
Candidates are taken in the order of a cheap bound, and most end there:

1. sums: no plan is faster than the model's work spread evenly over the devices;
2. a probe: is there any partition whose bottleneck leaves room below the best plan so far? (greedy, one pass);
3. the exact bounds and search of `planner.partition`.

For an M that divides the batch the objective is the step time. For the others it is a lower bound, and
`gpipe_makespan_s` says what the cuts take; that difference, and nothing else, is where a gap comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.bounds import Choices, quick_bound_s
from planner.costs import Floats
from planner.micro_batches import MicroBatches
from planner.objective import StageTerms, gpipe_makespan_s
from planner.partition import TIE, Partition, best_partition
from planner.path_terms import boundary_s, mixed_terms, staying_terms, turning_terms
from planner.probe import cannot_win, work_bound_s
from planner.problem import Problem
from planner.stage_options import StageOptions, options_for_devices

MIXED_SHARES = (0.5,)
"""Weights of the staying paths in the lower bounds that are tried for unequal micro-batches [fitted]."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The balancer's answer.

    Attributes:
        split: how the mini-batch is cut.
        cuts: the K + 1 layer positions 0, ..., L.
        recomputed: for each stage whether it recomputes.
        step_s: seconds of the step, the optimizer included.
        lower_bound_s: no plan for the same problem is faster.
    """

    split: MicroBatches
    cuts: tuple[int, ...]
    recomputed: tuple[bool, ...]
    step_s: float
    lower_bound_s: float

    @property
    def _order(self) -> tuple[int, int, tuple[int, ...]]:
        return len(self.cuts), self.split.count, self.cuts

    def better_than(self, other: Balance | None) -> bool:
        """Whether it is faster; on a tie whether it has fewer stages, then fewer micro-batches, then earlier cuts."""
        if other is None or self.step_s < other.step_s * (1 - TIE):
            return True
        return self.step_s <= other.step_s * (1 + TIE) and self._order < other._order


def balance(problem: Problem) -> Balance | None:
    """The fastest plan.

    Returns:
        None when nothing fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    best: Balance | None = None
    lower_bound_s = np.inf
    for bound_s, split in _by_bound(problem):
        if best is not None and (bound_s > best.step_s * (1 + TIE) or cannot_win(problem, split, best.step_s)):
            continue
        found = _balance_for(problem, split, best)
        if found is None:
            continue
        lower_bound_s = min(lower_bound_s, found.lower_bound_s)
        if found.better_than(best):
            best = found
    if best is None:
        return None
    return Balance(best.split, best.cuts, best.recomputed, best.step_s, min(lower_bound_s, best.step_s))


def _by_bound(problem: Problem) -> list[tuple[float, MicroBatches]]:
    """Every candidate with a cheap lower bound of its step time, the most promising first."""
    bounds = [(work_bound_s(problem, split), split) for split in problem.candidates()]
    return sorted(bounds, key=lambda pair: (pair[0], pair[1].count))


def _balance_for(problem: Problem, split: MicroBatches, best: Balance | None) -> Balance | None:
    """The best plan with that M, or None when nothing fits or comes near the best plan so far."""
    options = options_for_devices(problem, split, problem.stage_numbers(split.count)[-1])
    below_s = np.inf if best is None else best.step_s * (1 + 2 * TIE)
    exact_stages = problem.stages is not None
    promising: tuple[float, list[Choices], int] | None = None
    for choices, steady in _objectives(problem, split, options):
        bound_s = quick_bound_s(choices, steady, exact_stages=exact_stages)
        if bound_s >= below_s:
            return None
        if promising is None or bound_s > promising[0]:
            promising = (bound_s, choices, steady)
    assert promising is not None
    partition = best_partition(*promising[1:], exact_stages=exact_stages, below_s=below_s)
    if partition is None:
        return None
    return _balance_of(problem, split, options, partition)


def _objectives(
    problem: Problem, split: MicroBatches, options: list[StageOptions]
) -> Iterator[tuple[list[Choices], int]]:
    """The objective for equal micro-batches; several lower bounds of it, with their steady counts, for unequal ones."""
    distinct = {id(option): option for option in options}
    staying = {key: staying_terms(problem, split, option) for key, option in distinct.items()}
    yield _choices(options, staying), split.count - 1
    if split.equal:
        return
    turning = {key: turning_terms(problem, split, option) for key, option in distinct.items()}
    for share in MIXED_SHARES:
        yield _choices(options, {key: mixed_terms(staying[key], turning[key], split, share) for key in distinct}), 1


def _choices(options: list[StageOptions], terms: dict[int, StageTerms]) -> list[Choices]:
    shared = {id(option): Choices(option.fits, terms[id(option)]) for option in options}
    return [shared[id(option)] for option in options]


def _balance_of(problem: Problem, split: MicroBatches, options: list[StageOptions], partition: Partition) -> Balance:
    cuts = partition.cuts
    step_s = exact_step_s(problem, split, cuts, options)
    recomputed = tuple(
        bool(option.recomputed[first, stop]) for option, (first, stop) in zip(options, pairwise(cuts), strict=False)
    )
    return Balance(split, cuts, recomputed, step_s, min(partition.bound_s, step_s))


def exact_step_s(problem: Problem, split: MicroBatches, cuts: tuple[int, ...], options: list[StageOptions]) -> float:
    """Seconds of the step for these cuts."""
    large, small = (_stage_seconds(problem, size, cuts, options) for size in (split.largest, split.smallest))
    number = split.number_largest
    seconds = np.concatenate(
        (np.repeat(large[..., None], number, axis=2), np.repeat(small[..., None], split.count - number, axis=2)), axis=2
    )
    optimizer_s = max(
        problem.costs.optimizer(option.device.kind, problem.optimizer).seconds_per_byte
        * problem.parameters.trainable[first, stop]
        for option, (first, stop) in zip(options, pairwise(cuts), strict=False)
    )
    return gpipe_makespan_s(*seconds) + float(optimizer_s)


def _stage_seconds(problem: Problem, size: int, cuts: tuple[int, ...], options: list[StageOptions]) -> Floats:
    """Forward, recompute, backward, send forward and send backward of every stage, shape (5, K)."""
    outputs, gradients = boundary_s(problem, size)
    rows = []
    for stage, (first, stop) in enumerate(pairwise(cuts)):
        costs = problem.costs.layers(problem.devices[stage].kind, size)
        again = costs.recompute_s[first:stop].sum() if options[stage].recomputed[first, stop] else 0.0
        rows.append(
            (
                costs.forward_s[first:stop].sum(),
                again,
                costs.backward_s[first:stop].sum(),
                outputs[stop],
                gradients[first],
            )
        )
    return np.array(rows).T
