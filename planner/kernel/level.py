"""Cuts of ranks that make their own orders, moved as long as the slowest rank is done earlier for it.

A rank is done when the first micro-batch has come to its first stage and it has done all its work since. What is made
small is a power mean of the ranks' seconds: near the slowest rank's, and finer than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled

SQUARINGS = 5
"""Of the ranks' seconds: the mean is of order 2 to the power of this."""


class LevelTables(NamedTuple):
    """Seconds of stages whose cuts are moved.

    Attributes:
        work_s: of all micro-batches, sums over the layers before each place, shape (K, places).
        head_s: of the forward pass of the first micro-batch, likewise.
        messages_s: of its output at each place, shape (places,).
        sends: 1 for a stage that sends it to another rank, 0 for one that hands it on, shape (K - 1,).
        rank_of: of each stage, shape (K,).
        demanded: places where there must be a cut.
    """

    work_s: Floats
    head_s: Floats
    messages_s: Floats
    sends: Floats
    rank_of: Indices
    demanded: Indices


@compiled
def level_s(cuts: Indices, tables: LevelTables, done_s: Floats, limit: float) -> float:
    """The less, the earlier the slowest ranks are done; infinite where these are no cuts.

    Args:
        cuts: inner places, shape (K - 1,): in order, inside the model and where they must be.
        tables: see there.
        done_s: when each rank is done, which is written, shape (ranks,).
        limit: above it no more is asked than that it is.
    """
    stages, places = tables.work_s.shape
    for cut in range(stages - 1):
        if cuts[cut] <= (cuts[cut - 1] if cut else 0) or cuts[cut] >= places - 1:
            return np.inf
    for place in tables.demanded:
        if not np.any(cuts == place):
            return np.inf
    done_s[:] = 0.0
    before_s, begin = 0.0, 0
    for stage in range(stages):
        end = cuts[stage] if stage < stages - 1 else places - 1
        if stage < len(done_s):  # the first stage of a rank
            done_s[tables.rank_of[stage]] += before_s
        done_s[tables.rank_of[stage]] += tables.work_s[stage, end] - tables.work_s[stage, begin]
        before_s += tables.head_s[stage, end] - tables.head_s[stage, begin]
        if stage < stages - 1:
            before_s += tables.messages_s[end] * tables.sends[stage]
        begin = end
    slowest_s = done_s.max()
    if not 0 < slowest_s < limit:
        return float(slowest_s)
    powers = 0.0
    for rank in range(len(done_s)):
        power = done_s[rank] / slowest_s
        for _ in range(SQUARINGS):
            power *= power
        powers += power
    return float(powers ** (0.5**SQUARINGS) * slowest_s)


@compiled
def descended(cuts: Indices, moves: Indices, tables: LevelTables) -> tuple[Indices, float]:
    """Cuts moved as long as that makes them better, each time by the best of the moves; and what they come to.

    That is infinite, and nothing is moved, if these are no cuts.

    Args:
        cuts: as in `level_s`.
        moves: by how many places each cut goes, shape (moves, K - 1).
        tables: see there.
    """
    best, near, done_s = cuts.copy(), np.empty_like(cuts), np.empty(tables.rank_of.max() + 1)
    best_s = level_s(best, tables, done_s, np.inf)
    while best_s < np.inf:
        least_s, by = best_s * (1 - 1e-12), -1
        for move in range(len(moves)):
            near[:] = best
            near += moves[move]
            near_s = level_s(near, tables, done_s, least_s)
            if near_s < least_s:
                least_s, by = near_s, move
        if by < 0:
            break
        best, best_s = best + moves[by], least_s
    return best, best_s
