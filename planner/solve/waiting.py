"""The parts of a problem that wait to be searched, in the order of what no plan of them is below."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from planner.solve.parts import Part
from planner.solve.work_bound import WorkBound


class Waiting(NamedTuple):
    """A part that was not searched to the end.

    Attributes:
        bound_s: no plan of it is below.
        micro_batches: M; of equal bounds the smaller one comes first.
        number: when it came.
        part: itself.
        level: of the limits that it is searched with next; 0 if it was not searched for itself.
        bounded: whether the bound is as good as it gets without a search.
        work: the parts of the bound as long as recompute is not in it: that is found only for those whose turn comes.
        rough: whether the bound is from the layers' sums alone: not even its parts are found before its turn.
    """

    bound_s: float
    micro_batches: int
    number: int
    part: Part
    level: int
    bounded: bool
    work: WorkBound | None
    rough: bool


class Queue:
    """Those that wait, by level; of a level the one with the least bound comes first."""

    def __init__(self) -> None:
        self._levels: dict[int, list[Waiting]] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Waiting]:
        return (one for level in self._levels.values() for one in level)

    def push(
        self,
        bound_s: float,
        part: Part,
        level: int = 0,
        *,
        bounded: bool = True,
        work: WorkBound | None = None,
        rough: bool = False,
    ) -> None:
        """Let a part wait."""
        self._number += 1
        entry = Waiting(bound_s, part.candidate.split.count, self._number, part, level, bounded, work, rough)
        heapq.heappush(self._levels.setdefault(level, []), entry)

    def least_s(self) -> float:
        """What no plan of any is below; infinite if none waits."""
        return min((level[0].bound_s for level in self._levels.values()), default=np.inf)

    @property
    def level(self) -> int:
        """The lowest at which one waits."""
        return min(self._levels)

    def first(self) -> Waiting:
        """The one that `pop` takes."""
        return self._levels[self.level][0]

    def pop(self) -> Waiting:
        """The one with the least bound of the lowest level."""
        level = self.level
        entry = heapq.heappop(self._levels[level])
        if not self._levels[level]:
            del self._levels[level]
        return entry

    def take(self, wanted: Callable[[Waiting], bool]) -> Waiting | None:
        """The one with the least bound of those that are wanted; None if none is."""
        entry = min(filter(wanted, self), default=None)
        if entry is not None:
            level = self._levels[entry.level]
            level.remove(entry)
            heapq.heapify(level)
            if not level:
                del self._levels[entry.level]
        return entry

    def raise_bounds(self, parts: Collection[Part], bound_s: float, *, drop: bool) -> None:
        """What no plan of any of these is below, as far as they were not searched for themselves; or they go."""
        level = [
            entry._replace(bound_s=max(entry.bound_s, bound_s)) if entry.part in parts else entry
            for entry in self._levels.pop(0, [])
            if not drop or entry.part not in parts
        ]
        if level:
            heapq.heapify(level)
            self._levels[0] = level
