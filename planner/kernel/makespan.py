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
form; `planner.kernel.search` builds a lower bound from stage to stage.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.plan.schedules import ScheduleName, stage_orders


def makespan_s(schedule: ScheduleName, seconds: Floats) -> float:
    """Seconds of forward and backward phase; the simulator's makespan for the same schedule, without its events.

    Args:
        schedule: order of the passes.
        seconds: of F, R, B, SEND_F and SEND_B of each stage and micro-batch, shape (5, K, M); R is 0 for stages that
            keep everything, the last row of SEND_F and the first of SEND_B are not used.
    """
    _, stages, micro_batches = seconds.shape
    orders = _orders(schedule, stages, micro_batches)
    return float(_walked_s(orders, np.ascontiguousarray(seconds)))


@lru_cache(maxsize=64)
def _orders(schedule: ScheduleName, stages: int, micro_batches: int) -> Indices:
    """The passes of every stage, shape (K, 2 M)."""
    return np.array(stage_orders(schedule, stages, micro_batches), dtype=np.int64)


@compiled
def _walked_s(orders: Indices, seconds: Floats) -> float:
    """Every stage walks its passes in turn until it waits for a neighbour."""
    _, stages, micro_batches = seconds.shape
    clock, at = np.zeros(stages), np.zeros(stages, dtype=np.int64)
    forward_link, backward_link = np.zeros(stages), np.zeros(stages)
    output, gradient = np.full((stages, micro_batches), -1.0), np.full((stages, micro_batches), -1.0)
    done, moved = 0, True
    while done < stages:
        if not moved:
            return np.inf  # all wait for each other
        moved = False
        for stage in range(stages):
            while at[stage] < 2 * micro_batches:
                turn = orders[stage, at[stage]]
                if turn >= 0:
                    if stage > 0:
                        if output[stage - 1, turn] < 0:
                            break
                        clock[stage] = max(clock[stage], output[stage - 1, turn])
                    clock[stage] += seconds[0, stage, turn]
                    forward_link[stage] = max(forward_link[stage], clock[stage]) + seconds[3, stage, turn]
                    output[stage, turn] = forward_link[stage]
                else:
                    batch = ~turn
                    start = clock[stage]
                    if orders[stage, at[stage] - 1] != batch:  # else nothing stands between, and nothing is run again
                        start += seconds[1, stage, batch]
                    if stage < stages - 1:
                        if gradient[stage + 1, batch] < 0:
                            break
                        start = max(start, gradient[stage + 1, batch])
                    clock[stage] = start + seconds[2, stage, batch]
                    backward_link[stage] = max(backward_link[stage], clock[stage]) + seconds[4, stage, batch]
                    gradient[stage, batch] = backward_link[stage]
                at[stage] += 1
                moved = True
                if at[stage] == 2 * micro_batches:
                    done += 1
    return float(clock.max())
