"""The longest path through the passes of a schedule, and of what it is made: how the makespan depends on the stages.

The makespan is the length of the longest path from pass to pass, each of which waits for the pass before it on its rank
and for the message that it reads; a message waits for its sender and for the one before it on the link, and a sender
for the start of the pass that makes room. As a function of the stages' seconds it is the largest of linear functions,
one for each path, so where it is evaluated, the longest path is a line that lies nowhere above it.
`planner.solve.cut_bound` makes a lower bound of such lines. Nothing is recomputed here: that only adds to a step.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.compiled import compiled
from planner.kernel.turns import BACKWARD, FORWARD, NO_LINK, THERE_IS_ROOM, Turns

NONE = -1
"""No pass; they are numbered as they are walked."""


@compiled
def longest_path(
    turns: Turns, ranks: int, seconds: Floats, shares: Floats, sends: Floats, send_shares: Floats
) -> tuple[float, Floats, Floats]:
    """The longest path of a schedule.

    Args:
        turns: passes of all ranks, see `planner.kernel.turns`.
        ranks: how many there are.
        seconds: of each kind of pass, stage by stage, for a large micro-batch, shape (2, K), or (3, K) where the
            backward pass is split.
        shares: of that for each micro-batch, shape (2, M) or (3, M).
        sends: seconds of outputs and gradients of a large micro-batch at the boundary after each stage, shape (2, K).
        send_shares: of that for each micro-batch, shape (2, M).

    Returns:
        Its length, and how many large micro-batches' passes of each kind and stage, and messages at each boundary, are
        on it, of the shapes of `seconds` and `sends`: these, weighted, add up to the length. Infinite if passes wait
        for each other.
    """
    kinds, stages = seconds.shape
    on_path, on_links = np.zeros((kinds, stages)), np.zeros((2, stages))
    if not len(turns):
        return np.inf, on_path, on_links
    clock_s, last = np.zeros(ranks), np.full(ranks, NONE)
    link_s, last_sent = np.zeros((2, ranks)), np.full((2, ranks), NONE)
    there_s = np.empty(len(turns))  # of what the passes send
    before, by_message = np.empty(len(turns), dtype=np.int32), np.zeros(len(turns), dtype=np.bool_)
    sent_before = np.full(len(turns), NONE, dtype=np.int32)  # what a message waited for on its link
    number_of = np.empty((2, stages, shares.shape[1]), dtype=np.int32)
    starts_s, waits = np.empty(len(turns)), np.zeros(len(turns), dtype=np.bool_)  # and which end when there is room
    for turn in range(len(turns)):
        kind, stage, batch = turns[turn, 0], turns[turn, 1], turns[turn, 2]
        rank, link = turns[turn, 3], turns[turn, 4]
        start_s, before[turn] = clock_s[rank], last[rank]
        source = stage - 1 if kind == FORWARD else stage + 1
        if kind <= BACKWARD and 0 <= source < stages:
            sender = number_of[kind, source, batch]
            if there_s[sender] > start_s:
                start_s, before[turn], by_message[turn] = there_s[sender], sender, True
        end_s = clock_s[rank] = start_s + seconds[kind, stage] * shares[kind, batch]
        last[rank] = turn
        if kind > BACKWARD:
            continue
        starts_s[turn], room = start_s, turns[turn, 6]
        if room != THERE_IS_ROOM and starts_s[room] > end_s:
            end_s = clock_s[rank] = starts_s[room]
            waits[turn] = True
        number_of[kind, stage, batch], there_s[turn] = turn, end_s
        if link != NO_LINK:
            boundary = stage if kind == FORWARD else stage - 1
            if link_s[link, rank] > end_s:
                end_s, sent_before[turn] = link_s[link, rank], last_sent[link, rank]
            there_s[turn] = link_s[link, rank] = end_s + sends[kind, boundary] * send_shares[kind, batch]
            last_sent[link, rank] = turn
    at, sent = last[np.argmax(clock_s)], False
    length_s = clock_s.max()
    while at != NONE:
        kind, stage, batch = turns[at, 0], turns[at, 1], turns[at, 2]
        if sent:  # its message is on the path
            on_links[kind, stage if kind == FORWARD else stage - 1] += send_shares[kind, batch]
            if sent_before[at] != NONE:
                at = sent_before[at]
                continue
        if waits[at]:
            at, sent = before[turns[at, 6]], by_message[turns[at, 6]]
            continue
        on_path[kind, stage] += shares[kind, batch]
        at, sent = before[at], by_message[at]
    return length_s, on_path, on_links
