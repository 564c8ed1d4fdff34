"""The balancer: the plan with the smallest step time, and how far from the optimum that may be.

A candidate is a schedule, R and M. They wait in the order of a cheap bound (`planner.solve.work_bound`), then of a
bound from their stages; most end there. For each that does not:

1. `planner.kernel.candidate_stages` lists the stages that fit, and bounds what any plan of them costs;
2. `planner.kernel.search` finds the plan with the smallest objective. For GPipe that is the step time, for unequal
   micro-batches as long as there are no segments to choose;
3. otherwise it is a lower bound. The plans whose objective lies below the best step time so far are evaluated one by
   one; where there are too many, the smallest objective left stays as the lower bound, and that is where a gap comes
   from.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats
from planner.cost.stage_memory import stage_memory
from planner.cost.time_ledger import end_s, layer_seconds
from planner.cost.transfers import boundary_s
from planner.kernel.candidate_stages import Arcs, make_arcs
from planner.kernel.front import before_bounds, step_bound_s
from planner.kernel.makespan import makespan_s
from planner.kernel.search import FoundPlans, search
from planner.kernel.tables import Tables
from planner.plan.plan import Segment
from planner.plan.schedules import SCHEDULES, Objective
from planner.solve.deadline import Deadline
from planner.solve.other_counts import promising
from planner.solve.problem import Candidate, Problem
from planner.solve.segment_choices import SegmentChoices, WorkBudget
from planner.solve.tables import make_tables
from planner.solve.work_bound import WorkBound, pooled_recompute_s, work_bound, work_bound_s

TIE = 1e-12
"""Relative difference of two step times that counts as none: rounding of sums in another order."""
BEAM_LABELS = 4
"""Labels kept at each place by the first search, which makes the incumbent."""
MOST_LABELS = 1000
"""Labels kept at each place by the search that proves it."""
LISTED = ((64, 256), (2048, 8192))
"""Labels kept at each place when plans are listed to be evaluated one by one, and plans; more where that is little
work."""
GUESSES = (1.01, 1.03, 1.06, 1.1, 1.2, 1.5, np.inf)
"""Factors on the lower bound within which the first search looks for a plan [fitted]."""
MOST_ROUNDS = 5
"""Searches that may ask for more stages to be looked at."""
PATIENCE = 12
"""Problems too large to be solved to the end that are tried in vain before the search ends."""
WORK_IN_VAIN = 10_000_000
"""Labels that such problems may take in vain: of the largest ones fewer are tried [chosen: 5 s]."""
ARCS_IN_VAIN = 40_000_000
"""Stages listed to bound problems in vain, before the search ends with a wider gap [chosen: 10 s]."""
LITTLE_WORK = 50_000
"""Labels up to which a list of plans that is cut off is made longer [fitted: 5 ms]."""
MUCH_WORK = 1_000_000
"""Labels from which on a list of plans that is cut off makes a problem too large [fitted: 0.1 s]."""
MOST_PLANS = 12
"""Plans of one candidate whose stages are looked at."""
WIDER_LABELS = 64
"""Labels kept at each place by the search that bounds a large problem with recompute."""
FEW_STAGES = 4000
"""With up to that many possible stages that recompute, each that a search comes by is looked at; with more, only those
of the best plans."""
CLOSE_ENOUGH = 1e-3
"""Relative distance from the lower bound at which a large problem with recompute ends [chosen]."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage of a plan.

    Attributes:
        first: of its layers.
        stop: of its layers.
        device_class: position in `Problem.classes`.
        segments: what is recomputed.
    """

    first: int
    stop: int
    device_class: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """The balancer's answer.

    Attributes:
        candidate: schedule, R and M.
        stages: in pipeline order.
        step_s: seconds of the step, all-reduce and optimizer included.
        lower_bound_s: no plan for the same problem is faster.
    """

    candidate: Candidate
    stages: tuple[StageChoice, ...]
    step_s: float
    lower_bound_s: float

    @property
    def _order(self) -> tuple[int, int, int, tuple[int, ...]]:
        replicas, count = self.candidate.replicas, self.candidate.split.count
        return len(self.stages) * replicas, replicas, count, tuple(stage.stop for stage in self.stages)

    def better_than(self, other: Balance | None) -> bool:
        """Whether it is faster; on a tie whether it has fewer devices, then fewer micro-batches, then earlier cuts."""
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
    deadline = Deadline(problem.settings.time_limit_s)
    best: Balance | None = None
    lower_bound_s, budget = np.inf, WorkBudget()
    in_vain = np.zeros(3, dtype=np.int64)  # problems, labels, arcs
    queue = _by_bound(problem)
    ahead: _Waiting | None = None
    while queue or ahead is not None:
        entry = heapq.heappop(queue) if ahead is None else ahead
        least_s = min([entry.bound_s, *(waiting.bound_s for waiting in queue[:1])])
        if best is not None and least_s > best.step_s * (1 + TIE):
            break
        if entry.work is not None and ahead is None:
            bound_s = entry.work.step_s(pooled_recompute_s(problem, entry.candidate))
            heapq.heappush(queue, entry._replace(bound_s=bound_s, work=None))
            continue
        if best is not None and (deadline.over or (in_vain >= (PATIENCE, WORK_IN_VAIN, ARCS_IN_VAIN)).any()):
            lower_bound_s = min(lower_bound_s, least_s)
            break
        search = _Search(problem, entry.candidate, budget, deadline)
        if best is not None and not entry.bounded and ahead is None:
            heapq.heappush(queue, entry._replace(bound_s=max(entry.bound_s, search.bound_s(best)), bounded=True))
            in_vain += (0, 0, search.arcs)
            continue
        result = search.run(best, entry.bound_s)
        lower_bound_s = min(lower_bound_s, result.lower_bound_s)
        in_vain += (result.large, result.work, search.arcs)
        ahead = None
        if result.best is not None and result.best.better_than(best):
            best, in_vain[:] = result.best, 0
            ahead = _promising(problem, queue, best) if result.large else None
    if best is None:
        return None
    return replace(best, lower_bound_s=min(lower_bound_s, best.step_s))


def _promising(problem: Problem, queue: list[_Waiting], best: Balance) -> _Waiting | None:
    """Take out of the queue what the best plan would be fastest with, if it would be faster."""
    own, count = best.candidate, len(best.stages)
    waiting = {
        entry.candidate: entry
        for entry in sorted(queue, key=lambda entry: entry.micro_batches)
        if (entry.candidate.schedule, entry.candidate.replicas) == (own.schedule, own.replicas)
        and problem.most_stages(own.replicas, entry.micro_batches) >= count
    }

    def fits(candidate: Candidate) -> bool:
        return all(
            stage_memory(
                problem.costs,
                problem.parameters,
                device := problem.classes[stage.device_class].device,
                candidate.schedule,
                candidate.split,
                problem.costs.optimizer(device.kind, problem.optimizer),
                number=count - position,
                first=stage.first,
                stop=stage.stop,
                segments=stage.segments,
            ).total
            <= device.memory_bytes
            for position, stage in enumerate(best.stages)
        )

    found = promising(list(waiting), lambda one: evaluate_s(problem, one, best.stages), fits, best.step_s)
    if found is None:
        return None
    queue.remove(waiting[found])
    heapq.heapify(queue)
    return waiting[found]


def first_balance(problem: Problem, candidate: Candidate) -> Balance | None:
    """Some plan with that schedule, R and M that fits, and not the best; None when none was found."""
    return _Search(problem, candidate, WorkBudget(), Deadline(None)).first(work_bound_s(problem, candidate))


class _Result(NamedTuple):
    """The best plan so far, what no plan of this candidate is below, and whether that took too much work.

    `large` says that not all stages or plans were looked at that could make a plan better, `work` how many labels that
    took.
    """

    best: Balance | None
    lower_bound_s: float
    large: bool = False
    work: int = 0


class _Search:
    """The search for one candidate: the tables, and what was found out about stages so far."""

    def __init__(self, problem: Problem, candidate: Candidate, budget: WorkBudget, deadline: Deadline) -> None:
        self.problem = problem
        self.candidate = candidate
        self.budget = budget
        self.deadline = deadline
        self.tables: Tables = make_tables(problem, candidate)
        self.arcs = 0  # listed so far

    def bound_s(self, incumbent: Balance) -> float:
        """No plan that is faster than the incumbent takes less."""
        limit_s = incumbent.step_s * (1 + 2 * TIE)
        return min(limit_s, self._bounded(limit_s)[2])

    def run(self, incumbent: Balance | None, bound_s: float) -> _Result:
        """The best plan below the incumbent's step time; no plan is below `bound_s`."""
        if incumbent is None:
            # without a plan there is nothing to return, however late it is
            incumbent = _Search(self.problem, self.candidate, self.budget, Deadline(None)).first(bound_s)
            if incumbent is None:
                return _Result(None, np.inf)
        limit_s = incumbent.step_s * (1 + 2 * TIE)
        arcs, before, root_s = self._bounded(limit_s)
        if root_s >= limit_s:
            return _Result(incumbent, limit_s)
        choices = SegmentChoices(self.tables, arcs, self.deadline, self.budget)
        if choices.needed > FEW_STAGES:
            if root_s >= limit_s * (1 - CLOSE_ENOUGH):
                return _Result(incumbent, root_s)
            return self._by_plans(arcs, before, choices, incumbent, limit_s)
        best = self._best_of(self._searched(arcs, before, choices, limit_s, BEAM_LABELS), arcs, choices, incumbent)
        limit_s = best.step_s * (1 + 2 * TIE)
        wide = self._searched(arcs, before, choices, limit_s, MOST_LABELS)
        best = self._best_of(wide, arcs, choices, best)
        lower_s = min([wide.dropped_s, limit_s, *wide.objective_s])
        closed = self.tables.objective == Objective.FLOW_SHOPS
        exact = closed and (self.candidate.split.equal or arcs.two_sizes)
        if exact or not len(wide.objective_s):
            return _Result(best, lower_s)
        best, least_s, work = self._listed(arcs, before, choices, best)
        lower_s = max(lower_s, least_s)
        large = lower_s < best.step_s and work >= MUCH_WORK
        return _Result(best, lower_s, large, work if large else 0)

    def _by_plans(
        self, arcs: Arcs, before: Floats, choices: SegmentChoices, best: Balance | None, limit_s: float
    ) -> _Result:
        """The best plan, looking at no stages but those of the best plans so far.

        Stages that were not looked at count with what they need at least, so the objective is a lower bound until the
        best plan has none of them.
        """
        lower_s, work = np.inf, 0
        for attempt in range(MOST_PLANS):
            width = WIDER_LABELS if attempt == 0 else BEAM_LABELS
            found = search(arcs, before, choices.known(), limit_s, width, 1, True, self.deadline.labels)
            work += found.work
            if attempt == 0:
                lower_s = min([limit_s, found.dropped_s, *found.objective_s])
            if not len(found.objective_s):
                break
            news = choices.look_at(self._places(found, arcs), limit_s)
            plan = self._balance(found, choices, self._places(found, arcs))
            if plan is not None and plan.better_than(best):
                best = plan
                limit_s = min(limit_s, best.step_s * (1 + 2 * TIE))
            if not news or (best is not None and best.step_s <= lower_s * (1 + CLOSE_ENOUGH)):
                break
        return _Result(best, lower_s, True, work)

    def _listed(self, arcs: Arcs, before: Floats, choices: SegmentChoices, best: Balance) -> tuple[Balance, float, int]:
        """The best of all plans whose objective lies below the best step time, each evaluated.

        Returns:
            It, what no plan is below, and the labels that it took.
        """
        left_s, work = -np.inf, 0
        for width, most_plans in LISTED:
            plans = self._searched(arcs, before, choices, best.step_s, width, most_plans)
            left_s, work = plans.dropped_s, plans.work
            for index, objective_s in enumerate(plans.objective_s):
                if objective_s >= best.step_s:
                    break
                if self.deadline.over:
                    left_s = min(left_s, objective_s)
                    break
                best = self._best_of(plans, arcs, choices, best, index)
            if left_s >= best.step_s or work >= LITTLE_WORK or self.deadline.over:
                break
        return best, min(best.step_s, left_s), work

    def first(self, bound_s: float) -> Balance | None:
        """A first plan, looked for just above the lower bound, then higher."""
        for factor in GUESSES:
            limit_s = bound_s * factor if factor < np.inf else np.inf
            arcs, before, root_s = self._bounded(limit_s)
            if not root_s < limit_s:
                continue
            choices = SegmentChoices(self.tables, arcs, self.deadline, self.budget)
            if choices.needed > FEW_STAGES:
                best = self._by_plans(arcs, before, choices, None, limit_s).best
                if best is not None:
                    return best
            for width in (BEAM_LABELS, MOST_LABELS) if factor == np.inf else (BEAM_LABELS,):
                found = self._searched(arcs, before, choices, limit_s, width)
                best = self._balance(found, choices, self._places(found, arcs)) if len(found.objective_s) else None
                if best is not None:
                    return best
        return None

    def _bounded(self, limit_s: float) -> tuple[Arcs, Floats, float]:
        """Stages worth looking at, bounds of what comes before them, and what no plan is below."""
        arcs = make_arcs(self.tables, limit_s)
        self.arcs += len(arcs.need)
        before = before_bounds(arcs)
        return arcs, before, step_bound_s(arcs, before[0, -1])

    def _searched(
        self, arcs: Arcs, before: Floats, choices: SegmentChoices, limit_s: float, width: int, most_plans: int = 1
    ) -> FoundPlans:
        """The best plan or plans; stages that a search asks for are looked at, and it is repeated."""
        for attempt in range(MOST_ROUNDS):
            hopeful = attempt == 0 and choices.needed > 0
            found = search(arcs, before, choices.known(), limit_s, width, most_plans, hopeful, self.deadline.labels)
            if not choices.look_at_wanted(limit_s) and attempt:
                break
            if not choices.needed:
                break
        return found

    def _best_of(
        self, plans: FoundPlans, arcs: Arcs, choices: SegmentChoices, best: Balance, index: int = 0
    ) -> Balance:
        """The better of `best` and one of the plans found."""
        if index >= len(plans.objective_s):
            return best
        found = self._balance(plans, choices, self._places(plans, arcs, index), index)
        return found if found is not None and found.better_than(best) else best

    def _places(self, plans: FoundPlans, arcs: Arcs, index: int = 0) -> list[int]:
        """The arcs of a plan's stages."""
        count = int(plans.stages[index])
        places = []
        for stage in range(count):
            first, stop = (int(cut) for cut in plans.cuts[index, stage : stage + 2])
            in_flight_index = count - 1 - stage if arcs.by_number else 0
            places.append(int(arcs.offset[in_flight_index, plans.classes[index, stage], stop]) + stop - 1 - first)
        return places

    def _balance(self, plans: FoundPlans, choices: SegmentChoices, places: list[int], index: int = 0) -> Balance | None:
        """A plan that a search found; None when one of its stages turned out not to fit."""
        cuts = [int(cut) for cut in plans.cuts[index, : len(places) + 1]]
        stages = []
        for stage, (first, stop) in enumerate(pairwise(cuts)):
            segments = choices.segments(places[stage], int(plans.choices[index, stage]), first)
            if segments is None:
                return None
            stages.append(StageChoice(first, stop, int(plans.classes[index, stage]), segments))
        return Balance(self.candidate, tuple(stages), evaluate_s(self.problem, self.candidate, tuple(stages)), 0.0)


class _Waiting(NamedTuple):
    """A candidate that was not searched.

    Attributes:
        bound_s: no plan of it is below.
        micro_batches: M; of equal bounds the smaller one comes first.
        position: of the candidate.
        bounded: whether the bound is as good as it gets without a search.
        candidate: schedule, R and M.
        work: the parts of the bound as long as recompute is not in it: that is found only for those whose turn comes.
    """

    bound_s: float
    micro_batches: int
    position: int
    bounded: bool
    candidate: Candidate
    work: WorkBound | None


def _by_bound(problem: Problem) -> list[_Waiting]:
    """Every candidate with a cheap lower bound of its step time, as a heap: the most promising first."""
    queue = []
    for position, candidate in enumerate(problem.candidates()):
        work = work_bound(problem, candidate)
        # where each number from the end has stages of its own, to list them all takes long
        bounded = not SCHEDULES[candidate.schedule].keeps_all
        queue.append(_Waiting(work.step_s(), candidate.split.count, position, bounded, candidate, work))
    heapq.heapify(queue)
    return queue


def evaluate_s(problem: Problem, candidate: Candidate, stages: tuple[StageChoice, ...]) -> float:
    """Seconds of the step of a plan: the simulator's number."""
    split = candidate.split
    large, small = (stage_seconds(problem, size, stages) for size in (split.largest, split.smallest))
    number = split.number_largest
    seconds = np.concatenate(
        (np.repeat(large[..., None], number, axis=2), np.repeat(small[..., None], split.count - number, axis=2)), axis=2
    )
    ends = [sum(end_seconds(problem, candidate, stage)) for stage in stages]
    ranks = len(stages) // candidate.ring.chunks
    return makespan_s(candidate.schedule, seconds, candidate.ring.chunks) + max(
        sum(ends[rank::ranks]) for rank in range(ranks)
    )


def end_seconds(problem: Problem, candidate: Candidate, stage: StageChoice) -> tuple[float, float]:
    """Seconds of a stage's all-reduce and of its optimizer step."""
    device = problem.classes[stage.device_class].device
    trainable = float(problem.parameters.trainable[stage.first, stage.stop])
    if not trainable:
        return 0.0, 0.0
    terms = end_s(problem.end_figures(device.kind, candidate.replicas))
    (reduce_s, reduce_byte_s), (optimizer_s, optimizer_byte_s) = terms["all_reduce_s"], terms["optimizer_s"]
    return reduce_s + reduce_byte_s * trainable, optimizer_s + optimizer_byte_s * trainable


def stage_seconds(problem: Problem, size: int, stages: tuple[StageChoice, ...]) -> Floats:
    """Seconds of F, R, B, SEND_F and SEND_B of every stage for a micro-batch of that size, shape (5, K)."""
    outputs, gradients = boundary_s(problem.link, problem.at_boundaries(size))
    rows = []
    for stage in stages:
        costs = layer_seconds(problem.costs, problem.classes[stage.device_class].device.kind, size)
        recompute_s = [costs.recompute_s[segment.first : segment.stop].sum() for segment in stage.segments]
        rows.append(
            (
                costs.forward_s[stage.first : stage.stop].sum(),
                recompute_s[-1] if recompute_s else 0.0,
                costs.backward_s[stage.first : stage.stop].sum() + sum(recompute_s[:-1]),
                outputs[stage.stop],
                gradients[stage.first],
            )
        )
    return np.array(rows, dtype=np.float64).T
