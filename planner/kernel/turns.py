"""The passes of all ranks one after the other: what waits comes later than what it waits for.

A rank takes its passes in order, and each waits for the output of the stage before or the gradient of the stage after;
after it the rank waits until there is room for what it sends (`planner.plan.actions.room_between`), so it comes after
the pass that makes room. Which come first does not depend on how long they take, and whoever asks for many makespans of
one schedule (`planner.kernel.makespan`, `planner.kernel.critical_path`) walks the same list each time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Indices
from planner.kernel.compiled import compiled
from planner.plan.actions import room_between
from planner.plan.orders import PassKind
from planner.plan.schedules import SCHEDULES, Ring, ScheduleName, rank_orders

Turns: TypeAlias = NDArray[np.int32]
"""Shape (passes of all ranks, 7): kind of the pass, its stage and micro-batch, its rank, over which of the rank's links
it sends (`Ring.direction`, or `NO_LINK`), whether it is a backward pass that follows its own forward pass, and which
of these passes makes room for what it sends when it starts (or `THERE_IS_ROOM`). There are no passes where they wait
for each other for ever."""
FORWARD, BACKWARD, WEIGHTS = int(PassKind.FORWARD), int(PassKind.BACKWARD), int(PassKind.WEIGHTS)
NO_LINK = -1
"""Where the rank itself reads what a pass makes, or nobody does."""
THERE_IS_ROOM = -1
"""No pass has to make any."""


class Ways(NamedTuple):
    """Where stages are, and what they send over.

    Attributes:
        stages: by rank and chunk, shape (ranks, chunks).
        links: by way, forward or back, and stage the link that it sends over, shape (2, K).
        under_way: messages of a stage and way that may be under way.
    """

    stages: Indices
    links: Indices
    under_way: int


@lru_cache(maxsize=64)
def turns_of(schedule: ScheduleName, ranks: int, micro_batches: int, chunks: int) -> Turns:
    """The passes of a schedule whose orders do not depend on the plan."""
    orders = np.array(rank_orders(schedule, ranks, micro_batches, chunks), dtype=np.int64)
    return in_turn(orders, ways(SCHEDULES[schedule].ring(ranks, chunks)), micro_batches)


@lru_cache(maxsize=256)
def ways(ring: Ring) -> Ways:
    """Where the stages of a ring are."""
    stages = np.array([ring.stages_of(rank) for rank in range(ring.ranks)], dtype=np.int64)
    links = np.full((2, ring.stages), NO_LINK)
    for stage in range(ring.stages - 1):
        if not ring.is_turn(stage):
            links[FORWARD, stage] = ring.direction(stage, forward=True)
            links[BACKWARD, stage + 1] = ring.direction(stage + 1, forward=False)
    return Ways(stages, links, room_between(0, 1, ring))


@compiled
def in_turn(orders: Indices, ways: Ways, micro_batches: int) -> Turns:
    """The passes of these orders.

    Args:
        orders: numbers of the passes of each rank, see `planner.plan.schedules`, shape (ranks, passes).
        ways: where stages are.
        micro_batches: M.
    """
    ranks, most = orders.shape
    chunks, stages = ways.stages.shape[1], ways.links.shape[1]
    turns = np.empty((ranks * most, 7), dtype=np.int32)
    in_order = np.empty((2, stages, micro_batches), dtype=np.int32)  # of each stage, which of all passes are its own
    done = np.zeros((3, stages, micro_batches), dtype=np.bool_)
    many = np.zeros((3, stages), dtype=np.int64)
    position = np.zeros(ranks, dtype=np.int64)
    walked, before = 0, -1
    while walked > before:
        before = walked
        for rank in range(ranks):
            while position[rank] < most:
                number = orders[rank, position[rank]]
                place, batch = number // micro_batches, number % micro_batches
                kind, stage = place // chunks, ways.stages[rank, place % chunks]
                source, target = (stage - 1, stage + 1) if kind == FORWARD else (stage + 1, stage - 1)
                if kind <= BACKWARD and 0 <= source < stages and not done[kind, source, batch]:
                    break
                link = ways.links[kind, stage] if kind <= BACKWARD else NO_LINK
                first = many[kind, stage] - ways.under_way  # of the messages before it which has to be taken
                if link != NO_LINK and first >= many[kind, target]:
                    break
                done[kind, stage, batch] = True
                own = number - chunks * micro_batches
                around = kind == BACKWARD and position[rank] > 0 and orders[rank, position[rank] - 1] == own
                turn = turns[walked]
                turn[0], turn[1], turn[2], turn[3], turn[4], turn[5] = kind, stage, batch, rank, link, around
                turn[6] = in_order[kind, target, first] if link != NO_LINK and first >= 0 else THERE_IS_ROOM
                if kind <= BACKWARD:
                    in_order[kind, stage, many[kind, stage]] = walked
                many[kind, stage] += 1
                position[rank] += 1
                walked += 1
    return turns[: walked if walked == len(turns) else 0]
