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
from planner.plan.schedules import SCHEDULES
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
    if SCHEDULES[plans.candidate.schedule].made_for_plan:
        program.note_any_order()
        bound_s, seconds = program.solved()
        return ChunkBound(bound_s * CERTAINTY + end_s, seconds[: plans.stages])
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
    """The linear program: seconds of all stages for each kind of pass, and above all paths the makespan.

    Args:
        plans: of the candidate.
    """

    def __init__(self, plans: ChunkPlans) -> None:
        candidate, stages = plans.candidate, plans.stages
        count, many = candidate.split.count, candidate.split.number_largest
        self._orders = orders_of(candidate.schedule, plans.ranks, count, candidate.ring.chunks)
        layers = [np.diff(sums, axis=-1).min(axis=1) for sums in plans.passes_s]  # (2 sizes, L) each
        larger = np.arange(count) < many
        self._split = candidate.split
        self._shares = np.array([np.where(larger, 1.0, _least_ratio(small, large)) for large, small in layers])
        cuts = np.flatnonzero(plans.problem.rules.allowed)[1:-1]
        least = [
            (0.0, 0.0) if plans.ranks == 1 else sums[:, cuts].min(axis=1)
            for sums in (plans.outputs_s, plans.gradients_s)
        ]
        self._sends = np.array([np.where(larger, large, small) for large, small in least])
        self._scale_s = float(sum(one[0].sum() for one in layers))  # numbers near one for the solver
        scaled = np.array([one[0] / self._scale_s for one in layers])
        self._kinds, self._stages = len(layers), stages
        self._rows: list[Floats] = []
        self._limits: list[float] = []
        self._totals, self._least = scaled.sum(axis=1), scaled.min(axis=1)
        self._order_of_layers(scaled)

    def _row(self, weights: Floats, makespan: float, limit: float) -> None:
        """One condition: the sum weighted so, of shape (kinds, K), is at most the limit."""
        self._rows.append(np.append(weights, makespan))
        self._limits.append(limit)

    def _order_of_layers(self, layers: Floats) -> None:
        """What cuts could give, of seconds of each kind of pass and layer."""
        sums = prefix_sums(layers)
        for stage in range(self._stages):
            for other in range(1, self._kinds):
                for upper, lower in ((other, 0), (0, other)):
                    ratio = np.zeros((self._kinds, self._stages))
                    ratio[lower, stage], ratio[upper, stage] = _least_ratio(layers[upper], layers[lower]), -1.0
                    self._row(ratio, 0.0, 0.0)
            if stage == self._stages - 1:
                continue
            after = layers.shape[1] - (self._stages - 1 - stage)
            for kind, total in enumerate(sums):
                first = np.zeros((self._kinds, self._stages))
                first[kind, : stage + 1] = 1.0
                self._row(-first, 0.0, -float(total[stage + 1]))
                self._row(first, 0.0, float(total[after]))

    def even(self) -> Floats:
        """Equal seconds of all stages, shape (kinds K,)."""
        return np.repeat(self._totals / self._stages, self._stages) * self._scale_s

    def note_path(self, seconds: Floats) -> float:
        """Add the longest path for these seconds, shape (kinds K,); its length."""
        each = np.ascontiguousarray(seconds.reshape(self._kinds, self._stages))
        length_s, links_s, on_path = longest_path(self._orders, each, self._shares, self._sends)
        self._row(on_path, -1.0, -links_s / self._scale_s)
        return length_s

    def note_any_order(self) -> None:
        """Add paths that there are in any order of passes, see `planner.solve.any_order`."""
        totals = self._shares.sum(axis=1)
        last = self._shares[:, -1]
        forward, backward, weights = range(3)
        for stage in range(self._stages):
            path = np.zeros((3, self._stages))
            path[forward, :stage] = 1.0
            path[forward, stage], path[backward, stage] = totals[forward], totals[backward]
            there_s = stage * self._sends[0, 0]
            own = path.copy()
            own[weights, stage] = totals[weights]
            self._row(own, -1.0, -there_s / self._scale_s)
            path[backward, :stage] = last[backward]
            path[weights, 0] += last[weights]
            self._row(path, -1.0, -(there_s + stage * self._sends[1, -1]) / self._scale_s)

    def solved(self) -> tuple[float, Floats]:
        """The least makespan above all paths so far, and the seconds of the stages that have it."""
        count = self._stages
        whole = np.zeros((self._kinds, self._kinds * count + 1))
        for kind in range(self._kinds):
            whole[kind, kind * count : (kind + 1) * count] = 1.0
        answer = linprog(
            np.r_[np.zeros(self._kinds * count), 1.0],
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
