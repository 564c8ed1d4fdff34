"""What no plan with several chunks a rank takes less than, whatever its cuts; and the cuts that it would have.

The makespan is a convex function of the stages' seconds (`planner.kernel.critical_path`). Its minimum over all seconds
that cuts could give, and some more, is a lower bound. It is found by cutting planes (Kelley, J. SIAM 8, 1960): a linear
program asks which seconds are best as far as the paths known so far say; the longest path there is one path more. Each
program's value is a lower bound, and they rise to the minimum.

What cuts could give: stages hold all layers in order, each at least one, so sums over the first stages lie between
those of as many layers and of all but as many as must follow; and no stage has a ratio of backward to forward seconds
beyond the layers'. Of unlike devices and of boundaries the cheapest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from planner.cost.layer_costs import Floats, prefix_sums
from planner.cost.time_ledger import end_s
from planner.kernel.critical_path import longest_path
from planner.kernel.makespan import orders_of
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.deadline import Deadline

MOST_PROGRAMS = 60
"""Linear programs of one bound [chosen: 1 s for 32 stages]."""
CLOSE = 1e-3
"""Relative distance to the minimum at which a bound is good enough [chosen]."""
CERTAINTY = 1 - 1e-6
"""Factor that leaves room for the tolerance of linear programs."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBound:
    """A lower bound of all plans of one candidate.

    Attributes:
        step_s: no plan takes less.
        forward_s: seconds that each stage would best have in its forward pass, shape (K,).
    """

    step_s: float
    forward_s: Floats


def least_s(plans: ChunkPlans) -> float:
    """A cheap bound: an even share of the work, on the device that is fastest with each layer."""
    work = np.diff(plans.forward_s + plans.backward_s, axis=-1).min(axis=1).sum(axis=1)
    many = plans.candidate.split.number_largest
    total = many * work[0] + (plans.candidate.split.count - many) * work[1]
    return CERTAINTY * float(total / plans.ranks) + _end_s(plans)


def chunk_bound(plans: ChunkPlans, deadline: Deadline, enough_s: float = np.inf) -> ChunkBound:
    """The bound of a candidate; once it is above `enough_s` nobody asks how far."""
    program = _Program(plans)
    end_s = _end_s(plans)
    best_s, bound_s = np.inf, 0.0
    seconds = best = program.even()
    for _ in range(MOST_PROGRAMS):
        length_s = program.note_path(seconds)
        if length_s < best_s:
            best_s, best = length_s, seconds
        bound_s, seconds = program.solved()
        done = best_s <= bound_s * (1 + CLOSE) or bound_s * CERTAINTY + end_s > enough_s
        if done or deadline.over:
            break
    return ChunkBound(bound_s * CERTAINTY + end_s, best[: plans.stages])


def _end_s(plans: ChunkPlans) -> float:
    """All-reduce and optimizer step of the slowest rank, if the ranks shared the parameters evenly."""
    problem = plans.problem
    trainable = float(problem.parameters.trainable[0, -1]) / plans.ranks
    ends = [
        sum(byte_s for _, byte_s in end_s(problem.end_figures(group.device.kind, plans.candidate.replicas)).values())
        for group in problem.classes
    ]
    return trainable * min(ends)


class _Program:
    """The linear program: seconds of all stages forward and backward, and above all paths the makespan.

    Args:
        plans: of the candidate.
    """

    def __init__(self, plans: ChunkPlans) -> None:
        candidate, stages = plans.candidate, plans.stages
        count, many = candidate.split.count, candidate.split.number_largest
        self._orders = orders_of(candidate.schedule, plans.ranks, count, candidate.ring.chunks)
        layers = [np.diff(sums, axis=-1).min(axis=1) for sums in (plans.forward_s, plans.backward_s)]  # (2 sizes, L)
        larger = np.arange(count) < many
        self._shares = np.array([np.where(larger, 1.0, _least_ratio(small, large)) for large, small in layers])
        cuts = np.flatnonzero(plans.problem.rules.allowed)[1:-1]
        least = [
            (0.0, 0.0) if plans.ranks == 1 else sums[:, cuts].min(axis=1)
            for sums in (plans.outputs_s, plans.gradients_s)
        ]
        self._sends = np.array([np.where(larger, large, small) for large, small in least])
        self._scale_s = float(layers[0][0].sum() + layers[1][0].sum())  # numbers near one for the solver
        forward, backward = layers[0][0] / self._scale_s, layers[1][0] / self._scale_s
        self._stages = stages
        self._rows: list[Floats] = []
        self._limits: list[float] = []
        self._totals = np.array([forward.sum(), backward.sum()])
        self._least = np.array([forward.min(), backward.min()])
        self._order_of_layers(forward, backward)

    def _row(self, forward: Floats, backward: Floats, makespan: float, limit: float) -> None:
        """One condition: the weighted sum is at most the limit."""
        self._rows.append(np.concatenate((forward, backward, [makespan])))
        self._limits.append(limit)

    def _order_of_layers(self, forward: Floats, backward: Floats) -> None:
        """What cuts could give."""
        none, number = np.zeros(self._stages), len(forward)
        sums = prefix_sums(forward), prefix_sums(backward)
        for stage in range(self._stages):
            own = none.copy()
            own[stage] = 1.0
            self._row(_least_ratio(backward, forward) * own, -own, 0.0, 0.0)
            self._row(-own, _least_ratio(forward, backward) * own, 0.0, 0.0)
            if stage == self._stages - 1:
                continue
            first = np.where(np.arange(self._stages) <= stage, 1.0, 0.0)
            after = number - (self._stages - 1 - stage)
            for place, total in enumerate(sums):
                weights = (first, none) if place == 0 else (none, first)
                self._row(-weights[0], -weights[1], 0.0, -float(total[stage + 1]))
                self._row(weights[0], weights[1], 0.0, float(total[after]))

    def even(self) -> Floats:
        """Equal seconds of all stages, shape (2 K,)."""
        return np.repeat(self._totals / self._stages, self._stages) * self._scale_s

    def note_path(self, seconds: Floats) -> float:
        """Add the longest path for these seconds, shape (2 K,); its length."""
        forward, backward = seconds[: self._stages], seconds[self._stages :]
        length_s, links_s, on_forward, on_backward = longest_path(
            self._orders, forward, backward, self._shares, self._sends
        )
        self._row(on_forward, on_backward, -1.0, -links_s / self._scale_s)
        return length_s

    def solved(self) -> tuple[float, Floats]:
        """The least makespan above all paths so far, and the seconds of the stages that have it."""
        count = self._stages
        whole = np.zeros((2, 2 * count + 1))
        whole[0, :count] = whole[1, count:-1] = 1.0
        answer = linprog(
            np.r_[np.zeros(2 * count), 1.0],
            A_ub=np.array(self._rows),
            b_ub=self._limits,
            A_eq=whole,
            b_eq=self._totals,
            bounds=[(float(least), None) for least in np.repeat(self._least, count)] + [(0.0, None)],
            method="highs",
        )
        if answer.status != 0 or answer.fun is None or answer.x is None:
            raise AssertionError(f"a linear program that has a solution ends with: {answer.message}")
        seconds: Floats = answer.x[:-1] * self._scale_s
        return float(answer.fun) * self._scale_s, seconds


def _least_ratio(upper: Floats, lower: Floats) -> float:
    """The least that `upper` is of `lower`, over the layers where `lower` is not 0."""
    counted = lower > 0
    return float(np.min(upper[counted] / lower[counted], initial=np.inf)) if counted.any() else 0.0
