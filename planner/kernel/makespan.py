"""The time of a step: closed forms that drive the search, and the exact makespan that has the last word.

Stages k = 1..K take f_k forward and b_k backward for each of M micro-batches, x_k of recompute inside every backward
pass and e_k = x_k + r_k of recompute for all but the one that turns around; boundary k, between stages k and k + 1,
takes c_k forward and c'_k backward. For GPipe and equal micro-batches the step takes exactly

    T = sum of f_k + b_k + x_k + c_k + c'_k
        + (M-1) (max of all f_k, c_k) + (M-1) (max of all b_k + e_k, c'_k) + slowest all-reduce and optimizer step.

It is the critical path of two flow shops in a row, forward and backward: in each it passes every machine once and stays
at one of them, the bottleneck, for the other M - 1 micro-batches. Between them it turns around at the last stage; a
stage before it could hold it up by its own work only, and that the bottleneck covers.

For unequal micro-batches, the larger first, `planner.kernel.two_sizes` says exactly what a step takes. Where the
segments of stages are chosen, too, a lower bound does: the same form with the least seconds in the sum, and the mean of
the first M - 1 micro-batches in the bottlenecks, is the length of a path that stays at one machine. What layers before
the bottleneck take longer with the first, large micro-batch is added (`heads`). For any other order there is no such
form; `planner.kernel.rear` builds a lower bound from stage to stage.

The exact makespan follows from the passes of each rank in order, for any schedule:

1. A rank walks its passes in turn, those of all its stages, until one needs what has not come yet: the output of the
   stage before, or the gradient of the stage after.
2. A pass starts when the rank is free and what it needs is there. Recompute starts as soon as the rank is free, also
   before the gradient comes; where the backward pass follows its own forward pass, nothing is recomputed.
3. What a pass computes goes over the link in that direction, one message after the other. Of two ranks each is before
   and after the other, so all that one sends goes over one link.
4. The ranks take turns until all are at their end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.plan.schedules import SCHEDULES, PassKind, ScheduleName, rank_orders

F, R, B, SEND_F, SEND_B, W = range(6)
"""Rows of the seconds; where the backward pass is split, B is of the gradients of the inputs alone."""
FORWARD, BACKWARD = int(PassKind.FORWARD), int(PassKind.BACKWARD)
TWO = 2
"""Ranks of which each is before and after the other."""
NOT_YET = -1.0
"""When a message comes that nobody has sent."""


class _Walk(NamedTuple):
    """How far all ranks are.

    Attributes:
        clock_s: when each rank is free, shape (ranks,).
        link_s: when the links to the next rank and to the one before are free, shape (2, ranks).
        output_s: when the output of a stage and micro-batch is at the next stage, or `NOT_YET`, shape (K, M).
        gradient_s: when the gradient for its inputs is at the stage before, or `NOT_YET`, shape (K, M).
    """

    clock_s: Floats
    link_s: Floats
    output_s: Floats
    gradient_s: Floats


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
    orders = orders_of(schedule, stages // chunks, micro_batches, chunks)
    return walked_s(orders, seconds)


def walked_s(orders: Indices, seconds: Floats) -> float:
    """The same for passes of shape (ranks, passes)."""
    return float(walked(orders, np.ascontiguousarray(seconds)))


@lru_cache(maxsize=64)
def orders_of(schedule: ScheduleName, ranks: int, micro_batches: int, chunks: int) -> Indices:
    """The numbers of the passes of every rank, shape (ranks, passes)."""
    return np.array(rank_orders(schedule, ranks, micro_batches, chunks), dtype=np.int64)


@compiled
def walked(orders: Indices, seconds: Floats) -> float:
    """Steps 1 to 4; infinite if all wait for each other."""
    _, stages, micro_batches = seconds.shape
    ranks, most = orders.shape
    chunks = stages // ranks
    there = stages, micro_batches
    walk = _Walk(np.zeros(ranks), np.zeros((2, ranks)), np.full(there, NOT_YET), np.full(there, NOT_YET))
    passes = np.zeros(ranks, dtype=np.int64)  # that each rank has done
    finished, moved = 0, True
    while finished < ranks:
        if not moved:
            return np.inf
        moved = False
        for rank in range(ranks):
            begun = passes[rank]
            while passes[rank] < most:
                number = orders[rank, passes[rank]]
                place, batch = number // micro_batches, number % micro_batches
                kind, stage = place // chunks, place % chunks * ranks + rank
                if kind == FORWARD:
                    done = _forward(walk, seconds, stage, batch)
                elif kind == BACKWARD:
                    turns_around = orders[rank, passes[rank] - 1] == number - chunks * micro_batches
                    done = _backward(walk, seconds, stage, batch, turns_around)
                else:
                    walk.clock_s[rank] += seconds[W, stage, batch]
                    done = True
                if not done:
                    break
                passes[rank] += 1
            if passes[rank] > begun:
                moved = True
                finished += int(passes[rank] == most)
    return float(walk.clock_s.max())


@compiled
def _forward(walk: _Walk, seconds: Floats, stage: int, batch: int) -> bool:
    """The forward pass of a micro-batch; False if its input has not come."""
    rank = stage % len(walk.clock_s)
    start_s = walk.clock_s[rank]
    if stage > 0:
        if walk.output_s[stage - 1, batch] == NOT_YET:
            return False
        start_s = max(start_s, walk.output_s[stage - 1, batch])
    walk.clock_s[rank] = start_s + seconds[F, stage, batch]
    sent_s = max(walk.link_s[0, rank], walk.clock_s[rank]) + seconds[SEND_F, stage, batch]
    walk.output_s[stage, batch] = sent_s
    if stage < len(walk.output_s) - 1:
        walk.link_s[0, rank] = sent_s
    return True


@compiled
def _backward(walk: _Walk, seconds: Floats, stage: int, batch: int, turns_around: bool) -> bool:
    """The backward pass of a micro-batch, which may follow its forward pass; False if its gradient has not come."""
    ranks = len(walk.clock_s)
    rank = stage % ranks
    start_s = walk.clock_s[rank]
    if not turns_around:
        start_s += seconds[R, stage, batch]
    if stage < len(walk.output_s) - 1:
        if walk.gradient_s[stage + 1, batch] == NOT_YET:
            return False
        start_s = max(start_s, walk.gradient_s[stage + 1, batch])
    walk.clock_s[rank] = start_s + seconds[B, stage, batch]
    channel = 0 if ranks == TWO else 1
    sent_s = max(walk.link_s[channel, rank], walk.clock_s[rank]) + seconds[SEND_B, stage, batch]
    walk.gradient_s[stage, batch] = sent_s
    if stage > 0:
        walk.link_s[channel, rank] = sent_s
    return True
