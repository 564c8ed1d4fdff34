"""The longest path through the passes of a schedule, and of what it is made: how the makespan depends on the stages.

The makespan is the length of the longest path from pass to pass, each of which waits for the pass before it on its rank
and for the message that it reads. As a function of the stages' seconds it is the largest of linear functions, one for
each path, so where it is evaluated, the longest path is a line that lies nowhere above it. `planner.solve.chunk_bound`
makes a lower bound of such lines. Messages wait for nothing but their sender here, and nothing is recomputed: both only
add to a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices, Mask
from planner.kernel.compiled import compiled

NONE = -1
"""No pass: they are numbered as in an array of shape (passes, K, M), forward passes first."""
NOT_YET = -1.0
"""When a pass is done that has not begun."""


class _Walk(NamedTuple):
    """How far the passes are, each of shape (passes, K, M).

    Attributes:
        done_s: when each is done, or `NOT_YET`.
        before: the number of the one that it waited for, or `NONE`.
        by_message: whether that was for its message.
    """

    done_s: Floats
    before: Indices
    by_message: Mask


@compiled
def longest_path(orders: Indices, seconds: Floats, shares: Floats, sends: Floats) -> tuple[float, float, Floats]:
    """The longest path of a schedule.

    Args:
        orders: passes of each rank, see `planner.plan.schedules`.
        seconds: of each kind of pass, stage by stage, for a large micro-batch, shape (2, K), or (3, K) where the
            backward pass is split.
        shares: of that for each micro-batch, shape (2, M) or (3, M).
        sends: seconds of outputs and of gradients of each micro-batch, shape (2, M).

    Returns:
        Its length, the messages' part of it, and how many large micro-batches' passes of each kind and stage are on it,
        of the shape of `seconds`: these, weighted, and the messages add up to the length. Infinite if passes wait for
        each other.
    """
    kinds, stages = seconds.shape
    micro_batches = shares.shape[1]
    there = kinds, stages, micro_batches
    walk = _Walk(np.full(there, NOT_YET), np.full(there, NONE), np.zeros(there, dtype=np.bool_))
    last = _walked(walk, orders, seconds, shares, sends)
    on_path, on_links = np.zeros((kinds, stages)), 0.0
    if last == NONE:
        return np.inf, on_links, on_path
    length_s = walk.done_s.ravel()[last]
    while last != NONE:
        back, place = last // (stages * micro_batches), last % (stages * micro_batches)
        stage, batch = place // micro_batches, place % micro_batches
        on_path[back, stage] += shares[back, batch]
        if walk.by_message[back, stage, batch]:
            on_links += sends[back, batch]
        last = walk.before[back, stage, batch]
    return length_s, on_links, on_path


@compiled
def _walked(walk: _Walk, orders: Indices, seconds: Floats, shares: Floats, sends: Floats) -> int:
    """Walk all passes; the number of the one that is done last, `NONE` if they wait for each other."""
    ranks, most = orders.shape
    clock_s, last = np.zeros(ranks), np.full(ranks, NONE)
    position = np.zeros(ranks, dtype=np.int64)
    finished, moved = 0, True
    while finished < ranks:
        if not moved:
            return NONE
        moved = False
        for rank in range(ranks):
            begun = position[rank]
            while position[rank] < most:
                number = _pass(walk, orders[rank, position[rank]], rank, ranks, clock_s[rank], last[rank], sends)
                if number == NONE:
                    break
                back, place = number // walk.done_s[0].size, number % walk.done_s[0].size
                stage, batch = place // shares.shape[1], place % shares.shape[1]
                walk.done_s[back, stage, batch] += seconds[back, stage] * shares[back, batch]
                clock_s[rank], last[rank] = walk.done_s[back, stage, batch], number
                position[rank] += 1
            if position[rank] > begun:
                moved = True
                finished += int(position[rank] == most)
    end: int = last[np.argmax(clock_s)]
    return end


@compiled
def _pass(walk: _Walk, turn: int, rank: int, ranks: int, clock_s: float, last: int, sends: Floats) -> int:
    """Note when a pass begins, and what it waited for; its number, `NONE` if its message has not come."""
    _, stages, micro_batches = walk.done_s.shape
    chunks = stages // ranks
    place, batch = turn // micro_batches, turn % micro_batches
    back, stage = place // chunks, place % chunks * ranks + rank
    source = stage - 1 if back == 0 else stage + 1
    walk.before[back, stage, batch] = last
    if back < len(sends) and 0 <= source < stages:
        sent_s = walk.done_s[back, source, batch]
        if sent_s == NOT_YET:
            return NONE
        if sent_s + sends[back, batch] > clock_s:
            clock_s = sent_s + sends[back, batch]
            walk.before[back, stage, batch] = (back * stages + source) * micro_batches + batch
            walk.by_message[back, stage, batch] = True
    walk.done_s[back, stage, batch] = clock_s
    number: int = (back * stages + stage) * micro_batches + batch
    return number
