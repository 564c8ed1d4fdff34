"""How the stages that a search asks for may recompute: choices of segments, solved when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.kernel.candidate_stages import RECOMPUTES, ROOM, Arcs
from planner.kernel.search import Choices
from planner.kernel.segments import INSIDE, START, FoundSegments, StageRoom, exact_segments, pattern_costs
from planner.kernel.tables import ALWAYS, Tables, segment_costs
from planner.kernel.usual_segments import usual_segments
from planner.plan.stage import Segment
from planner.solve.deadline import Deadline

STAGE_WORK = 50_000_000
"""Comparisons that solving the segments of one stage exactly may take [fitted: 0.1 s]."""
ALL_WORK = 1_000_000_000
"""The same for all stages and M of a balance [fitted: 2 s]."""
LONGEST_SOLVED, ALWAYS_SOLVED = 64, 12
"""Layers of the longest stage that is tried, and of one that always is, as long as there is work left [chosen]."""


@dataclass(slots=True)
class WorkBudget:
    """What may still be spent on solving segments exactly; shared by all searches of a balance.

    Attributes:
        work: comparisons left.
        layers: of the longest stage that is worth trying: long ones of unlike layers have too many choices.
        stage_work: comparisons that one stage may take.
        stages: how many were looked at.
    """

    work: int = ALL_WORK
    layers: int = LONGEST_SOLVED
    stage_work: int = STAGE_WORK
    stages: int = 0

    def spend(self, work: int, layers: int, solved: bool) -> None:
        """Note what a stage of that many layers took; when that was in vain, only shorter ones are worth it."""
        self.work -= work
        if not solved:
            self.layers = min(self.layers, max(ALWAYS_SOLVED, layers * 7 // 8))


class SegmentChoices:
    """What is known about recompute in the stages of `arcs`; it grows as stages are looked at.

    Attributes:
        needed: how many stages need recompute.
    """

    def __init__(self, tables: Tables, arcs: Arcs, deadline: Deadline, budget: WorkBudget) -> None:
        self.tables = tables
        self.arcs = arcs
        self.deadline = deadline
        self.budget = budget
        self.needed = int((arcs.need == RECOMPUTES).sum())
        count = len(arcs.need)
        self._first_of = np.full(count, -1, dtype=np.int64)
        self._number_of = np.zeros(count, dtype=np.int64)
        self._exact = np.zeros(count, dtype=np.bool_)
        self._wanted = np.zeros(count, dtype=np.bool_)
        self._recompute_s: list[float] = []
        self._turnaround_s: list[float] = []
        self._patterns: list[NDArray[np.uint8]] = []

    def known(self) -> Choices:
        """What the search reads; it marks what it would like to know."""
        recompute_s, turnaround_s = np.array(self._recompute_s), np.array(self._turnaround_s)
        return Choices(self._first_of, self._number_of, self._exact, self._wanted, recompute_s, turnaround_s)

    def look_at_wanted(self, limit_s: float) -> int:
        """Look at the stages that a search asked for, and say how many there were.

        Args:
            limit_s: only plans with a step time below are of interest.
        """
        wanted = [int(place) for place in np.flatnonzero(self._wanted)]
        self._wanted[:] = False
        return self.look_at(wanted, limit_s)

    def look_at(self, places: Sequence[int], limit_s: float) -> int:
        """The same for given stages; those that need no recompute, or are known, do not count."""
        news = [place for place in places if self.arcs.need[place] == RECOMPUTES and self._first_of[place] < 0]
        if not news:
            return 0
        shape = self.arcs.offset.shape
        ends = np.flatnonzero(self.arcs.length.ravel())
        begins = self.arcs.offset.ravel()[ends]
        for place in news:
            if self.deadline.over:
                break
            end = ends[np.searchsorted(begins, place, side="right") - 1]
            in_flight_index, device, stop = (int(index) for index in np.unravel_index(end, shape))
            first = stop - 1 - (place - int(self.arcs.offset[in_flight_index, device, stop]))
            found = self._found(place, in_flight_index, device, first, stop, limit_s)
            self._first_of[place] = len(self._recompute_s)
            self._number_of[place] = len(found.recompute_s)
            self._exact[place] = found.exact
            self._recompute_s.extend(found.recompute_s)
            self._turnaround_s.extend(found.turnaround_s)
            self._patterns.extend(found.pattern)
        return len(news)

    def segments(self, place: int, choice: int, first: int) -> tuple[Segment, ...] | None:
        """What a stage that begins at layer `first` recomputes.

        Args:
            place: of its arc.
            choice: of the search; -1 if it chose nothing, which for a stage that recomputes is the first choice.
            first: of its layers.

        Returns:
            None when the stage turned out not to fit.
        """
        if self.arcs.need[place] != RECOMPUTES:
            return ()
        if choice < 0:
            if not self._number_of[place]:
                return None
            choice = int(self._first_of[place])
        return segments_of(self._patterns[choice], first)

    def _found(
        self, place: int, in_flight_index: int, device: int, first: int, stop: int, limit_s: float
    ) -> FoundSegments:
        """The choices for one stage of layers [first, stop)."""
        room, fits_whole = float(self.arcs.terms[place, ROOM]), bool(self.arcs.whole[place])
        tables = self.tables
        last_free = tables.last_turns_around and in_flight_index == 0
        costs = segment_costs(tables, device, in_flight_index)
        whole = np.full((1, stop - first), INSIDE, dtype=np.uint8)
        whole[0, 0] = START
        _, recompute_s, turnaround_s = pattern_costs(costs, first, stop, last_free, whole[0])
        as_one = FoundSegments(np.array([recompute_s]), np.array([turnaround_s]), whole, True, 0)
        if tables.recompute == ALWAYS:
            return as_one
        most_recompute_s = np.inf
        if self.arcs.steady_recomputes:
            steady_s = float(
                tables.forward[device, stop]
                - tables.forward[device, first]
                + tables.backward[device, stop]
                - tables.backward[device, first]
            )
            most_recompute_s = (limit_s / tables.steady - steady_s) * (1 + 1e-9)
        stage, budget = StageRoom(first, stop, last_free, room, most_recompute_s), self.budget
        budget.stages += 1
        if stop - first <= budget.layers and budget.work > 0:
            found = exact_segments(costs, stage, min(budget.stage_work, budget.work))
            budget.spend(found.work, stop - first, found.exact)
            if found.exact:
                return _with(found, as_one) if fits_whole else found
        found = usual_segments(costs, stage)
        return _with(found, as_one) if fits_whole else found


def _with(found: FoundSegments, other: FoundSegments) -> FoundSegments:
    """The choices of both that are worth having; the other is one that turns around as fast as any."""
    keep = found.recompute_s < other.recompute_s[0]
    if (found.turnaround_s[keep] <= other.turnaround_s[0]).any():
        return found
    return FoundSegments(
        np.append(found.recompute_s[keep], other.recompute_s),
        np.append(found.turnaround_s[keep], other.turnaround_s),
        np.concatenate((found.pattern[keep], other.pattern)),
        found.exact,
        found.work,
    )


def segments_of(pattern: NDArray[np.uint8], first: int) -> tuple[Segment, ...]:
    """The segments that a pattern marks in a stage that begins at layer `first`."""
    segments, begun = [], -1
    for layer, mark in enumerate(pattern, start=first):
        if mark != INSIDE and begun >= 0:
            segments.append(Segment(first=begun, stop=layer))
        if mark != INSIDE:
            begun = layer if mark == START else -1
    if begun >= 0:
        segments.append(Segment(first=begun, stop=first + len(pattern)))
    return tuple(segments)
