"""The longest path through the passes of a schedule, and of what it is made: how the makespan depends on the stages.

The makespan is the length of the longest path from pass to pass, each of which waits for the pass before it on its rank
and for the message that it reads. As a function of the stages' seconds it is the largest of linear functions, one for
each path, so where it is evaluated, the longest path is a line that lies nowhere above it. `planner.solve.chunk_bound`
makes a lower bound of such lines. Messages wait for nothing but their sender here, and nothing is recomputed: both only
add to a step.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.compiled import compiled
from planner.kernel.turns import FORWARD, Turns

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
    done_s = np.empty(len(turns))
    before, by_message = np.empty(len(turns), dtype=np.int32), np.zeros(len(turns), dtype=np.bool_)
    number_of = np.empty((2, stages, shares.shape[1]), dtype=np.int32)
    for turn in range(len(turns)):
        kind, stage, batch = turns[turn, 0], turns[turn, 1], turns[turn, 2]
        rank = stage % ranks
        start_s, before[turn] = clock_s[rank], last[rank]
        if kind < len(number_of):
            source = stage - 1 if kind == FORWARD else stage + 1
            number_of[kind, stage, batch] = turn
            if 0 <= source < stages:
                sender = number_of[kind, source, batch]
                boundary = min(source, stage)
                there_s = done_s[sender] + sends[kind, boundary] * send_shares[kind, batch]
                if there_s > start_s:
                    start_s, before[turn], by_message[turn] = there_s, sender, True
        done_s[turn] = clock_s[rank] = start_s + seconds[kind, stage] * shares[kind, batch]
        last[rank] = turn
    at = last[np.argmax(clock_s)]
    length_s = clock_s.max()
    while at != NONE:
        kind, stage, batch = turns[at, 0], turns[at, 1], turns[at, 2]
        on_path[kind, stage] += shares[kind, batch]
        if by_message[at]:
            on_links[kind, stage - 1 if kind == FORWARD else stage] += send_shares[kind, batch]
        at = before[at]
    return length_s, on_path, on_links
