"""The time of a step: closed forms that drive the search, and the exact makespan that has the last word.

Stages k = 1..K take f_k forward and b_k backward for each of M micro-batches, x_k of recompute inside every backward
pass and e_k = x_k + r_k of recompute for all but the one that turns around; boundary k, between stages k and k + 1,
takes c_k forward and c'_k backward. For GPipe and equal micro-batches the step takes exactly

    T = sum of f_k + b_k + x_k + c_k + c'_k
        + (M-1) (max of all f_k, c_k) + (M-1) (max of all b_k + e_k, c'_k) + slowest all-reduce and optimizer step.

It is the critical path of two flow shops in a row, forward and backward: in each it passes every machine once and stays
at one of them, the bottleneck, for the other M - 1 micro-batches. Between them it turns around at the last stage; a
stage before it could hold it up by its own work only, and that the bottleneck covers.

For unequal micro-batches, the larger first, `planner.kernel.two_sizes` says exactly what a step takes, or what it takes
at least where a rank waits for room for messages, as it does where small ones take long. Where the
segments of stages are chosen, too, a lower bound does: the same form with the least seconds in the sum, and the mean of
the first M - 1 micro-batches in the bottlenecks, is the length of a path that stays at one machine. What layers before
the bottleneck take longer with the first, large micro-batch is added (`heads`). For any other order there is no such
form; `planner.kernel.rear` builds a lower bound from stage to stage.

The exact makespan follows from the passes of each rank in order, for any schedule:

1. A rank walks its passes in turn, those of all its stages, until one needs what has not come yet: the output of the
   stage before, or the gradient of the stage after (`planner.kernel.turns`).
2. A pass starts when the rank is free and what it needs is there. Recompute starts as soon as the rank is free, also
   before the gradient comes; where the backward pass follows its own forward pass, nothing is recomputed.
3. What a pass computes goes over the link in that direction, one message after the other. Of two ranks each is before
   and after the other, so all that one sends goes over one link.
4. After a pass the rank waits until there is room for what it sends: of the messages that are under way between
   two stages the first is taken when the pass that reads it starts.
5. The ranks take turns until all are at their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.turns import BACKWARD, FORWARD, NO_LINK, THERE_IS_ROOM, Turns, Ways, in_turn, turns_of, ways
from planner.plan.schedules import SCHEDULES, Ring, ScheduleName

F, R, B, SEND_F, SEND_B, W = range(6)
"""Rows of the seconds; where the backward pass is split, B is of the gradients of the inputs alone."""


def with_copies(seconds: Floats, shares: Sequence[tuple[float, float]]) -> Floats:
    """Seconds of passes with what they copy, and of messages while they are under way, see `planner.cost.transfers`.

    Args:
        seconds: as `makespan_s` has them, of passes without copies and of whole messages.
        shares: of a message's seconds that its sender and its receiver copy it, after each stage but the last one.
    """
    if not any(map(any, shares)):
        return seconds
    found = seconds.copy()
    sender, receiver = np.array(shares).T[:, :, None]
    outputs_s, gradients_s = seconds[SEND_F, :-1], seconds[SEND_B, 1:]
    found[F, :-1] += sender * outputs_s
    found[F, 1:] += receiver * outputs_s
    found[B, 1:] += sender * gradients_s
    found[B, :-1] += receiver * gradients_s
    found[SEND_F, :-1] -= (sender + receiver) * outputs_s
    found[SEND_B, 1:] -= (sender + receiver) * gradients_s
    return found


def makespan_s(schedule: ScheduleName, seconds: Floats, chunks: int = 1) -> float:
    """Seconds of forward and backward phase; the simulator's makespan for the same schedule, without its events.

    Args:
        schedule: order of the passes.
        seconds: of F, R, B, SEND_F and SEND_B of each stage and micro-batch, shape (5, K, M), and of W where the
            schedule splits the backward pass, shape (6, K, M); R is 0 for stages that keep everything, the last row of
            SEND_F and the first of SEND_B are not used.
        chunks: stages a rank.
    """
    rows, stages, micro_batches = seconds.shape
    if rows <= W and SCHEDULES[schedule].splits_backward:
        raise ValueError(f"{schedule} takes seconds of W, and of {rows} rows none is theirs")
    turns = turns_of(schedule, stages // chunks, micro_batches, chunks)
    return float(walked_in_turn(turns, stages // chunks, np.ascontiguousarray(seconds)))


def walked_s(orders: Indices, seconds: Floats, ring: Ring | None = None) -> float:
    """The same for passes of shape (ranks, passes); without a ring each stage has a rank of its own."""
    return float(walked(orders, ways(ring or Ring(len(orders))), np.ascontiguousarray(seconds)))


@compiled
def walked(orders: Indices, ways: Ways, seconds: Floats) -> float:
    """The same; infinite if all wait for each other."""
    return walked_in_turn(in_turn(orders, ways, seconds.shape[2]), len(orders), seconds)


@compiled
def walked_in_turn(turns: Turns, ranks: int, seconds: Floats) -> float:
    """Steps 2 to 4 for each pass in turn; infinite if there is none."""
    _, stages, micro_batches = seconds.shape
    clock_s, link_s = np.zeros(ranks), np.zeros((2, ranks))
    # when the output of a stage is at the next one, and the gradient for its inputs at the one before
    there_s = np.empty((2, stages, micro_batches))
    starts_s = np.empty(len(turns))  # then a pass has its message
    for turn in range(len(turns)):
        kind, stage, batch = turns[turn, 0], turns[turn, 1], turns[turn, 2]
        rank, link = turns[turn, 3], turns[turn, 4]
        start_s = clock_s[rank]
        if kind > BACKWARD:
            clock_s[rank] = start_s + seconds[W, stage, batch]
            continue
        if kind == FORWARD:
            source, computes, sends = stage - 1, F, SEND_F
        else:
            source, computes, sends = stage + 1, B, SEND_B
            if not turns[turn, 5]:
                start_s += seconds[R, stage, batch]
        if 0 <= source < stages:
            start_s = max(start_s, there_s[kind, source, batch])
        starts_s[turn] = start_s
        end_s = start_s + seconds[computes, stage, batch]
        if turns[turn, 6] != THERE_IS_ROOM:
            end_s = max(end_s, starts_s[turns[turn, 6]])
        clock_s[rank] = there_s[kind, stage, batch] = end_s
        if link != NO_LINK:
            sent_s = max(link_s[link, rank], end_s) + seconds[sends, stage, batch]
            there_s[kind, stage, batch] = link_s[link, rank] = sent_s
    return float(clock_s.max()) if len(turns) else np.inf
