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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import OptimizeResult, linprog

from planner.cost.layer_costs import Floats, LayerSeconds, prefix_sums
from planner.cost.stage_sums import pooled_bytes
from planner.cost.time_ledger import end_s, layer_seconds
from planner.kernel.critical_path import longest_path
from planner.kernel.turns import turns_of
from planner.plan.schedules import SCHEDULES
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.deadline import Deadline
from planner.solve.work_bound import work_bound_s

MOST_PROGRAMS = 60
"""Linear programs of one bound [chosen: 1 s for 32 stages]."""
LONGER, LESS = 1.3, 0.5
"""By what a stage's seconds differ from the mean in the first paths [fitted]."""
MOST_SEED_PASSES = 4_000_000
"""Passes that the first paths of a bound may look at together [chosen: 0.1 s]."""
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
    """A cheap bound: an even share of the work, and what the rank with each layer has to do.

    Of unlike devices the fastest with each layer counts. Whatever the order of its passes, the first micro-batch comes to
    a layer through all layers before it, and the last gradient goes back through them, while gradients of parameters
    may wait (see `planner.solve.any_order`).
    """
    split = plans.candidate.split
    passes = [[np.diff(sums, axis=-1).min(axis=0) for sums in sized] for sized in zip(*plans.passes_s, strict=True)]
    many = split.number_largest, split.count - split.number_largest
    total = [sum(number * one for number, one in zip(many, kind, strict=True)) for kind in zip(*passes, strict=True)]
    forward, backward = (prefix_sums(np.minimum(*kind))[:-1] for kind in list(zip(*passes, strict=True))[:2])
    weights = total[2] if len(total) > 2 else 0.0
    own = forward + total[0] + total[1] + np.maximum(weights, backward)
    share_s = float(np.sum(total)) / plans.ranks
    return CERTAINTY * max(share_s, float(own.max())) + _end_s(plans)


def has_room(plans: ChunkPlans) -> bool:
    """Whether the ranks together have room for what stages hold whatever the cuts: parameters and what follows them."""
    problem, candidate = plans.problem, plans.candidate
    kinds = {group.device.kind for group in problem.classes}
    needed = min(pooled_bytes(problem.basis(kind, candidate)) for kind in kinds)
    rooms = sorted(
        (group.device.memory_bytes for group in problem.classes for _ in range(group.capacity(candidate.replicas))),
        reverse=True,
    )
    return needed <= sum(rooms[: plans.ranks])


def _layers_s(plans: ChunkPlans, size: int) -> list[LayerSeconds]:
    problem = plans.problem
    return [layer_seconds(problem.costs, group.device.kind, size) for group in problem.classes]


def chunk_bound(plans: ChunkPlans, deadline: Deadline, enough_s: float = np.inf) -> ChunkBound:
    """The bound of a candidate; once it is above `enough_s` nobody asks how far."""
    return BoundSearch(plans).tightened(MOST_PROGRAMS, deadline, enough_s)


class BoundSearch:
    """The bound of one candidate, which is made better as often as it is worth it.

    The first lines are the paths of equal stages, and of such of which one rank takes longer; then those of which one
    stage takes longer, or less long. Each program's answer is met halfway from the best seconds so far: there the paths
    say more than where the program alone would have it (in-out, Ben-Ameur and Neto, Networks 49, 2007).

    Args:
        plans: of the candidate.

    Attributes:
        rounds: programs so far.
        done: whether it is as good as it gets.
        bound: what it is so far; None at first.
    """

    def __init__(self, plans: ChunkPlans) -> None:
        self._plans, self._end_s = plans, _end_s(plans)
        whole = plans.candidate.ring.chunks == 1 and SCHEDULES[plans.candidate.schedule].splits_backward
        self._by_cuts_s = work_bound_s(plans.problem, plans.candidate) if whole else 0.0
        self._program = _Program(plans)
        self._best_s, self._at_best = np.inf, self._program.even()
        self._next = [self._at_best]
        self.rounds, self.done = 0, False
        self.bound: ChunkBound | None = None

    def tightened(self, programs: int, deadline: Deadline, enough_s: float = np.inf) -> ChunkBound:
        """The bound after so many linear programs more, at least one at first."""
        plans, program = self._plans, self._program
        if self.bound is None:
            self._first(deadline)
        elif self.rounds == 1:
            self._second(deadline)
        for _ in range(programs):
            if self.bound is not None and (self.done or deadline.over or self.bound.step_s > enough_s):
                break
            if not SCHEDULES[plans.candidate.schedule].made_for_plan:
                for seconds in self._next:
                    self._noted(seconds)
            bound_s, seconds = program.solved()
            self.rounds += 1
            if SCHEDULES[plans.candidate.schedule].made_for_plan:
                self._best_s, self._at_best = bound_s, seconds
            self._next = [seconds, (self._at_best + seconds) / 2]
            self.done = self._best_s <= bound_s * (1 + CLOSE) or self.rounds >= MOST_PROGRAMS
            step_s = max(bound_s * CERTAINTY + self._end_s, self._by_cuts_s)
            self.bound = ChunkBound(step_s, self._at_best[: plans.stages])
        if self.bound is None:
            raise AssertionError("a bound was asked for after 0 programs")
        return self.bound

    def _first(self, deadline: Deadline) -> None:
        """The lines that any program has."""
        candidate, ranks = self._plans.candidate, self._plans.ranks
        if SCHEDULES[candidate.schedule].made_for_plan:
            self._program.note_any_order()
            return
        self._note_seeds([(slice(rank, None, ranks), LONGER) for rank in range(ranks)], deadline)

    def _second(self, deadline: Deadline) -> None:
        """More lines of a program that the first ones did not settle."""
        stages = range(self._plans.stages)
        if not SCHEDULES[self._plans.candidate.schedule].made_for_plan:
            turns = [(slice(stage, stage + 1), times) for stage in stages for times in (LONGER, LESS)]
            self._note_seeds(turns, deadline)

    def _note_seeds(self, turns: Sequence[tuple[slice, float]], deadline: Deadline) -> None:
        """Note the paths of equal stages of which some take so many times as long."""
        each = self._program.even().reshape(-1, self._plans.stages)
        passes = each.size * self._plans.candidate.split.count
        for places, times in turns[: MOST_SEED_PASSES // passes]:
            if deadline.over:
                break
            changed = each.copy()
            changed[:, places] *= times
            self._program.note_path(changed.ravel())  # no cuts give these seconds: they make no best

    def _noted(self, seconds: Floats) -> None:
        """Note the longest path there."""
        length_s = self._program.note_path(seconds)
        if length_s < self._best_s:
            self._best_s, self._at_best = length_s, seconds


def _end_s(plans: ChunkPlans) -> float:
    """All-reduce and optimizer step of the slowest rank, if ranks and replicas shared the parameters evenly."""
    problem = plans.problem
    replicas = plans.candidate.replicas
    trainable = float(problem.parameters.trainable[0, -1]) / plans.ranks
    ends = [end_s(problem.end_figures(group.device.kind, replicas)) for group in problem.classes]
    return trainable * min(
        terms["all_reduce_s"][1] + terms["optimizer_s"][1] / problem.shares(replicas) for terms in ends
    )


class _Program:
    """The linear program: seconds of all stages for each kind of pass, and above all paths the makespan.

    Args:
        plans: of the candidate.
    """

    def __init__(self, plans: ChunkPlans) -> None:
        candidate, stages = plans.candidate, plans.stages
        count, many = candidate.split.count, candidate.split.number_largest
        self._ranks = plans.ranks
        self._turns = turns_of(candidate.schedule, plans.ranks, count, candidate.ring.chunks)
        layers = [np.diff(sums, axis=-1).min(axis=1) for sums in plans.passes_s]  # (2 sizes, L) each
        larger = np.arange(count) < many
        self._split = candidate.split
        self._shares = np.array([np.where(larger, 1.0, _least_ratio(small, large)) for large, small in layers])
        cuts = np.flatnonzero(plans.problem.rules.allowed)[1:-1]
        least = [(0.0, 0.0) if plans.ranks == 1 else sums[:, cuts].min(axis=1) for sums in plans.messages_s]
        self._sends = np.array([np.where(larger, large, small) for large, small in least])
        self._scale_s = float(sum(one[0].sum() for one in layers))  # numbers near one for the solver
        scaled = np.array([one[0] / self._scale_s for one in layers])
        self._kinds, self._stages = len(layers), stages
        self._rows: list[Floats] = []
        self._limits: list[float] = []
        self._totals, self._least = scaled.sum(axis=1), scaled.min(axis=1)
        self._order_of_layers(scaled)
        self._of_layers = len(self._rows)

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
        length_s, links_s, on_path = longest_path(self._turns, self._ranks, each, self._shares, self._sends)
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
        """The least makespan above all paths so far, and the seconds of the stages that have it.

        Where seconds of layers are of very unlike orders (a profile may say 1e-300 and 1e300), conditions contradict
        each other by rounding: then what cuts could give is left out, and at last all; 0 is a bound, too.
        """
        for first, least in ((0, self._least), (self._of_layers, np.zeros(self._kinds))):
            answer = self._answer(first, least)
            if answer.status == 0 and answer.fun is not None and answer.x is not None:
                seconds: Floats = answer.x[:-1] * self._scale_s
                return float(answer.fun) * self._scale_s, seconds
        return 0.0, self.even()

    def _answer(self, first: int, least: Floats) -> OptimizeResult:
        """Of the program with the conditions from a first one on, and these least seconds of a stage by kind."""
        count = self._stages
        whole = np.zeros((self._kinds, self._kinds * count + 1))
        for kind in range(self._kinds):
            whole[kind, kind * count : (kind + 1) * count] = 1.0
        return linprog(
            np.r_[np.zeros(self._kinds * count), 1.0],
            A_ub=np.array(self._rows[first:]),
            b_ub=self._limits[first:],
            A_eq=whole,
            b_eq=self._totals,
            bounds=[(float(one), None) for one in np.repeat(least, count)] + [(0.0, None)],
            method="highs",
        )


def _least_ratio(upper: Floats, lower: Floats) -> float:
    """The least that `upper` is of `lower`, over the layers where `lower` is not 0."""
    counted = lower > 0
    with np.errstate(over="ignore"):
        return float(np.min(upper[counted] / lower[counted], initial=np.inf)) if counted.any() else 0.0
