"""Orders for one plan of a schedule that splits the backward pass: the fastest of those that fit.

Which settings of `planner.kernel.list_scheduler` are best depends on the stages, so all are tried: how many
micro-batches may be in flight before those that come back go first (as with 1F1B, as with ZB-H2, or all), whether that
is a limit, and how long a stage rather waits than do weights. Two more
orders are always the same: ZB-H1, and 1F1B whose passes of weights follow at once, which needs the least memory.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.list_scheduler import NOTHING, Room, exchanged, listed
from planner.kernel.makespan import walked_s
from planner.plan.held import Held
from planner.plan.orders import fixed_split_orders
from planner.solve.balance import TIE
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.order_arrays import held_in

PATIENCE = (0.0, 0.5, 1.0)
"""Parts of a pass of weights that a stage rather waits [chosen]."""
CLOSE = 1e-3
"""Relative distance from the bound at which an order is good enough [chosen]."""
MOST_TRIES, WORK_OF_TRIES = 8_000, 120_000
"""Moves of single passes that are tried, and micro-batches of stages that all of them look at [chosen: 10 ms]."""
FEW_TO_MOVE = 64
"""Micro-batches of stages up to which passes are moved for all cuts, and not for the best ones alone [chosen]."""
LATER = 1e-9
"""By what part orders may seem to be slower than the best ones, from rounding, and are gone through to the end."""
FEW_PASSES = 4_000
"""Passes of a step up to which all settings are tried, and beyond which half of them are [chosen]."""


def best_orders(
    seconds: Floats, room: Room, least_s: float = 0.0, deadline: Deadline = NO_DEADLINE, below_s: float = np.inf
) -> tuple[float, Indices] | None:
    """The fastest orders found that fit, and their makespan; None if some stage cannot hold one micro-batch.

    Where none takes less than `below_s`, it may be others, or None.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        room: what stages may hold.
        least_s: no order takes less; nothing better is looked for than one that takes as long.
        deadline: when to take what there is.
        below_s: slower orders are of no use.
    """
    if (room.flying > room.free).any():
        return None
    _, stages, count = seconds.shape
    seconds = np.ascontiguousarray(seconds)
    if stages * count <= FEW_TO_MOVE:  # with passes moved a slower one may be the fastest
        below_s = np.inf
    best: tuple[float, Indices] | None = None
    for orders, held in _fixed(stages, count):
        if all(_fits(room, stage, moments) for stage, moments in enumerate(held)):
            best = _faster(best, orders, seconds)
    number = stages - np.arange(stages)
    every = np.full(stages, count)
    leads = [(number, number), (number, every), (2 * number - 1, every), (every, every)]
    if stages * count * 3 <= FEW_PASSES:
        leads.append((2 * number - 1, 2 * number - 1))
    for lead, most in leads:
        for patience in PATIENCE if stages * count * 3 <= FEW_PASSES else PATIENCE[::2]:
            if best is not None and (best[0] <= least_s * (1 + TIE) or deadline.over):
                return best
            limit_s = below_s if best is None else min(below_s, best[0] * (1 + LATER))
            orders = listed(seconds, room, lead, most, patience, limit_s)
            if (orders[:, -1] != NOTHING).all():
                best = _faster(best, orders, seconds)
    if best is None or stages * count > FEW_TO_MOVE:
        return best
    return moved(best, seconds, room, least_s)


def moved(best: tuple[float, Indices], seconds: Floats, room: Room, least_s: float) -> tuple[float, Indices]:
    """Orders with passes moved so that the step is shorter; see `best_orders`."""
    if best[0] <= least_s * (1 + CLOSE):
        return best
    tries = min(MOST_TRIES, WORK_OF_TRIES // seconds[0].size)
    return _faster(best, exchanged(best[1], np.ascontiguousarray(seconds), room, tries, least_s * (1 + CLOSE)), seconds)


def _faster(best: tuple[float, Indices] | None, orders: Indices, seconds: Floats) -> tuple[float, Indices]:
    """The faster one; of equal ones the first, which needs less memory."""
    makespan_s = walked_s(orders, seconds)
    return (makespan_s, orders) if best is None or makespan_s < best[0] * (1 - TIE) else best


def _fits(room: Room, stage: int, moments: tuple[Held, ...]) -> bool:
    """Whether a stage can hold so many micro-batches at each of these moments."""
    flying, waiting, free = room.flying[stage], room.waiting[stage], room.free[stage]
    return all(many * flying + others * waiting <= free for many, others in moments)


@lru_cache(maxsize=64)
def _fixed(stages: int, count: int) -> tuple[tuple[Indices, tuple[tuple[Held, ...], ...]], ...]:
    """The two orders that are always the same, and what their stages hold."""
    both = (np.array(orders, dtype=np.int64) for orders in fixed_split_orders(stages, count))
    return tuple((orders, tuple(held_in(order, count) for order in orders)) for orders in both)
