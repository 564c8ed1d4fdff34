"""The cuts of one part whose closed form is only a bound: a bound from paths, and the cuts that it comes to.

    search = PathSearch(problem, candidate, deadline)        # so many stages, on these devices
    plan, bound_s = search.run(1000, plan, enough_s)

The labels of `planner.kernel.search` say little of stages that are far from equal, where passes wait here and there;
`planner.solve.cut_bound` knows every path from pass to pass, but nothing of memory: its bound is true, and where there
is little its cuts may not fit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.plan.schedules import Ring
from planner.solve import limits
from planner.solve.allowed_cuts import Stops
from planner.solve.balance import Balance
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import Deadline
from planner.solve.problem import Candidate, Problem

AT_ONCE = 20
"""Linear programs until the bound's cuts are looked at [chosen]."""
PROGRAM_S, STAGES_OF_PROGRAM = 2e-3, 16
"""Seconds of one, about, where of more stages than these for as many [fitted: 8 stages of 40 to 430 places]."""


class PathSearch:
    """What was found out of one part so far; it depends on nothing but the part.

    Args:
        problem: with so many stages.
        candidate: schedule, R and M.
        deadline: when to end.
    """

    def __init__(self, problem: Problem, candidate: Candidate, deadline: Deadline) -> None:
        stages = problem.settings.stages
        assert stages is not None
        self._candidate, self._deadline = candidate, deadline
        self._plans = ChunkPlans(problem, replace(candidate, ring=Ring(stages, 1)), deadline)
        self._bound = CutBound(self._plans)
        self._stops: Stops | None = None

    @property
    def spent_s(self) -> float:
        """Seconds that all of it took, as they are counted."""
        return self._bound.rounds * PROGRAM_S * max(1, self._plans.stages // STAGES_OF_PROGRAM)

    def run(self, programs: int, plan: Balance | None, enough_s: float) -> tuple[Balance | None, float]:
        """The best plan of the part so far, and what none of it is below.

        Args:
            programs: that it may take in all, fewer where there are many stages.
            plan: the best one so far.
            enough_s: a bound that is no less is good enough.
        """
        bound = self._bound
        programs //= limits.program_work(self._plans.stages)
        while bound.rounds < programs and bound.step_s < enough_s and not (bound.closed or self._deadline.over):
            limit_s = np.inf if plan is None else plan.step_s
            some = bound.halved if bound.done else bound.tightened
            some(AT_ONCE, self._deadline, limit_s)
            plan = self._better(plan)
            if plan is not None and bound.step_s >= plan.step_s:
                break
        return plan, bound.step_s

    def _better(self, plan: Balance | None) -> Balance | None:
        """The plan with the bound's best cuts, if they are new, fit and are faster."""
        if self._bound.stops is None or self._bound.stops == self._stops:
            return plan
        self._stops = self._bound.stops
        climb = CutClimb(self._plans, None, self._deadline)
        choice = climb.at(self._stops, np.inf if plan is None else plan.step_s)
        if choice is None:
            return plan
        found = replace(self._plans.balance(choice), candidate=self._candidate)
        return found if found.better_than(plan) else plan
