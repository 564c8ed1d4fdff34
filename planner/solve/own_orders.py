"""Orders for one plan of a schedule that splits the backward pass: the fastest of those that fit.

Which settings of `planner.kernel.list_scheduler` are best depends on the stages, so all are tried: how many
micro-batches may be in flight before those that come back go first (as with 1F1B, as with ZB-H2, or all), whether that
is a limit, and how long a stage rather waits than do weights. Two more
orders are always the same: ZB-H1, and 1F1B whose passes of weights follow at once, which needs the least memory.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.list_scheduler import NOTHING, Room, exchanged, lacking_bytes, listed
from planner.kernel.makespan import SEND_B, SEND_F, B, F, W, walked_s
from planner.kernel.turns import BACKWARD, FORWARD, WEIGHTS, ways
from planner.plan.held import Held, held_in
from planner.plan.orders import fixed_split_orders
from planner.plan.schedules import Ring
from planner.solve.balance import TIE
from planner.solve.deadline import NO_DEADLINE, Deadline

PATIENCE = (0.0, 0.5, 1.0)
"""Parts of a pass of weights that a stage rather waits [chosen]."""
CAPS = ((np.inf, 0), (1.25, 0), (2.0, 1), (1.0, 1), (3.0, 0), (1.5, 0), (1.0, 0))
"""Of the micro-batches that keep all ranks busy so many times as many, and so many more, are let into a stage of ranks
with several chunks [chosen: with 16 ranks and half the memory of 1F1B a step took 17 % longer without]."""
MANY_CAPS = 4
"""Of these, those that are tried where there are more passes than `FEW_PASSES`."""
ENOUGH_WINS, MOST_FIRST = 6, 6
"""Cuts of ranks with several chunks for which all settings are tried, and settings that are tried for those after them
[chosen: of 400 layers on 8 devices a third of the time, and the plan is the same]."""
CLOSE = 1e-3
"""Relative distance from the bound at which an order is good enough [chosen]."""
MOST_TRIES, WORK_OF_TRIES = 8_000, 120_000
"""Moves of single passes that are tried, and micro-batches of stages that all of them look at [chosen: 10 ms]."""
LONGER_AT_FIRST = 0.02
"""By what part a step may become longer when the first pass is moved [fitted]."""
MORE_MOVES = ((1, 0.02), (2, 0.05), (0, 0.1), (1, 0.2), (2, 0.2), (3, 0.1), (4, 0.1))
"""Where ranks have several chunks, of the orders from the fastest on one that passes are moved in, too, and by what
part the step may become longer [fitted: without, orders of 2 to 5 micro-batches were up to 3 % slower than need be, and
are up to 0.8 %]."""
FEW_TO_MOVE = 64
"""Micro-batches of stages up to which passes are moved for all cuts, and not for the best ones alone [chosen]."""
LATER = 1e-9
"""By what part orders may seem to be slower than the best ones, from rounding, and are gone through to the end."""
FEW_PASSES = 4_000
"""Passes of a step up to which all settings are tried, and beyond which half of them are [chosen]."""


class Tried:
    """Which settings were best for other cuts of the same problem.

    Attributes:
        wins: how often each was.
    """

    def __init__(self) -> None:
        self.wins: Counter[int] = Counter()

    def first(self, many: int) -> list[int]:
        """Those to try: of so many all until enough cuts were looked at, and then those that were best most often."""
        every = sorted(range(many), key=lambda number: -self.wins[number])
        return every if self.wins.total() < ENOUGH_WINS else every[:MOST_FIRST]


def best_orders(
    seconds: Floats,
    room: Room,
    least_s: float = 0.0,
    deadline: Deadline = NO_DEADLINE,
    below_s: float = np.inf,
    ring: Ring | None = None,
    tried: Tried | None = None,
    *,
    moves: bool = True,
) -> tuple[float, Indices] | None:
    """The fastest orders found that fit, and their makespan; None if some rank cannot hold one micro-batch.

    Where none takes less than `below_s`, it may be others, or None.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        room: what ranks may hold.
        least_s: no order takes less; nothing better is looked for than one that takes as long.
        deadline: when to take what there is.
        below_s: slower orders are of no use.
        ring: which rank runs which stages; by default each has one of its own.
        tried: which settings were best for cuts like these; where ranks have several chunks the others are left out.
        moves: whether single passes are moved, where they are few.
    """
    _, stages, count = seconds.shape
    ring = ring or Ring(stages)
    stages_of = ways(ring).stages
    if any(lacking_bytes(room, own) > 0 for own in stages_of):
        return None
    seconds = np.ascontiguousarray(seconds)
    moves &= stages * count <= FEW_TO_MOVE
    if moves:  # with passes moved a slower one may be the fastest
        below_s = np.inf
    begun: tuple[float, Indices] | None = None
    for orders, held in _fixed(ring, count):
        if all(_fits(room, stage, moments) for stage, moments in enumerate(held)):
            begun = _faster(begun, orders, seconds, ring)
    best, starts = _by_settings(seconds, room, ring, begun, _Ends(least_s, below_s, deadline), tried, moves=moves)
    if best is None or not moves or best[0] <= least_s * (1 + TIE) or deadline.over:
        return best
    found = moved(best, seconds, room, least_s, ring)
    if ring.chunks > 1:
        fastest = [best, *_slower(starts, best[0])]
        for number, longer in MORE_MOVES:
            if deadline.over or found[0] <= least_s * (1 + CLOSE):
                break
            start = fastest[min(number, len(fastest) - 1)]
            found = min(found, moved(start, seconds, room, least_s, ring, longer), key=lambda one: one[0])
    return found


class _Ends(NamedTuple):
    """When no more settings are tried, or an order is not gone through; see `best_orders`."""

    least_s: float
    below_s: float
    deadline: Deadline


def _by_settings(
    seconds: Floats,
    room: Room,
    ring: Ring,
    best: tuple[float, Indices] | None,
    ends: _Ends,
    tried: Tried | None,
    *,
    moves: bool,
) -> tuple[tuple[float, Indices] | None, list[tuple[float, Indices]]]:
    """The best of these orders and those that settings make; and all of these, where passes of them are moved."""
    _, stages, count = seconds.shape
    few = stages * count * 3 <= FEW_PASSES
    leads = _leads(ring, seconds, few=few)
    settings = [*product(_rooms(room), leads, PATIENCE if few else PATIENCE[::2])]
    starts: list[tuple[float, Indices]] = []
    won = None
    for number in range(len(settings)) if tried is None else tried.first(len(settings)):
        if best is not None and (best[0] <= ends.least_s * (1 + TIE) or ends.deadline.over):
            break
        within, (lead, most), patience = settings[number]
        limit_s = ends.below_s
        if best is not None and not (moves and ring.chunks > 1):
            limit_s = min(limit_s, best[0] * (1 + LATER))
        orders = listed(seconds, within, ways(ring), lead, most, patience, limit_s)
        if (orders[:, -1] != NOTHING).all():
            starts += [(walked_s(orders, seconds, ring), orders)] if moves else []
            had, best = best, _faster(best, orders, seconds, ring)
            won = number if best is not had else won
    if tried is not None and won is not None:
        tried.wins[won] += 1
    return best, starts


def _rooms(room: Room) -> list[Room]:
    """The room; and, as to run ahead may be slower, that in which forward passes have no more than backward passes."""
    if (room.free[FORWARD] == room.free[BACKWARD]).all():
        return [room]
    return [room, room._replace(free=room.free[[BACKWARD, BACKWARD, WEIGHTS]])]


def _slower(starts: list[tuple[float, Indices]], best_s: float) -> list[tuple[float, Indices]]:
    """Those after the best ones, the fastest first, each of another makespan."""
    by_step = {step_s: (step_s, orders) for step_s, orders in reversed(starts) if step_s > best_s * (1 + TIE)}
    return [by_step[step_s] for step_s in sorted(by_step)]


def moved(
    best: tuple[float, Indices],
    seconds: Floats,
    room: Room,
    least_s: float,
    ring: Ring | None = None,
    longer: float = LONGER_AT_FIRST,
) -> tuple[float, Indices]:
    """Orders with passes moved so that the step is shorter; see `best_orders`."""
    if best[0] <= least_s * (1 + CLOSE):
        return best
    ring = ring or Ring(seconds.shape[1])
    tries, enough_s = min(MOST_TRIES, WORK_OF_TRIES // seconds[0].size), least_s * (1 + CLOSE)
    return _faster(
        best,
        exchanged(best[1], np.ascontiguousarray(seconds), room, ways(ring), tries, longer, enough_s),
        seconds,
        ring,
    )


def _leads(ring: Ring, seconds: Floats, *, few: bool) -> list[tuple[Indices, Indices]]:
    """Of each rank the micro-batches in flight before those that come back go first, and of each stage those at most.

    Where a rank has several chunks, each that goes to the first one leaves less room for the others: of these as many
    are let in as come back in time to keep all ranks busy, or so many times more.
    """
    count = seconds.shape[2]
    if ring.chunks > 1:
        lead = np.full(ring.ranks, ring.stages)
        back_s = seconds[[F, B], :, 0].sum(axis=0)
        back_s[:-1] += seconds[SEND_F, :-1, 0] + seconds[SEND_B, 1:, 0]
        busy_s = seconds[[F, B, W], :, 0].sum(axis=0)
        slowest_s = max(sum(busy_s[stage] for stage in ring.stages_of(rank)) for rank in range(ring.ranks))
        needed = back_s[::-1].cumsum()[::-1] / slowest_s if slowest_s else np.full(ring.stages, count)
        needed = np.maximum(needed, np.finfo(np.float64).tiny)  # after some stages nothing takes time
        return [
            (lead, np.clip(np.ceil(times * needed + more), 1, count).astype(np.int64))
            for times, more in (CAPS if few else CAPS[:MANY_CAPS])
        ]
    number = ring.ranks - np.arange(ring.ranks)
    every = np.full(ring.ranks, count)
    leads = [(number, number), (number, every), (2 * number - 1, every), (every, every)]
    return [*leads, (2 * number - 1, 2 * number - 1)] if few else leads


def _faster(best: tuple[float, Indices] | None, orders: Indices, seconds: Floats, ring: Ring) -> tuple[float, Indices]:
    """The faster one; of equal ones the first, which needs less memory."""
    makespan_s = walked_s(orders, seconds, ring)
    return (makespan_s, orders) if best is None or makespan_s < best[0] * (1 - TIE) else best


def _fits(room: Room, stage: int, moments: tuple[Held, ...]) -> bool:
    """Whether a stage can hold so many micro-batches at each of these moments."""
    flying, waiting, free = room.flying[stage], room.waiting[stage], room.free[:, stage]
    return all(flying[many] + waiting[others] <= free[kind] for many, others, kind in moments)


@lru_cache(maxsize=64)
def _fixed(ring: Ring, count: int) -> tuple[tuple[Indices, tuple[tuple[Held, ...], ...]], ...]:
    """The two orders that are always the same where each stage has a rank of its own, and what stages hold."""
    if ring.chunks > 1:
        return ()
    both = (np.array(orders, dtype=np.int64) for orders in fixed_split_orders(ring.ranks, count))
    return tuple((orders, tuple(held_in(order, count) for order in orders)) for orders in both)
