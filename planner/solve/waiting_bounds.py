"""Bounds of candidates that wait in the search of `planner.solve.chunk_search`: made better by linear programs.

A candidate first has a cheap bound; a `planner.solve.cut_bound.CutBound` makes it better program by program, and by
halves of the cuts once its own cuts were searched. How many there may be in all is counted here.
"""

from __future__ import annotations

from planner.solve import limits
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import Deadline
from planner.solve.first_plans import Waiting

FIRST_PROGRAMS, PROGRAMS_AT_ONCE, PROGRAMS_OF_HALVES = 1, 4, 100
"""Linear programs of a candidate until it is another one's turn, when it comes first, later, and when its cuts are
halved."""
PROGRAMS_BEFORE = 21
"""Linear programs before cuts are searched; those after it only make the bound better [chosen: of 400 layers whose
candidates nearly all have the same bound they took half of the time]."""
MOST_WORK = 1_000
"""Linear programs of all candidates without a time limit, as for few stages [fitted: 2 to 5 s]."""


class WaitingBounds:
    """The linear programs of one search.

    Args:
        most: that there may be, each counted by `limits.program_work`.
    """

    def __init__(self, most: float) -> None:
        self._most, self._work = most, 0

    @property
    def spent(self) -> bool:
        """Whether there were as many as may be."""
        return self._work >= self._most

    def is_tight(self, entry: Waiting, reached_s: float) -> bool:
        """Whether no more programs are solved for a candidate, but for halves, where a plan takes `reached_s`."""
        return entry.search is not None and (entry.search.done or entry.bound_s > reached_s)

    def is_ready(self, entry: Waiting, reached_s: float) -> bool:
        """Whether the cuts of a candidate are searched before its bound is made better."""
        enough = entry.search is not None and entry.search.rounds >= PROGRAMS_BEFORE
        return enough or self.is_tight(entry, reached_s)

    def tightened(self, entry: Waiting, deadline: Deadline, reached_s: float) -> Waiting:
        """The candidate with a better bound."""
        search = entry.search or CutBound(entry.plans)
        had = search.rounds
        bound_s = search.tightened(PROGRAMS_AT_ONCE if had else FIRST_PROGRAMS, deadline, reached_s)
        self._count(entry, search.rounds - had)
        bound_s = max(entry.bound_s, bound_s)
        return entry._replace(expected_s=max(entry.expected_s, bound_s), bound_s=bound_s, search=search)

    def halved(self, entry: Waiting, deadline: Deadline, reached_s: float) -> Waiting:
        """The candidate, with a search for a bound, after some of what is between it and the best plan was closed."""
        search = entry.search
        assert search is not None
        had = search.rounds
        bound_s = search.halved(PROGRAMS_OF_HALVES, deadline, reached_s)
        self._count(entry, search.rounds - had)
        return entry._replace(bound_s=max(entry.bound_s, bound_s))

    def _count(self, entry: Waiting, programs: int) -> None:
        self._work += programs * limits.program_work(entry.plans.stages)
