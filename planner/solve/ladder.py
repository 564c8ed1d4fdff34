"""Numbers of micro-batches, stages and replicas that plans are looked for with first, before anything is proven.

Bounds hardly tell them apart. Taken in their order, a search may spend all its patience on the bounds of few stages,
where twice as many are a third faster. So a first plan is climbed from, which takes some tenths of a second a rung,
with each R and micro-batches of one size (where memory is tight cuts that are good for one are not for another):

    with other K            far apart, where the work alone says that they may be faster: from the number that has the
                            least bound up, then down, as long as plans do not become slower and slower; then between
                            the best and those beside it
    with other M            of micro-batches of that size; what makes the stages of each plan fastest

then with half and twice that size, as long as plans are nearly as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from planner.solve.balance import Balance, evaluate_s
from planner.solve.other_counts import fastest_count
from planner.solve.parts import Part
from planner.solve.problem import Candidate, Problem

APART = 1.25
"""Ratio of one number of stages to the next that is tried [chosen]."""
NEAR = 1.02
"""By how much slower than the best plan one may be for half and twice its micro-batches' size to be tried [chosen]."""
SLOWER_RUNGS = 3
"""Rungs one after the other whose plans are slower and slower, after which no further ones are tried [chosen]."""
WORTH_A_RUNG = 1e-3
"""By how much faster a plan must be for another rung near it [chosen]."""


class Ladder:
    """What is climbed.

    Args:
        problem: whose plans.
        candidates: those to climb among, the least bound first.
        look: for a plan of one of the smallest parts; None if none was found.
        goes_on: whether there is time for more.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        look: Callable[[Part], Balance | None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._problem, self._candidates, self._look, self._goes_on = problem, candidates, look, goes_on

    def climb(self, first: Balance) -> Balance:
        """The best plan that was found with other M, K and R than the first one's; itself if there is none."""
        self._best = first
        for replicas in dict.fromkeys([first.candidate.replicas, *(one.replicas for one in self._candidates)]):
            self._of_replicas([one for one in self._candidates if one.replicas == replicas])
        return self._best

    def _of_replicas(self, candidates: Sequence[Candidate]) -> None:
        """With the size of micro-batches that promises most, and with those beside it as long as plans are near."""
        if not candidates or not self._goes_on():
            return
        own = (one for one in candidates if one == self._best.candidate)
        begin = fastest_count(self._problem, self._best, candidates, np.inf) or next(own, candidates[0])
        sizes, tried = [begin.split.largest], set[int]()
        while sizes and self._goes_on():
            tried.add(size := sizes.pop(0))
            alike = [one for one in candidates if one.split.largest == size]
            found = self._of_size(begin if begin in alike else alike[0], alike) if alike else None
            if found is not None and found.step_s <= self._best.step_s * NEAR:
                sizes += [other for other in (size // 2, size * 2) if other not in tried]

    def _of_size(self, begin: Candidate, alike: Sequence[Candidate]) -> Balance | None:
        """The best plan after a look all over the numbers of stages, and then nearer and nearer to the best one.

        Args:
            begin: the candidate to begin with.
            alike: those with micro-batches of the same size, which are tried with each plan.
        """
        best: Balance | None = None
        most = max(self._problem.most_stages(one.replicas, one.split.count) for one in alike)
        own, tried = min(most, len(self._best.stages)), set[int]()

        def look(numbers: Iterable[int]) -> None:
            nonlocal best
            slower: list[float] = []
            for number in numbers:
                tried.add(number)
                found = self._hopeful(begin if best is None else best.candidate, number, alike)
                if found is None:
                    continue
                slower = [step_s for step_s in slower if step_s < found.step_s] + [found.step_s]
                if found.better_than(best):
                    best, slower = found, []
                if len(slower) == SLOWER_RUNGS:
                    break

        if self._problem.settings.stages is not None:
            look([own])
        else:
            for rungs in _rungs(own, most):
                look(rungs)
        while best is not None and self._goes_on():
            before_s, own = best.step_s, len(best.stages)
            below = max((one for one in tried if one < own), default=own)
            above = min((one for one in tried if one > own), default=own)
            look(between := sorted({(own + below) // 2, (own + above) // 2} - tried))
            if not between or best.step_s > before_s * (1 - WORTH_A_RUNG):
                break
        return best

    def _hopeful(self, candidate: Candidate, stages: int, alike: Sequence[Candidate]) -> Balance | None:
        """A plan of so many stages, if their work says that it may be the best, with the M that makes it fastest."""
        if not self._goes_on() or stages > self._problem.most_stages(candidate.replicas, candidate.split.count):
            return None
        part = Part(candidate, stages).smallest(self._problem)
        if part.bound_s(self._problem) >= self._best.step_s:
            return None
        found = self._look(part)
        other = None if found is None else fastest_count(self._problem, found, alike, found.step_s)
        if found is not None and other is not None:
            found = replace(found, candidate=other, step_s=evaluate_s(self._problem, other, found.stages))
        if found is not None and found.better_than(self._best):
            self._best = found
        return found


def _rungs(own: int, most: int) -> tuple[list[int], list[int]]:
    """From one number of stages up to the most, whose plans take longer to find, and down."""
    up, down = [own], [own]
    while up[-1] < most:
        up.append(min(most, max(up[-1] + 1, round(up[-1] * APART))))
    while down[-1] > 1:
        down.append(min(down[-1] - 1, round(down[-1] / APART)))
    return up, down[1:]
