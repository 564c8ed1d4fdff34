"""The passes of all ranks one after the other: what waits comes later than what it waits for.

A rank takes its passes in order, and each waits for the output of the stage before or the gradient of the stage after.
So which come first does not depend on how long they take, and whoever asks for many makespans of one schedule
(`planner.kernel.makespan`, `planner.kernel.critical_path`) walks the same list each time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Indices
from planner.kernel.compiled import compiled
from planner.plan.orders import PassKind
from planner.plan.schedules import ScheduleName, rank_orders

Turns: TypeAlias = NDArray[np.int32]
"""Shape (passes of all ranks, 4): kind of the pass, its stage and micro-batch, and whether it is a backward pass that
follows its own forward pass. There are no passes where they wait for each other for ever."""
FORWARD, BACKWARD = int(PassKind.FORWARD), int(PassKind.BACKWARD)


@lru_cache(maxsize=64)
def turns_of(schedule: ScheduleName, ranks: int, micro_batches: int, chunks: int) -> Turns:
    """The passes of a schedule whose orders do not depend on the plan."""
    orders = np.array(rank_orders(schedule, ranks, micro_batches, chunks), dtype=np.int64)
    return in_turn(orders, ranks * chunks, micro_batches)


@compiled
def in_turn(orders: Indices, stages: int, micro_batches: int) -> Turns:
    """The passes of these orders.

    Args:
        orders: numbers of the passes of each rank, see `planner.plan.schedules`, shape (ranks, passes).
        stages: of all ranks.
        micro_batches: M.
    """
    ranks, most = orders.shape
    chunks = stages // ranks
    turns = np.empty((ranks * most, 4), dtype=np.int32)
    done = np.zeros((3, stages, micro_batches), dtype=np.bool_)
    position = np.zeros(ranks, dtype=np.int64)
    walked, before = 0, -1
    while walked > before:
        before = walked
        for rank in range(ranks):
            while position[rank] < most:
                number = orders[rank, position[rank]]
                place, batch = number // micro_batches, number % micro_batches
                kind, stage = place // chunks, place % chunks * ranks + rank
                source = stage - 1 if kind == FORWARD else stage + 1
                if kind <= BACKWARD and 0 <= source < stages and not done[kind, source, batch]:
                    break
                done[kind, stage, batch] = True
                own = number - chunks * micro_batches
                around = kind == BACKWARD and position[rank] > 0 and orders[rank, position[rank] - 1] == own
                turns[walked, 0], turns[walked, 1], turns[walked, 2], turns[walked, 3] = kind, stage, batch, around
                position[rank] += 1
                walked += 1
    return turns[: walked if walked == len(turns) else 0]
