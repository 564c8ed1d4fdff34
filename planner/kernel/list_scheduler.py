"""Orders of split backward passes, made pass by pass: what a rank does next follows from what there is to do.

The ranks are walked in the order of time. One that is free knows the messages that are there or on their way to it, and
takes

1. the backward pass (of inputs) or the forward pass that is ready. Are both, the forward pass as long as fewer
   micro-batches than its lead are in flight; else the backward pass, which others wait for;
2. if none is ready, a pass of weights, unless one of the two will be so soon that it had to wait for that;
3. else what is ready first; and if nothing is on its way, it waits.

Of several chunks that are ready alike the later one goes first: its micro-batches are the earlier ones. A micro-batch
is in flight in each chunk that it went forward through and not yet back.

A forward pass is taken only if the rank can hold one micro-batch more in addition to the waiting ones, and then one
also in each later chunk that has none; and if these could go back, and wait, where no other one waits: the earliest
micro-batch always comes to the end. A backward pass is, if the rank can hold those that are in flight and wait; where
it cannot, weights are made first, and those go back that are in a later chunk. Both are only if those that wait then
can still have their passes of weights, which free what waited, so that no rank is ever stuck; and if there is room for
what they send (`planner.plan.actions.room_between`).
How far ahead a rank goes, and how soon is soon, are the settings that `planner.solve.own_orders` tries.
Recompute and messages are as in `planner.kernel.makespan`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled, inlined
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W, walked
from planner.kernel.turns import BACKWARD, FORWARD, NO_LINK, WEIGHTS, Ways

NOT_YET = -1.0
"""When a message comes that nobody has begun to make."""
NOTHING = -1
MOST_PLACES = 6
"""Places by which a pass is moved at most [chosen]."""


class Room(NamedTuple):
    """What ranks may hold, in bytes.

    Attributes:
        free: left on a rank in addition to what there is in any case while one of its stages goes forward, or back, or
            makes weights, by `PassKind`, shape (3, K); no more for backward than for forward passes.
        flying: of so many micro-batches in flight in each stage, shape (K, M + 1), beginning with none.
        waiting: of so many that wait there for the gradients of their parameters, likewise.
    """

    free: Floats
    flying: Floats
    waiting: Floats


class _Walk(NamedTuple):
    """How far all ranks are.

    Attributes:
        clock_s: when each is free, shape (ranks,).
        wake_s: when it decides again, shape (ranks,); infinite while it waits for a message that nobody makes.
        link_s: when its two links are free, shape (2, ranks).
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
def lacking_bytes(room: Room, own: Indices) -> float:
    """Bytes that one micro-batch needs too many on its way through all chunks of a rank; at most 0 if it fits."""
    flying, most = 0.0, -np.inf
    for stage in own:
        most = max(most, flying + room.waiting[stage, 1] - room.free[WEIGHTS, stage])
        flying += room.flying[stage, 1]
        most = max(most, flying - room.free[BACKWARD, stage])
    return most


@compiled
def listed(
    seconds: Floats,
    room: Room,
    ways: Ways,
    lead: Indices,
    most: Indices,
    patience: float,
    below_s: float,
) -> Indices:
    """The passes of all ranks.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        room: what ranks may hold.
        ways: where stages are, and what they send over.
        lead: micro-batches in flight up to which a forward pass goes before a backward pass, shape (ranks,).
        most: micro-batches in flight in each stage at most, shape (K,).
        patience: part of a pass of weights, or of a forward pass beyond the lead, that a rank rather waits.
        below_s: orders that take as long are not gone through to the end.

    Returns:
        Numbers of passes, shape (ranks, 3 * chunks * M); -1 in all of them if some rank cannot hold one micro-batch,
        and in the last ones of some rank if they take too long.
    """
    _, stages, count = seconds.shape
    ranks, chunks = ways.stages.shape
    orders = np.full((ranks, 3 * chunks * count), NOTHING)
    for rank in range(ranks):
        if lacking_bytes(room, ways.stages[rank]) > 0:
            return orders
    there = stages, count
    walk = _Walk(
        np.zeros(ranks),
        np.full(ranks, np.inf),
        np.zeros((2, ranks)),
        np.full(there, NOT_YET),
        np.full(there, NOT_YET),
        np.zeros((3, stages), dtype=np.int64),
    )
    walk.input_s[0] = 0.0
    walk.gradient_s[stages - 1] = 0.0
    walk.wake_s[0] = 0.0
    left_s = np.zeros(ranks)
    for rank in range(ranks):
        for stage in ways.stages[rank]:
            left_s[rank] += seconds[F, stage].sum() + seconds[B, stage].sum() + seconds[W, stage].sum()
    rank_of = np.zeros(stages, dtype=np.int64)
    for rank in range(ranks):
        rank_of[ways.stages[rank]] = rank
    places = np.zeros(ranks, dtype=np.int64)
    for _ in range(8 * ranks * orders.shape[1]):
        rank = int(np.argmin(walk.wake_s))
        now_s = walk.wake_s[rank]
        if now_s == np.inf or now_s + left_s[rank] >= below_s:
            break
        place = places[rank]
        before = orders[rank, place - 1] if place else NOTHING
        kind, chunk = _chosen(
            walk,
            seconds,
            room,
            ways.stages[rank],
            ways,
            now_s,
            lead[rank],
            most,
            patience,
            before,
        )
        if kind == NOTHING:
            walk.wake_s[rank] = np.inf
            continue
        stage = ways.stages[rank, chunk]
        batch = walk.done[kind, stage]
        turns_around = kind == 1 and before == chunk * count + batch
        orders[rank, place] = (kind * chunks + chunk) * count + batch
        places[rank] += 1
        left_s[rank] -= seconds[W if kind == 2 else B if kind else F, stage, batch]
        _begin(walk, seconds, rank_of, ways, stage, now_s, kind, turns_around)
    return orders


@inlined
def _chosen(
    walk: _Walk,
    seconds: Floats,
    room: Room,
    own: Indices,
    ways: Ways,
    now_s: float,
    lead: int,
    most: Indices,
    patience: float,
    before: int,
) -> tuple[int, int]:
    """Which kind of pass comes next, and of which chunk; `NOTHING` if none can."""
    flying = 0
    for stage in own:
        flying += walk.done[0, stage] - walk.done[1, stage]
    ready = _ready(walk, seconds, room, own, ways, now_s, most, before)
    (forward_wait_s, goes), (backward_wait_s, comes), waits = ready
    if backward_wait_s == 0.0 and (forward_wait_s > 0.0 or flying >= lead):
        return 1, comes
    if forward_wait_s == 0.0:
        soon = flying >= lead and backward_wait_s < patience * seconds[F, own[goes], walk.done[0, own[goes]]]
        return (1, comes) if soon else (0, goes)
    first_s = min(forward_wait_s, backward_wait_s)
    if waits != NOTHING and first_s >= patience * seconds[W, own[waits], walk.done[2, own[waits]]]:
        return 2, waits
    if first_s == np.inf:
        return NOTHING, NOTHING
    return (1, comes) if backward_wait_s <= forward_wait_s else (0, goes)


@inlined
def _ready(
    walk: _Walk,
    seconds: Floats,
    room: Room,
    own: Indices,
    ways: Ways,
    now_s: float,
    most: Indices,
    before: int,
) -> tuple[tuple[float, int], tuple[float, int], int]:
    """Which chunk may go forward first, and back, each after how many seconds, and one whose weights wait."""
    count = seconds.shape[2]
    flying = waiting = 0.0
    for stage in own:
        flying += room.flying[stage, walk.done[0, stage] - walk.done[1, stage]]
        waiting += room.waiting[stage, walk.done[1, stage] - walk.done[2, stage]]
    forward_wait_s = backward_wait_s = np.inf
    goes = comes = waits = NOTHING
    for chunk in range(len(own) - 1, -1, -1):
        stage = own[chunk]
        forward, backward, weights = walk.done[0, stage], walk.done[1, stage], walk.done[2, stage]
        fits = forward < count and forward - backward < most[stage] and _holds(walk, room, own, flying, waiting, chunk)
        if fits and _has_way(walk, ways, 0, stage):
            there_s = walk.input_s[stage, forward]
            if there_s != NOT_YET and max(0.0, there_s - now_s) < forward_wait_s:
                forward_wait_s, goes = max(0.0, there_s - now_s), chunk
        fits = backward < forward and _goes_back(walk, room, own, flying, waiting, chunk)
        if fits and _has_way(walk, ways, 1, stage):
            there_s = walk.gradient_s[stage, backward]
            again_s = 0.0 if before == chunk * count + backward else seconds[R, stage, backward]
            if there_s != NOT_YET and max(0.0, there_s - now_s - again_s) < backward_wait_s:
                backward_wait_s, comes = max(0.0, there_s - now_s - again_s), chunk
        if weights < backward and waits == NOTHING:
            waits = chunk
    return (forward_wait_s, goes), (backward_wait_s, comes), waits


@inlined
def _holds(walk: _Walk, room: Room, own: Indices, flying: float, waiting: float, chunk: int) -> bool:
    """Whether a rank can hold one micro-batch more in a chunk, and then one in each later chunk that has none."""
    for later in range(chunk, len(own)):
        stage = own[later]
        many = walk.done[0, stage] - walk.done[1, stage]
        if later == chunk or many == 0:
            many += 1
            flying += room.flying[stage, many] - room.flying[stage, many - 1]
        back = flying - room.flying[stage, many] + room.flying[stage, many - 1] + room.waiting[stage, 1]
        if flying > room.free[BACKWARD, stage] or back > room.free[WEIGHTS, stage]:
            return False
        if flying + waiting > room.free[FORWARD, stage]:
            return False
        if later == chunk and not _may_follow(walk, room, own, flying + waiting):
            return False
    return True


@inlined
def _goes_back(walk: _Walk, room: Room, own: Indices, flying: float, waiting: float, chunk: int) -> bool:
    """Whether a rank can hold what it has while a micro-batch goes back through a chunk, and then waits there."""
    stage, held = own[chunk], flying + waiting
    if held > room.free[BACKWARD, stage]:
        return False
    many, others = walk.done[0, stage] - walk.done[1, stage], walk.done[1, stage] - walk.done[2, stage]
    held += room.flying[stage, many - 1] - room.flying[stage, many]
    held += room.waiting[stage, others + 1] - room.waiting[stage, others]
    return held <= room.free[WEIGHTS, stage] and _may_follow(walk, room, own, held)


@inlined
def _may_follow(walk: _Walk, room: Room, own: Indices, held: float) -> bool:
    """Whether each chunk with waiting micro-batches can have their passes of weights, with so much on the rank."""
    least = np.inf
    for stage in own:
        if walk.done[1, stage] > walk.done[2, stage]:
            least = min(least, room.free[WEIGHTS, stage])
    return held <= least


@inlined
def _has_way(walk: _Walk, ways: Ways, kind: int, stage: int) -> bool:
    """Whether there is room for what such a pass sends."""
    if ways.links[kind, stage] == NO_LINK:
        return True
    sent: int = walk.done[kind, stage] - walk.done[kind, stage - 1 if kind else stage + 1]
    return sent < ways.under_way


@inlined
def _begin(
    walk: _Walk,
    seconds: Floats,
    rank_of: Indices,
    ways: Ways,
    stage: int,
    now_s: float,
    kind: int,
    turns_around: bool,
) -> None:
    """Note a pass, and when what it sends is there."""
    stages, rank, batch = len(rank_of), rank_of[stage], walk.done[kind, stage]
    walk.done[kind, stage] += 1
    if kind == 2:
        walk.clock_s[rank] = now_s + seconds[W, stage, batch]
    elif kind == 0:
        walk.clock_s[rank] = max(now_s, walk.input_s[stage, batch]) + seconds[F, stage, batch]
        if stage < stages - 1:
            sent_s = _sent_s(walk, rank, ways.links[0, stage], seconds[SEND_F, stage, batch])
            walk.input_s[stage + 1, batch] = sent_s
            _wake(walk, rank_of[stage + 1], now_s)
        if stage > 0 and walk.done[0, stage - 1] - walk.done[0, stage] + 1 >= ways.under_way:
            _wake(walk, rank_of[stage - 1], now_s)
    else:
        again_s = 0.0 if turns_around else seconds[R, stage, batch]
        walk.clock_s[rank] = max(now_s + again_s, walk.gradient_s[stage, batch]) + seconds[B, stage, batch]
        if stage > 0:
            sent_s = _sent_s(walk, rank, ways.links[1, stage], seconds[SEND_B, stage, batch])
            walk.gradient_s[stage - 1, batch] = sent_s
            _wake(walk, rank_of[stage - 1], now_s)
        if stage < stages - 1 and walk.done[1, stage + 1] - walk.done[1, stage] + 1 >= ways.under_way:
            _wake(walk, rank_of[stage + 1], now_s)
    walk.wake_s[rank] = walk.clock_s[rank]


@inlined
def _sent_s(walk: _Walk, rank: int, link: int, seconds: float) -> float:
    """When a message is there that leaves the rank now, over one of its links or none."""
    there_s: float = walk.clock_s[rank]
    if link != NO_LINK:
        there_s = walk.link_s[link, rank] = max(walk.link_s[link, rank], there_s) + seconds
    return there_s


@inlined
def _wake(walk: _Walk, rank: int, now_s: float) -> None:
    """Let a rank decide again as soon as it is free."""
    walk.wake_s[rank] = min(walk.wake_s[rank], max(now_s, walk.clock_s[rank]))


@compiled
def exchanged(
    orders: Indices,
    seconds: Floats,
    room: Room,
    ways: Ways,
    tries: int,
    longer: float,
    enough_s: float,
) -> Indices:
    """Orders that are no slower: single passes moved at random.

    A step may become longer than the shortest so far, at first by more than later (threshold accepting, Dueck and
    Scheuer, J. Comp. Phys. 90, 1990).

    Args:
        orders: numbers of passes, shape (ranks, 3 * chunks * M), that fit.
        seconds: as for `listed`.
        room: likewise.
        ways: likewise.
        tries: moves to try.
        longer: by what part a step may become longer when the first pass is moved.
        enough_s: no order takes less.
    """
    count = seconds.shape[2]
    ranks, passes = orders.shape
    best, now, chance = orders.copy(), orders.copy(), 12345
    best_s = now_s = walked(best, ways, seconds)
    for number in range(tries):
        if best_s <= enough_s:
            break
        chance = (chance * 1103515245 + 12345) % 2147483648
        rank = (chance >> 8) % ranks
        chance = (chance * 1103515245 + 12345) % 2147483648
        place = (chance >> 8) % (passes - 1)
        chance = (chance * 1103515245 + 12345) % 2147483648
        reach = min(1 + (chance >> 8) % MOST_PLACES, passes - 1 - place)
        if not _moved(now[rank], place, reach, chance >> 16 & 1):
            continue
        allowed = _allowed(now[rank], count, room, ways.stages[rank])
        made_s = walked(now, ways, seconds) if allowed else np.inf
        if made_s <= max(now_s, best_s * (1 + longer * (1 - number / tries))):
            now_s = made_s
        else:
            _moved(now[rank], place, reach, 1 - (chance >> 16 & 1))
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
def _allowed(order: Indices, count: int, room: Room, own: Indices) -> bool:
    """Whether each pass comes after the one that it needs, micro-batches in order, and all fit."""
    chunks = len(own)
    done = np.zeros((3, chunks), dtype=np.int64)
    for number in order:
        place, batch = number // count, number % count
        kind, chunk = place // chunks, place % chunks
        if done[kind, chunk] != batch or (kind > 0 and done[kind - 1, chunk] <= batch):
            return False
        done[kind, chunk] += kind == 0
        held = 0.0
        for each, stage in enumerate(own):
            held += (
                room.flying[stage, done[0, each] - done[1, each]] + room.waiting[stage, done[1, each] - done[2, each]]
            )
        if held > room.free[kind, own[chunk]]:
            return False
        done[kind, chunk] += kind > 0
    return True
