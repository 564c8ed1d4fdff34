"""The candidates whose cuts were searched, and the best plan that was found: what the parts of a search share."""

from __future__ import annotations

from typing import NamedTuple

from planner.solve.balance import Balance
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import Deadline
from planner.solve.first_plans import FirstPlans, Waiting
from planner.solve.problem import Problem


class Climbed(NamedTuple):
    """A candidate that was searched, and what no plan of it is below.

    Attributes:
        far: whether no plan was found that fits and is near the best: then memory is short, which bounds leave out.
    """

    climb: CutClimb
    plans: ChunkPlans
    least_s: float
    far: bool


class Findings:
    """What a search found so far.

    Args:
        problem: of the search.
        reached: the best plan of other schedules.
        deadline: when the search must end.

    Attributes:
        best: the best plan; None if there is none.
        best_plans: the plans of its candidate; None while none of the search's own is the best.
        deadline: when to stop; where nothing else has a plan it may be put off.
        first_plans: what first plans say of others, which each search of cuts adds to.
        climbs: the searched candidates, by position.
        in_vain: candidates that were searched since the best plan was found.
        in_segments: whether there is a plan of which no search of cuts says what it takes.
    """

    def __init__(self, problem: Problem, reached: Balance | None, deadline: Deadline) -> None:
        self._below_s = problem.below_s
        self.best: Balance | None = reached
        self.best_plans: ChunkPlans | None = None
        self.deadline, self.first_plans = deadline, FirstPlans(deadline)
        self.climbs: dict[int, Climbed] = {}
        self.in_vain, self.in_segments = 0, False

    @property
    def reached_s(self) -> float:
        """What a plan must be below."""
        return self._below_s if self.best is None else min(self._below_s, self.best.step_s)

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.deadline.over

    @property
    def nothing_fits(self) -> bool:
        """Whether no plan was found of all whose cuts were searched."""
        return bool(self.climbs) and all(climbed.far for climbed in self.climbs.values())

    def search(self, entry: Waiting) -> float:
        """Search the cuts of a candidate, once; what no plan of it is below, as far as that shows it."""
        if entry.position in self.climbs:
            return self.climbs[entry.position].least_s
        bound = entry.search or CutBound(entry.plans)
        climb = CutClimb(entry.plans, bound, self.deadline)
        choices, least_of_all_s = climb.found(self.reached_s)
        least_s = bound.step_s if self.in_segments else max(bound.step_s, least_of_all_s)
        self.climbs[entry.position] = Climbed(climb, entry.plans, least_s, not choices and not climb.hopeless)
        self.in_vain += not climb.tries_all_cuts
        if choices:
            self.first_plans.note(entry, min(choice.step_s for choice in choices))
        for choice in choices:
            self.note(entry.plans, choice)
        return least_s

    def note(self, plans: ChunkPlans, choice: ChunkChoice | None) -> None:
        """Keep a plan if it is better than the best."""
        found = None if choice is None else plans.balance(plans.finished(choice))
        if found is not None and found.better_than(self.best):
            self.best, self.best_plans, self.in_vain = found, plans, 0

    def take_over(self, others: Findings) -> None:
        """Keep what another search found if it is better."""
        if others.best is not None and others.best.better_than(self.best):
            self.best, self.best_plans = others.best, others.best_plans

    def estimate_s(self, entry: Waiting) -> float:
        """What a candidate may take, about; at least its bound."""
        return self.first_plans.estimate_s(entry, self.reached_s)
