"""Cuts by which all ranks are done at about the same time, where each makes its own order of passes.

A rank begins when the first micro-batch has come to its first stage, and then does all its work: no order is faster
(`planner.kernel.any_order`, path 1), and where there is room an order that is made for the plan often takes no longer.
So cuts are moved until the slowest rank is as fast as may be (`planner.kernel.level`), and again from cuts near the
best ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.level import LevelTables, descended
from planner.plan.schedules import Ring
from planner.solve.allowed_cuts import REACH

KICKS, WORK_OF_KICKS = 30, 1_000_000
"""Times that it is begun again near the best cuts, and stages of cuts that one of these looks at if there are as many
[chosen: 1 to 10 ms]."""
MOST_RUN, MOST_APART = 3, 2
"""Neighbouring cuts that are moved together at most, and how far apart two are that are moved against each other, where
there are many."""
FEW_CUTS = 24
"""Cuts up to which all moves are tried."""
KICKED = 3
"""Cuts that are moved then."""


class Level:
    """The search for cuts of one problem.

    Args:
        work_s: of all micro-batches, sums over the layers before each place, by rank's device, shape (ranks, places).
        head_s: of the forward pass of the first micro-batch, likewise.
        messages_s: of its output at each place.
        demanded: places where there must be a cut.
        ring: which rank runs which stages.
    """

    def __init__(self, work_s: Floats, head_s: Floats, messages_s: Floats, demanded: Sequence[int], ring: Ring) -> None:
        ranks = np.array([ring.rank_of(stage) for stage in range(ring.stages)], dtype=np.int64)
        sends = np.array([not ring.is_turn(stage) for stage in range(ring.stages - 1)], dtype=np.float64)
        places = np.array(demanded, dtype=np.int64)
        self._tables = LevelTables(work_s[ranks], head_s[ranks], messages_s, sends, ranks, places)
        self._moves = np.array([*_moves(ring.stages - 1)], dtype=np.int64)
        self._chance = np.random.default_rng(0)

    def found(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The best cuts found from these: inner places in order, as those are."""
        best, best_s = descended(np.array(cuts, dtype=np.int64), self._moves, self._tables)
        for _ in range(min(KICKS, WORK_OF_KICKS // self._moves.size)):
            kicked = best.copy()
            which = self._chance.integers(len(best), size=KICKED)
            kicked[which] += self._chance.choice((-2, -1, 1, 2), size=KICKED)
            other, other_s = descended(kicked, self._moves, self._tables)
            if other_s < best_s:
                best, best_s = other, other_s
        return tuple(best.tolist())


def _moves(cuts: int) -> list[tuple[int, ...]]:
    """By how many places each cut moves: one, a run of neighbours, or two against each other."""
    found, few = [], cuts <= FEW_CUTS
    for first, length in itertools.product(range(cuts), range(1, (cuts if few else MOST_RUN) + 1)):
        for reach in (REACH if length == 1 else REACH[:2]) if first + length <= cuts else ():
            for step in (reach, -reach):
                found.append((0,) * first + (step,) * length + (0,) * (cuts - first - length))
    for one, other in itertools.permutations(range(cuts), 2):
        if not few and abs(one - other) > MOST_APART:
            continue
        found.append(tuple((cut == one) - (cut == other) for cut in range(cuts)))
    return found
