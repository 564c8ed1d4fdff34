"""The cuts that a problem's rules allow for so many stages: some to begin with, and how to go from these to others."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.rules import Rules

Stops: TypeAlias = tuple[int, ...]
"""Index after the last layer of each stage."""
REACH = (1, 2, 4, 8)
"""Places by which cuts are moved."""
HALVINGS = 40
"""Of the interval that the most work of a stage is in."""


class AllowedCuts:
    """Cuts of L layers into so many stages.

    Args:
        rules: where cuts may be and must be.
        layers: L.
        stages: K.

    Attributes:
        places: where a cut may be, ascending.
        demanded: where one must be.
    """

    def __init__(self, rules: Rules, layers: int, stages: int) -> None:
        self.places = [int(place) for place in np.flatnonzero(rules.allowed)][1:-1]
        self.demanded = {int(place) for place in np.flatnonzero(rules.demanded)}
        self._layers, self._stages = layers, stages

    def allow(self, stops: Stops) -> bool:
        """Whether there is a cut wherever one must be."""
        return self.demanded <= {*stops}

    def every(self) -> Iterator[Stops]:
        """All cuts there are."""
        for inner in itertools.combinations(self.places, self._stages - 1):
            if self.allow(inner):
                yield (*inner, self._layers)

    def laid(self, sums: Floats, shares: Floats) -> Stops | None:
        """The cuts that are nearest in sum to these shares of the work; None where the rules allow none."""
        places = [0, *self.places, self._layers]
        wanted = shares * sums[-1]
        demanded = [number for number, place in enumerate(places[1:], start=1) if place in self.demanded]
        away = np.abs(sums[places][None, :] - wanted[:, None])
        reached = np.full(len(places), np.inf)
        reached[0] = 0.0
        came_from = np.zeros((len(wanted), len(places)), dtype=np.int64)
        for stage in range(len(wanted)):
            following = np.full(len(places), np.inf)
            for first, last in pairwise([0, *demanded, len(places) - 1]):  # no stage goes on after a demanded cut
                if first == last:
                    continue
                before = reached[first:last]
                least = np.minimum.accumulate(before)
                new = np.r_[True, before[1:] < least[:-1]]
                came_from[stage, first + 1 : last + 1] = first + np.maximum.accumulate(
                    np.where(new, np.arange(len(new)), 0)
                )
                following[first + 1 : last + 1] = least + away[stage, first + 1 : last + 1]
            reached = following
        if not np.isfinite(reached[-1]):
            return None
        number, stops = len(places) - 1, []
        for stage in reversed(range(len(wanted))):
            stops.append(places[number])
            number = int(came_from[stage, number])
        return tuple(reversed(stops))

    def balanced(self, sums: Floats) -> Stops | None:
        """The cuts whose stage with most work has the least; None where the rules allow none."""
        places = np.array([0, *self.places, self._layers])
        demanded = np.array([0, *np.cumsum(np.isin(places[1:-1], [*self.demanded])), len(self.demanded)])
        found: Stops | None = None
        low, high = 0.0, float(sums[-1])
        for _ in range(HALVINGS):
            most = (low + high) / 2 if found is not None else high
            stops = self._greedy(sums[places], places, demanded, most)
            if stops is None and found is None:
                return None
            low, high, found = (low, most, stops) if stops is not None else (most, high, found)
        return found

    def _greedy(self, sums: Floats, places: Indices, demanded: Indices, most: float) -> Stops | None:
        """Cuts such that no stage has more work than that, if each takes as many layers as it may."""
        at, stops = 0, []
        for left in reversed(range(self._stages)):
            reach = int(np.searchsorted(sums, sums[at] + most, side="right")) - 1
            wall = int(np.searchsorted(demanded[:-1], demanded[at] + 1))  # the next place where a cut must be
            at, before = min(reach, wall, len(places) - 1 - left), at
            if at <= before:
                return None
            stops.append(int(places[at]))
        return tuple(stops) if at == len(places) - 1 else None

    def moves(self) -> Iterator[tuple[int, ...]]:
        """By how many places each cut moves."""
        cuts = self._stages - 1
        for length in range(1, cuts + 1):
            for first in range(cuts - length + 1):
                for reach in REACH if length == 1 else REACH[:2]:
                    for step in (reach, -reach):
                        yield (0,) * first + (step,) * length + (0,) * (cuts - first - length)
        for one, other in itertools.permutations(range(cuts), 2):
            yield tuple((cut == one) - (cut == other) for cut in range(cuts))

    def moved(self, stops: Stops, move: Sequence[int]) -> Stops | None:
        """The cuts after a move; None where they would meet, leave the model or a place where a cut must be."""
        inner: list[int] = []
        for stop, step in zip(stops, move, strict=False):
            number = bisect_left(self.places, stop) + step
            if not 0 <= number < len(self.places) or (inner and self.places[number] <= inner[-1]):
                return None
            inner.append(self.places[number])
        return (*inner, self._layers) if self.demanded <= {*inner} else None

    def near(self, stops: Stops, chance: random.Random) -> Stops:
        """Cuts that a few moves by chance lead to."""
        cuts = self._stages - 1
        for _ in range(4 * cuts):
            move = [0] * cuts
            for _ in range(min(3, cuts)):
                move[chance.randrange(cuts)] += chance.choice((-2, -1, 1, 2))
            other = self.moved(stops, move)
            if other is not None:
                return other
        return stops
