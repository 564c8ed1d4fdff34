"""Numbers of stages and replicas that plans are looked for with first, before anything is proven.

Bounds hardly tell them apart. Taken in their order, a search may spend all its patience on the bounds of few stages,
where twice as many are a third faster. So a first plan is climbed from, which takes some tenths of a second a rung:

    with other M            what makes the stages of the best plan fastest
    with other K            far apart, where the work alone says that they may be faster: from the number that has the
                            least bound up, then down; then between the best and those beside it

again from what that finds, and then with every other R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from planner.solve.balance import Balance
from planner.solve.parts import Part
from planner.solve.problem import Candidate, Problem

APART = 1.25
"""Ratio of one number of stages to the next that is tried [chosen]."""
WORTH_A_RUNG = 1e-3
"""By how much faster a plan must be for another rung near it [chosen]."""


@dataclass(frozen=True)
class Ladder:
    """What it climbs in.

    Attributes:
        problem: whose plans.
        best: the best plan so far.
        look: for a plan of one of the smallest parts, which may be the best one then.
        other_count: the candidate with so many replicas and another M that makes the best plan faster, if any; of its
            own R it is no other than a faster one.
        goes_on: whether there is time for more.
    """

    problem: Problem
    best: Callable[[], Balance]
    look: Callable[[Part], None]
    other_count: Callable[[int], Candidate | None]
    goes_on: Callable[[], bool]

    def climb(self, others: Iterable[Candidate]) -> None:
        """Look for plans with other M, K and R.

        Args:
            others: where to begin with each R of which the stages of the best plan say nothing.
        """
        own = self.best().candidate
        self._from(own)
        for other in others:
            if other.replicas != own.replicas:
                self._from(other)

    def _from(self, candidate: Candidate) -> None:
        """With its R."""
        count = (self.other_count(candidate.replicas) or candidate) if self.goes_on() else None
        while count is not None and self.goes_on():
            step_s = self.best().step_s
            self._numbers_of_stages(count)
            gained = self.best().step_s < step_s * (1 - WORTH_A_RUNG)
            count = self.other_count(candidate.replicas) if gained else None

    def _numbers_of_stages(self, candidate: Candidate) -> None:
        """All over the range, then nearer and nearer to the best one."""
        most = self.problem.most_stages(candidate.replicas, candidate.split.count)
        own = min(most, len(self.best().stages))
        rungs = [own] if self.problem.settings.stages is not None else [*_rungs(own, most)]
        tried = {one for one in rungs if self._hopeful(candidate, one)}
        while (best := self.best()).candidate == candidate and (own := len(best.stages)) in tried:
            below = max((one for one in tried if one < own), default=own)
            above = min((one for one in tried if one > own), default=own)
            between = {(own + below) // 2, (own + above) // 2} - tried
            tried |= {one for one in sorted(between) if self._hopeful(candidate, one)}
            if not between or self.best().step_s > best.step_s * (1 - WORTH_A_RUNG):
                break

    def _hopeful(self, candidate: Candidate, stages: int) -> bool:
        """Whether the work alone says that so many stages may be faster: then a plan of them was looked for."""
        if not self.goes_on():
            return False
        part = Part(candidate, stages)
        while parts := part.parts(self.problem):
            part = min(parts, key=lambda one: one.bound_s(self.problem))
        hopeful = part.bound_s(self.problem) < self.best().step_s
        if hopeful:
            self.look(part)
        return hopeful


def _rungs(own: int, most: int) -> Iterator[int]:
    """From one number of stages up to the most, whose plans take longer to find, then down."""
    count = own
    while count < most:
        yield count
        count = min(most, max(count + 1, round(count * APART)))
    yield most
    count = own
    while (count := min(count - 1, round(count / APART))) >= 1:
        yield count
