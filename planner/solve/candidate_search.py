"""The search for one schedule, R and M, or a part of that: a first plan, a better one, and a bound.

1. `planner.kernel.candidate_stages` lists the stages that fit, and bounds what any plan of them costs;
2. `planner.kernel.search` finds the plan with the smallest objective. For GPipe that is the step time, for unequal
   micro-batches as long as there are no segments to choose;
3. otherwise it is a lower bound. The plans whose objective lies below the best step time so far are evaluated one by
   one; where there are too many, the smallest objective left stays as the lower bound, and that is where a gap comes
   from.

Where too many stages recompute for all of them to be looked at, layers of the plan found are moved between its stages
(`planner.solve.moved_layers`).
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.candidate_stages import IMPOSSIBLE, Arcs, make_arcs
from planner.kernel.front import before_bounds, may_reach, step_bound_s
from planner.kernel.listed import PassSums, listed_steps_s
from planner.kernel.search import FoundPlans, search
from planner.kernel.tables import Tables
from planner.kernel.turns import turns_of
from planner.plan.schedules import Objective
from planner.solve.balance import TIE, Balance, StageChoice, evaluate_s
from planner.solve.deadline import Deadline
from planner.solve.limits import Limits
from planner.solve.moved_layers import MovedLayers
from planner.solve.problem import Candidate, Problem
from planner.solve.segment_choices import SegmentChoices, WorkBudget
from planner.solve.tables import make_tables, pass_sums
from planner.solve.work_bound import work_bound_s

GUESSES = (1.01, 1.03, 1.06, 1.1, 1.2, 1.5, np.inf)
"""Factors on the lower bound within which the first search looks for a plan [fitted]."""
GUESSES_IN_VAIN = 2
"""Of these, after which it is found out what a plan that fits takes at least, if any does [chosen]."""
SLOWEST, FAR = 3, 1.02
"""Stages of a first plan that layers are moved from [chosen: a third of what moves from all of 16 take], and by how
much longer its step must be than its objective for all stages to count."""
MOST_ROUNDS = 5
"""Searches that may ask for more stages to be looked at."""
CLOSE_ENOUGH = 1e-3
"""Relative distance from the lower bound at which a large problem with recompute ends [chosen]."""
PROVEN = 1e-9
"""Relative distance from the lower bound at which a plan counts as proven the best: rounding."""
AT_ONCE = 4_000_000
"""Passes of listed plans that are walked through without a look at the clock [chosen: 30 ms]."""
FAST_WIDTH = 2048
"""Labels at one place up to which one more takes no longer: each is compared with those that are there."""
ARC_S, LABEL_S, PLAN_S, PASS_S, COMPARISON_S, STAGE_S = 1e-6, 4e-7, 1.6e-5, 1e-8, 4e-9, 1e-4
"""Seconds of listing a stage, trying a label, evaluating a plan's stage, a pass of a listed one, comparing choices of
segments and looking at a stage, about [fitted: 802 layers, 64 stages]: what a search took is counted so, for equal
inputs give equal plans."""


class Result(NamedTuple):
    """The best plan so far, and what no plan of this candidate is below."""

    best: Balance
    lower_bound_s: float

    @property
    def proven(self) -> bool:
        """Whether there is no better plan."""
        return bool(self.lower_bound_s >= self.best.step_s * (1 - PROVEN))


def first_balance(problem: Problem, candidate: Candidate, deadline: Deadline) -> Balance | None:
    """Some plan with that schedule, R and M that fits, and not the best; None when none was found in time."""
    limits = Limits.at(1)
    search = CandidateSearch(problem, candidate, limits, limits.segments(), deadline)
    return search.first(work_bound_s(problem, candidate))


class CandidateSearch:
    """The search for one candidate: the tables, and what was found out about stages so far.

    Args:
        problem: whose plans.
        candidate: schedule, R and M.
        limits: how much one search may take.
        budget: for solving segments; may be shared with others.
        deadline: when to end.
    """

    def __init__(
        self, problem: Problem, candidate: Candidate, limits: Limits, budget: WorkBudget, deadline: Deadline
    ) -> None:
        self._problem = problem
        self._candidate = candidate
        self._limits = limits
        self._budget = budget
        self._deadline = deadline
        self._had_work, self._had_stages = budget.work, budget.stages
        self._arcs = 0
        self._labels = 0
        self._evaluated = 0
        self._passes = 0

    @cached_property
    def _tables(self) -> Tables:
        return make_tables(self._problem, self._candidate)

    @cached_property
    def _pass_sums(self) -> PassSums:
        return pass_sums(self._problem, self._candidate)

    @property
    def spent_s(self) -> float:
        """Seconds that all of it took, as they are counted."""
        comparisons = self._had_work - self._budget.work
        stages = self._budget.stages - self._had_stages
        tried = self._arcs * ARC_S + self._labels * LABEL_S + self._evaluated * PLAN_S + self._passes * PASS_S
        return tried + comparisons * COMPARISON_S + stages * STAGE_S

    def bound_s(self, incumbent: Balance) -> float:
        """No plan that is faster than the incumbent takes less."""
        limit_s = incumbent.step_s * (1 + 2 * TIE)
        return min(limit_s, self._bounded(limit_s)[2])

    @property
    def listing_s(self) -> float:
        """Seconds that `fits` takes at most, about: of 9.6 million stages 18 [measured]."""
        classes, in_flight_indices, positions = self._tables.memory.kept_layers.shape
        return float(ARC_S * classes * in_flight_indices * positions**2)

    def fits(self) -> bool:
        """Whether some plan may fit; all stages are listed for it, and nothing ends that before."""
        arcs = make_arcs(self._tables, np.inf)
        self._arcs += len(arcs.need) + arcs.length.size
        return bool(may_reach(arcs)) and bool(step_bound_s(arcs, before_bounds(arcs)[0, -1]) < np.inf)

    def run(self, incumbent: Balance, *, proves: bool = False, own: bool = False) -> Result:
        """The best plan below the incumbent's step time.

        Args:
            incumbent: a plan.
            proves: none is looked for that cannot be proven.
            own: whether the incumbent solves this problem, and so may be where a better plan is found.
        """
        limit_s = incumbent.step_s * (1 + 2 * TIE)
        arcs, before, root_s = self._bounded(limit_s)
        if root_s >= limit_s:
            return Result(incumbent, limit_s)
        choices = SegmentChoices(self._tables, arcs, self._deadline, self._budget)
        if choices.needed > self._limits.few_stages:
            if proves or root_s >= limit_s * (1 - CLOSE_ENOUGH):
                return Result(incumbent, root_s)
            found, lower_s = self._by_plans(arcs, before, choices, incumbent, limit_s)
            result = Result(found or incumbent, lower_s)
        else:
            result = self._by_stages(arcs, before, choices, incumbent, limit_s)
        if proves or result.proven or not (own or result.best is not incumbent):
            return result
        return Result(self._moved(arcs, choices, result.best, limit_s, len(result.best.stages)), result.lower_bound_s)

    def _by_stages(
        self, arcs: Arcs, before: Floats, choices: SegmentChoices, incumbent: Balance, limit_s: float
    ) -> Result:
        """The best plan, looking at each stage that the search comes by."""
        best = self._best_of(
            self._searched(arcs, before, choices, limit_s, self._limits.beam_labels), arcs, choices, incumbent
        )
        limit_s = best.step_s * (1 + 2 * TIE)
        wide = self._searched(arcs, before, choices, limit_s, self._limits.most_labels)
        best = self._best_of(wide, arcs, choices, best)
        lower_s = min([wide.dropped_s, limit_s, *wide.objective_s])
        closed = self._tables.objective == Objective.FLOW_SHOPS
        exact = closed and (self._candidate.split.equal or arcs.two_sizes)
        if exact or not len(wide.objective_s):
            return Result(best, lower_s)
        best, least_s = self._listed(arcs, before, choices, best)
        return Result(best, max(lower_s, least_s))

    def _by_plans(
        self, arcs: Arcs, before: Floats, choices: SegmentChoices, best: Balance | None, limit_s: float
    ) -> tuple[Balance | None, float]:
        """The best plan, looking at no stages but those of the best plans so far; and what none is below.

        Stages that were not looked at count with what they need at least, so the objective is a lower bound until the
        best plan has none of them.
        """
        lower_s = np.inf
        for attempt in range(self._limits.most_plans):
            width = self._limits.wider_labels if attempt == 0 else self._limits.beam_labels
            found = self._found(arcs, before, choices, limit_s, width, hopeful=True)
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
            if self._deadline.over:
                break
        return best, lower_s

    def _moved(self, arcs: Arcs, choices: SegmentChoices, plan: Balance, limit_s: float, slowest: int) -> Balance:
        """The plan with layers moved from so many of its stages, the slowest."""
        count = len(plan.stages)

        def stage_of(position: int, first: int, stop: int, device: int) -> StageChoice | None:
            place = _place(arcs, count - 1 - position, device, first, stop)
            if place < 0 or arcs.need[place] == IMPOSSIBLE:
                return None
            choices.look_at([place], limit_s)
            segments = choices.segments(place, -1, first)
            return None if segments is None else StageChoice(first, stop, device, segments)

        moved = MovedLayers(self._problem, stage_of, self._deadline)
        found = moved.from_slowest(plan, slowest, self._limits.moves)
        self._evaluated += moved.evaluated
        return found

    def _listed(self, arcs: Arcs, before: Floats, choices: SegmentChoices, best: Balance) -> tuple[Balance, float]:
        """The best of all plans whose objective lies below the best step time, each evaluated; what none is below."""
        left_s = -np.inf
        for width, most_plans in self._limits.listed:
            tried = self._labels
            plans = self._searched(arcs, before, choices, best.step_s, width, most_plans)
            best, left_s = self._best_listed(plans, arcs, choices, best)
            much = self._labels - tried >= self._limits.little_work
            if left_s >= best.step_s or much or self._deadline.over:
                break
        return best, min(best.step_s, left_s)

    def _best_listed(
        self, plans: FoundPlans, arcs: Arcs, choices: SegmentChoices, best: Balance
    ) -> tuple[Balance, float]:
        """The best of these plans, and what none is below that is not among them or was not come to.

        All of some are walked through at once; those that may be better are evaluated, the fastest first.
        """
        stages = int(plans.stages.max(initial=1))
        some = max(1, AT_ONCE // (3 * stages * self._candidate.split.count))
        for begin in range(0, len(plans.objective_s), some):
            if plans.objective_s[begin] >= best.step_s:
                break
            if self._deadline.over:
                return best, min(plans.dropped_s, plans.objective_s[begin])
            rows = np.arange(begin, min(begin + some, len(plans.objective_s)))
            steps_s = self._steps_s(plans, arcs, choices, rows)
            for place in np.argsort(steps_s, kind="stable"):
                if steps_s[place] > best.step_s * (1 + PROVEN):
                    break
                best = self._best_of(plans, arcs, choices, best, int(rows[place]))
        return best, plans.dropped_s

    def _steps_s(self, plans: FoundPlans, arcs: Arcs, choices: SegmentChoices, rows: Indices) -> Floats:
        """What no step of these plans is below, see `planner.kernel.listed`."""
        found, counts = np.zeros(len(rows)), plans.stages[rows]
        for count in np.unique(counts):
            at = np.flatnonzero(counts == count)
            some = rows[at]
            turns = turns_of(self._candidate.schedule, int(count), self._candidate.split.count, 1)
            self._passes += len(turns) * len(some)
            found[at] = listed_steps_s(turns, arcs, choices.known(), self._pass_sums, plans, some, int(count))
        return found

    def first(self, bound_s: float) -> Balance | None:
        """A first plan, looked for just above the lower bound, then higher."""
        least_s, in_vain = -np.inf, 0
        for factor in GUESSES:
            limit_s = bound_s * factor if factor < np.inf else np.inf
            if self._deadline.over or least_s == np.inf:
                return None
            if least_s >= limit_s:
                continue
            arcs, before, root_s = self._bounded(limit_s)
            if not root_s < limit_s:
                in_vain += 1
                # where each number from the end has stages of its own, to list them all takes long
                if in_vain == GUESSES_IN_VAIN and not arcs.by_number:
                    least_s = self._bounded(np.inf)[2]
                continue
            choices = SegmentChoices(self._tables, arcs, self._deadline, self._budget)
            if choices.needed > self._limits.few_stages:
                best, _ = self._by_plans(arcs, before, choices, None, limit_s)
                if best is not None:
                    return self._first_moved(arcs, choices, best, limit_s)
            widths = self._limits.beam_labels, self._limits.most_labels
            for width in widths if factor == np.inf else widths[:1]:
                found = self._searched(arcs, before, choices, limit_s, width)
                best = self._balance(found, choices, self._places(found, arcs)) if len(found.objective_s) else None
                if best is not None:
                    return self._first_moved(arcs, choices, best, limit_s)
        return None

    def _first_moved(self, arcs: Arcs, choices: SegmentChoices, first: Balance, limit_s: float) -> Balance:
        """The first plan with layers moved from its slowest stages, from all where its step is far above the limit."""
        if first.step_s <= limit_s * FAR:
            return self._moved(arcs, choices, first, limit_s, SLOWEST)
        arcs, _, _ = self._bounded(first.step_s)
        choices = SegmentChoices(self._tables, arcs, self._deadline, self._budget)
        return self._moved(arcs, choices, first, first.step_s, len(first.stages))

    def _bounded(self, limit_s: float) -> tuple[Arcs, Floats, float]:
        """Stages worth looking at, bounds of what comes before them, and what no plan is below."""
        arcs = make_arcs(self._tables, limit_s)
        self._arcs += len(arcs.need) + arcs.length.size
        before = before_bounds(arcs)
        return arcs, before, step_bound_s(arcs, before[0, -1])

    def _searched(
        self, arcs: Arcs, before: Floats, choices: SegmentChoices, limit_s: float, width: int, most_plans: int = 1
    ) -> FoundPlans:
        """The best plan or plans; stages that a search asks for are looked at, and it is repeated."""
        for attempt in range(MOST_ROUNDS):
            hopeful = attempt == 0 and choices.needed > 0
            found = self._found(arcs, before, choices, limit_s, width, most_plans, hopeful=hopeful)
            if not choices.look_at_wanted(limit_s) and attempt:
                break
            if not choices.needed:
                break
        return found

    def _found(
        self,
        arcs: Arcs,
        before: Floats,
        choices: SegmentChoices,
        limit_s: float,
        width: int,
        most_plans: int = 1,
        *,
        hopeful: bool,
    ) -> FoundPlans:
        """What one search finds; see `planner.kernel.search`."""
        most_work = min(self._limits.most_work, int(self._deadline.labels * min(1.0, FAST_WIDTH / width)))
        found = search(arcs, before, choices.known(), limit_s, width, most_plans, hopeful, most_work)
        self._labels += found.work
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
            places.append(_place(arcs, count - 1 - stage, int(plans.classes[index, stage]), first, stop))
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
        self._evaluated += len(stages)
        return Balance(self._candidate, tuple(stages), evaluate_s(self._problem, self._candidate, tuple(stages)), 0.0)


def _place(arcs: Arcs, after: int, device: int, first: int, stop: int) -> int:
    """Of the arc of layers [first, stop), with so many stages after it; -1 if there is none."""
    at = after if arcs.by_number else 0, device, stop
    return int(arcs.offset[at]) + stop - 1 - first if stop - first <= arcs.length[at] else -1
