"""Cuts by which all ranks are done at about the same time, where each makes its own order of passes.

A rank begins when the first micro-batch has come to its first stage, and then does all its work: no order is faster
(`planner.kernel.any_order`, path 1), and where there is room an order that is made for the plan often takes no longer.
So cuts are moved until the slowest rank is as fast as may be, all single moves and exchanges of neighbours looked at in
one array; and again from cuts near the best ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.plan.schedules import Ring

REACH = (1, 2, 4, 8)
"""Places by which a cut is moved."""
KICKS, WORK_OF_KICKS = 30, 1_000_000
"""Times that it is begun again near the best cuts, and stages of cuts that one of these looks at if there are as many
[chosen: 10 to 100 ms]."""
MOST_RUN, MOST_APART = 3, 2
"""Neighbouring cuts that are moved together at most, and how far apart two are that are moved against each other, where
there are many."""
FEW_CUTS = 24
"""Cuts up to which all moves are tried."""
KICKED = 3
"""Cuts that are moved then."""
SQUARINGS = 5
"""Of the ranks' seconds, so that a power of them is made small: near the slowest rank's, and finer than that."""


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
        ranks = [ring.rank_of(stage) for stage in range(ring.stages)]
        self._work_s, self._head_s, self._messages_s = work_s[ranks], head_s[ranks], messages_s
        self._sends = np.array([not ring.is_turn(stage) for stage in range(ring.stages - 1)], dtype=np.float64)
        self._demanded, self._stages = [*demanded], ring.stages
        self._of_rank = np.zeros((ring.stages, ring.ranks))
        self._of_rank[np.arange(ring.stages), ranks] = 1.0
        self._moves = np.array([*_moves(ring.stages - 1)], dtype=np.int64)
        self._chance = np.random.default_rng(0)

    def found(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The best cuts found from these: inner places in order, as those are."""
        best = self._descended(np.array(cuts, dtype=np.int64))
        best_s = self._cost(best[None])[0]
        for _ in range(min(KICKS, WORK_OF_KICKS // self._moves.size)):
            kicked = best.copy()
            which = self._chance.integers(len(best), size=KICKED)
            kicked[which] += self._chance.choice((-2, -1, 1, 2), size=KICKED)
            if self._allowed(kicked[None])[0]:
                other = self._descended(kicked)
                cost = self._cost(other[None])[0]
                if cost < best_s:
                    best, best_s = other, cost
        return tuple(best.tolist())

    def _descended(self, cuts: Indices) -> Indices:
        """Moved as long as that makes them better."""
        cost = self._cost(cuts[None])[0]
        while True:
            near = cuts + self._moves
            near = near[self._allowed(near)]
            if not len(near):
                return cuts
            costs = self._cost(near)
            at = int(np.argmin(costs))
            if costs[at] >= cost * (1 - 1e-12):
                return cuts
            cuts, cost = near[at], costs[at]

    def _allowed(self, cuts: Indices) -> NDArray[np.bool_]:
        """Which of these are cuts, shape (n, K - 1): in order, inside the model and where they must be."""
        last = self._work_s.shape[1] - 1
        ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, last)))
        fine = (np.diff(ends, axis=1) > 0).all(axis=1)
        for place in self._demanded:
            fine &= (cuts == place).any(axis=1)
        return np.array(fine)

    def _cost(self, cuts: Indices) -> Floats:
        """The less, the earlier the slowest ranks are done, shape (n,)."""
        places = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self._work_s.shape[1] - 1)))
        stages = np.arange(self._stages)
        work_s = self._work_s[stages, places[:, 1:]] - self._work_s[stages, places[:, :-1]]
        forward_s = self._head_s[stages, places[:, 1:]] - self._head_s[stages, places[:, :-1]]
        sent_s = self._messages_s[cuts] * self._sends
        ranks = self._of_rank.shape[1]
        before_s = np.cumsum(forward_s[:, :ranks], axis=1) - forward_s[:, :ranks]
        before_s[:, 1:] += np.cumsum(sent_s[:, : ranks - 1], axis=1)
        done_s = work_s @ self._of_rank + before_s
        scale_s = done_s.max()
        if not scale_s > 0:
            return np.zeros(len(cuts))
        powers: Floats = done_s / scale_s
        for _ in range(SQUARINGS):
            powers *= powers
        return np.array(powers.sum(axis=1) ** (0.5**SQUARINGS) * scale_s)


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
