"""Orders of split backward passes, made pass by pass: what a stage does next follows from what there is to do.

The stages are walked in the order of time. One that is free knows the messages that are there or on their way to it,
and takes

1. the backward pass (of inputs) or the forward pass that is ready. Are both, the forward pass as long as fewer
   micro-batches than its lead are in flight; else the backward pass, which others wait for;
2. if none is ready, a pass of weights, unless one of the two will be so soon that it had to wait for that;
3. else what is ready first; and if nothing is on its way, it waits.

A forward pass is taken only if the stage can hold one micro-batch more in addition to the waiting ones; a backward
pass, if it can hold those that are in flight and wait. Passes of weights need nothing and free what waited, so that no
stage is ever stuck. How far ahead a stage goes, and how soon is soon, are the settings that `planner.solve.own_orders`
tries. Recompute and messages are as in `planner.kernel.makespan`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W, walked

NOT_YET = -1.0
"""When a message comes that nobody has begun to make."""
NOTHING = -1
LONGER_AT_FIRST = 0.02
"""By what part a step may become longer when the first pass is moved [fitted]."""
MOST_PLACES = 6
"""Places by which a pass is moved at most [chosen]."""


class Room(NamedTuple):
    """What stages may hold, in bytes; each array has shape (K,).

    Attributes:
        free: left in addition to what there is in any case.
        flying: of one micro-batch in flight.
        waiting: of one that waits for the gradients of its parameters.
    """

    free: Floats
    flying: Floats
    waiting: Floats


class _Walk(NamedTuple):
    """How far all stages are.

    Attributes:
        clock_s: when each is free, shape (K,).
        wake_s: when it decides again, shape (K,); infinite while it waits for a message that nobody makes.
        link_s: when the links to the next stage and to the one before are free, shape (2, K).
        input_s: when the input of a micro-batch is there, or `NOT_YET`, shape (K, M); so the gradient.
        gradient_s: likewise.
        done: passes of each kind that each stage has begun, shape (3, K).
    """

    clock_s: Floats
    wake_s: Floats
    link_s: Floats
    input_s: Floats
    gradient_s: Floats
    done: Indices


@compiled
def listed(seconds: Floats, room: Room, lead: Indices, most: Indices, patience: float, below_s: float) -> Indices:
    """The passes of all stages.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        room: what stages may hold.
        lead: micro-batches in flight up to which a forward pass goes before a backward pass, shape (K,).
        most: micro-batches in flight at most, shape (K,).
        patience: part of a pass of weights, or of a forward pass beyond the lead, that a stage rather waits.
        below_s: orders that take as long are not gone through to the end.

    Returns:
        Numbers of passes, shape (K, 3 M); -1 in all of them if some stage cannot hold one micro-batch, and in the last
        ones of some stage if they take too long.
    """
    _, stages, count = seconds.shape
    orders = np.full((stages, 3 * count), NOTHING)
    for stage in range(stages):
        if room.flying[stage] > room.free[stage]:
            return orders
    there = stages, count
    walk = _Walk(
        np.zeros(stages),
        np.full(stages, np.inf),
        np.zeros((2, stages)),
        np.full(there, NOT_YET),
        np.full(there, NOT_YET),
        np.zeros((3, stages), dtype=np.int64),
    )
    walk.input_s[0] = 0.0
    walk.gradient_s[stages - 1] = 0.0
    walk.wake_s[0] = 0.0
    left_s = np.zeros(stages)
    for stage in range(stages):
        left_s[stage] = seconds[F, stage].sum() + seconds[B, stage].sum() + seconds[W, stage].sum()
    for _ in range(4 * stages * 3 * count):
        stage = int(np.argmin(walk.wake_s))
        now_s = walk.wake_s[stage]
        if now_s == np.inf or now_s + left_s[stage] >= below_s:
            break
        kind = _chosen(walk, seconds, room, stage, now_s, lead[stage], most[stage], patience, orders)
        if kind == NOTHING:
            walk.wake_s[stage] = np.inf
            continue
        place = walk.done[0, stage] + walk.done[1, stage] + walk.done[2, stage]
        batch = walk.done[kind, stage]
        turns_around = place > 0 and kind == 1 and orders[stage, place - 1] == batch
        orders[stage, place] = kind * count + batch
        left_s[stage] -= seconds[W if kind == 2 else B if kind else F, stage, batch]
        _begin(walk, seconds, stage, now_s, kind, turns_around)
    return orders


@compiled
def _chosen(
    walk: _Walk,
    seconds: Floats,
    room: Room,
    stage: int,
    now_s: float,
    lead: int,
    most: int,
    patience: float,
    orders: Indices,
) -> int:
    """Which kind of pass comes next; `NOTHING` if none can."""
    count = seconds.shape[2]
    forward, backward, weights = walk.done[0, stage], walk.done[1, stage], walk.done[2, stage]
    flying, waiting = forward - backward, backward - weights
    one, other, free = room.flying[stage], room.waiting[stage], room.free[stage]
    forward_wait_s = backward_wait_s = np.inf
    if forward < count and flying < most and (flying + 1) * one + waiting * other <= free:
        there_s = walk.input_s[stage, forward]
        if there_s != NOT_YET:
            forward_wait_s = max(0.0, there_s - now_s)
    if backward < forward and flying * one + waiting * other <= free:
        there_s = walk.gradient_s[stage, backward]
        if there_s != NOT_YET:
            place = forward + backward + weights
            again_s = 0.0 if orders[stage, place - 1] == backward else seconds[R, stage, backward]
            backward_wait_s = max(0.0, there_s - now_s - again_s)
    if backward_wait_s == 0.0 and (forward_wait_s > 0.0 or flying >= lead):
        return 1
    if forward_wait_s == 0.0:
        soon = flying >= lead and backward_wait_s < patience * seconds[F, stage, forward]
        return 1 if soon else 0
    first_s = min(forward_wait_s, backward_wait_s)
    if waiting and first_s >= patience * seconds[W, stage, weights]:
        return 2
    if first_s == np.inf:
        return NOTHING
    return 1 if backward_wait_s <= forward_wait_s else 0


@compiled
def _begin(walk: _Walk, seconds: Floats, stage: int, now_s: float, kind: int, turns_around: bool) -> None:
    """Note a pass, and when what it sends is there."""
    stages = len(walk.clock_s)
    batch = walk.done[kind, stage]
    walk.done[kind, stage] += 1
    if kind == 2:
        walk.clock_s[stage] = now_s + seconds[W, stage, batch]
    elif kind == 0:
        walk.clock_s[stage] = max(now_s, walk.input_s[stage, batch]) + seconds[F, stage, batch]
        if stage < stages - 1:
            sent_s = max(walk.link_s[0, stage], walk.clock_s[stage]) + seconds[SEND_F, stage, batch]
            walk.link_s[0, stage] = walk.input_s[stage + 1, batch] = sent_s
            walk.wake_s[stage + 1] = min(walk.wake_s[stage + 1], max(now_s, walk.clock_s[stage + 1]))
    else:
        again_s = 0.0 if turns_around else seconds[R, stage, batch]
        walk.clock_s[stage] = max(now_s + again_s, walk.gradient_s[stage, batch]) + seconds[B, stage, batch]
        if stage > 0:
            sent_s = max(walk.link_s[1, stage], walk.clock_s[stage]) + seconds[SEND_B, stage, batch]
            walk.link_s[1, stage] = walk.gradient_s[stage - 1, batch] = sent_s
            walk.wake_s[stage - 1] = min(walk.wake_s[stage - 1], max(now_s, walk.clock_s[stage - 1]))
    walk.wake_s[stage] = walk.clock_s[stage]


@compiled
def exchanged(orders: Indices, seconds: Floats, room: Room, tries: int, enough_s: float) -> Indices:
    """Orders that are no slower: single passes moved at random.

    A step may become longer than the shortest so far, at first by more than later (threshold accepting, Dueck and
    Scheuer, J. Comp. Phys. 90, 1990).

    Args:
        orders: numbers of passes, shape (K, 3 M), that fit.
        seconds: as for `listed`.
        room: likewise.
        tries: moves to try.
        enough_s: no order takes less.
    """
    _, stages, count = seconds.shape
    best, now, chance = orders.copy(), orders.copy(), 12345
    best_s = now_s = walked(best, seconds)
    for number in range(tries):
        if best_s <= enough_s:
            break
        chance = (chance * 1103515245 + 12345) % 2147483648
        stage = (chance >> 8) % stages
        chance = (chance * 1103515245 + 12345) % 2147483648
        place = (chance >> 8) % (3 * count - 1)
        chance = (chance * 1103515245 + 12345) % 2147483648
        reach = min(1 + (chance >> 8) % MOST_PLACES, 3 * count - 1 - place)
        if not _moved(now[stage], place, reach, chance >> 16 & 1):
            continue
        made_s = walked(now, seconds) if _allowed(now[stage], count, room, stage) else np.inf
        if made_s <= max(now_s, best_s * (1 + LONGER_AT_FIRST * (1 - number / tries))):
            now_s = made_s
        else:
            _moved(now[stage], place, reach, 1 - (chance >> 16 & 1))
        if now_s < best_s:
            best_s = now_s
            best[:] = now
    return best


@compiled
def _moved(order: Indices, place: int, reach: int, back: int) -> bool:
    """Move a pass forward over so many others, or the one there back before them; False where nothing changes."""
    if order[place] == order[place + reach]:
        return False
    if back:
        last = order[place + reach]
        order[place + 1 : place + reach + 1] = order[place : place + reach].copy()
        order[place] = last
    else:
        first = order[place]
        order[place : place + reach] = order[place + 1 : place + reach + 1].copy()
        order[place + reach] = first
    return True


@compiled
def _allowed(order: Indices, count: int, room: Room, stage: int) -> bool:
    """Whether each pass comes after the one that it needs, micro-batches in order, and all fit."""
    done = np.zeros(3, dtype=np.int64)
    for number in order:
        kind, batch = number // count, number % count
        if done[kind] != batch or (kind > 0 and done[kind - 1] <= batch):
            return False
        flying, waiting = done[0] - done[1], done[1] - done[2]
        flying += kind == 0
        if kind < 2 and flying * room.flying[stage] + waiting * room.waiting[stage] > room.free[stage]:
            return False
        done[kind] += 1
    return True
