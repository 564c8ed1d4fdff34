"""Numbers of micro-batches, stages and replicas that plans are looked for with first, before anything is proven.

Bounds hardly tell them apart. Taken in their order, a search may spend all its patience on the bounds of few stages,
where twice as many are a third faster. So a first plan is climbed from, which takes some tenths of a second a rung:

    with other M            what makes the stages of the best plan fastest
    with other K            far apart, where the work alone says that they may be faster: from the number that has the
                            least bound up, then down; then between the best and those beside it
    with other sizes        micro-batches half and twice as large: where memory is tight their cuts are other ones

again from what that finds, and then with every other R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.solve.balance import Balance
from planner.solve.other_counts import fastest_count
from planner.solve.parts import Part
from planner.solve.problem import Candidate, Problem

APART = 1.25
"""Ratio of one number of stages to the next that is tried [chosen]."""
WORTH_A_RUNG = 1e-3
"""By how much faster a plan must be for another rung near it [chosen]."""


class Ladder:
    """What is climbed.

    Args:
        problem: whose plans.
        candidates: those to climb among, the least bound first.
        look: for a plan of one of the smallest parts; the best plan then. None where there is no time for more.
    """

    def __init__(
        self, problem: Problem, candidates: Sequence[Candidate], look: Callable[[Part], Balance | None]
    ) -> None:
        self._problem, self._candidates, self._look = problem, candidates, look

    def climb(self, first: Balance) -> None:
        """Look for plans with other M, K and R than the first one's."""
        self._best, self._over = first, False
        own = first.candidate
        self._from(own)
        firsts = {one.replicas: one for one in reversed(self._candidates)}
        for replicas in dict.fromkeys(one.replicas for one in self._candidates):
            if replicas != own.replicas:
                self._from(firsts[replicas])

    def _from(self, candidate: Candidate) -> None:
        """With its R, and its M if the stages of the best plan say of none that it is faster."""
        replicas = candidate.replicas
        count = self._other_count(replicas) or candidate
        while not self._over:
            before = self._best
            self._numbers_of_stages(count)
            for one in self._sizes(count):
                self._hopeful(one, len(self._best.stages))
            if self._best.step_s > before.step_s * (1 - WORTH_A_RUNG) or self._best.candidate.replicas != replicas:
                break
            other = self._other_count(replicas)
            if other is None and self._best.candidate == count:
                break
            count = other or self._best.candidate

    def _other_count(self, replicas: int) -> Candidate | None:
        """The candidate that makes the stages of the best plan fastest; of its own R no other than a faster one."""
        below_s = self._best.step_s if self._best.candidate.replicas == replicas else np.inf
        return fastest_count(self._problem, self._best, self._candidates, replicas, below_s)

    def _numbers_of_stages(self, candidate: Candidate) -> None:
        """All over the range, then nearer and nearer to the best one."""
        most = self._problem.most_stages(candidate.replicas, candidate.split.count)
        own = min(most, len(self._best.stages))
        rungs = [own] if self._problem.settings.stages is not None else [*_rungs(own, most)]
        tried = {one for one in rungs if self._hopeful(candidate, one)}
        while (best := self._best).candidate == candidate and (own := len(best.stages)) in tried:
            below = max((one for one in tried if one < own), default=own)
            above = min((one for one in tried if one > own), default=own)
            between = {(own + below) // 2, (own + above) // 2} - tried
            tried |= {one for one in sorted(between) if self._hopeful(candidate, one)}
            if not between or self._best.step_s > best.step_s * (1 - WORTH_A_RUNG):
                break

    def _sizes(self, candidate: Candidate) -> Iterator[Candidate]:
        """The fewest micro-batches of half the size, and of twice that."""
        own = candidate.split
        for size in (own.largest // 2, own.largest * 2):
            others = [
                one
                for one in self._candidates
                if (one.schedule, one.replicas) == (candidate.schedule, candidate.replicas)
                and one.split.largest == size
            ]
            if others:
                yield min(others, key=lambda one: one.split.count)

    def _hopeful(self, candidate: Candidate, stages: int) -> bool:
        """Whether the work alone says that so many stages may be faster: then a plan of them was looked for."""
        if self._over or not 0 < stages <= self._problem.most_stages(candidate.replicas, candidate.split.count):
            return False
        part = Part(candidate, stages).smallest(self._problem)
        if part.bound_s(self._problem) >= self._best.step_s:
            return False
        found = self._look(part)
        self._over = found is None
        self._best = found or self._best
        return not self._over


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
