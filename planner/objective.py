"""The time of a step: closed forms that drive the search, and the exact makespans that have the last word.

Stages k = 1..K take f_k forward and b_k backward for each of M micro-batches, x_k of recompute inside every backward
pass and e_k = x_k + r_k of recompute for all but the one that turns around; boundary k, between stages k and k + 1,
takes c_k forward and c'_k backward. For GPipe and equal micro-batches the step takes exactly

    T = sum of f_k + b_k + x_k + c_k + c'_k
        + (M-1) (max of all f_k, c_k) + (M-1) (max of all b_k + e_k, c'_k) + slowest all-reduce and optimizer step.

It is the critical path of two flow shops in a row, forward and backward: in each it passes every machine once and stays
at one of them, the bottleneck, for the other M - 1 micro-batches. Between them it turns around at the last stage; a
stage before it could hold it up by its own work only, and that the bottleneck covers.

For unequal micro-batches, the larger first, `planner.two_sizes` says exactly what a step takes. Where the segments of
stages are chosen, too, a lower bound does: the same form with the least seconds in the sum, and the mean of the first
M - 1 micro-batches in the bottlenecks, is the length of a path that stays at one machine. What layers before the
bottleneck take longer with the first, large micro-batch is added (`heads`). For 1F1B there is no such form;
`planner.search` builds a lower bound from stage to stage.
"""

from __future__ import annotations

import numpy as np

from planner.compiled import compiled
from planner.costs import Floats
from planner.plan import ScheduleName


def makespan_s(schedule: ScheduleName, seconds: Floats) -> float:
    """Seconds of forward and backward phase; the simulator's makespan for the same schedule, without its events.

    Args:
        schedule: order of the actions.
        seconds: of F, R, B, SEND_F and SEND_B of each stage and micro-batch, shape (5, K, M); R is 0 for stages that
            keep everything, the last row of SEND_F and the first of SEND_B are not used.
    """
    if schedule == "gpipe":
        return gpipe_makespan_s(*seconds)
    return float(_one_f_one_b_makespan_s(np.ascontiguousarray(seconds)))


def gpipe_makespan_s(
    forward_s: Floats, recompute_s: Floats, backward_s: Floats, send_forward_s: Floats, send_backward_s: Floats
) -> float:
    """`makespan_s` for GPipe; each argument has shape (K, M)."""
    stages, micro_batches = forward_s.shape
    turn_s = []
    arrival_s = np.zeros(micro_batches)
    for stage in range(stages):
        done_s = _line(arrival_s, forward_s[stage], np.zeros(micro_batches), 0.0)
        turn_s.append(float(done_s[-1]))
        arrival_s = _line(done_s, send_forward_s[stage], np.zeros(micro_batches), 0.0)
    arrival_s = np.zeros(micro_batches)
    for stage in reversed(range(stages)):
        recompute = recompute_s[stage, ::-1].copy()
        recompute[0] = 0.0  # the last micro-batch forward is the first backward: nothing stands between
        done_s = _line(arrival_s, backward_s[stage, ::-1], recompute, turn_s[stage])
        arrival_s = _line(done_s, send_backward_s[stage, ::-1], np.zeros(micro_batches), 0.0)
    return float(done_s[-1])


def _line(arrival_s: Floats, work_s: Floats, setup_s: Floats, free_s: float) -> Floats:
    """When one machine is done with each job; it sets up for a job before the job arrives.

    The recursion done[m] = max(arrival[m], done[m-1] + setup[m]) + work[m], started by `free_s`, unrolled: done[m] is
    the largest over n <= m of what starts at job n's arrival.
    """
    occupied_s = np.cumsum(setup_s + work_s)
    started_s = np.maximum.accumulate(arrival_s + work_s - occupied_s)
    return occupied_s + np.maximum(started_s, free_s)


@compiled
def _one_f_one_b_makespan_s(seconds: Floats) -> float:
    """`makespan_s` for 1F1B: every stage walks its passes in turn until it waits for a neighbour."""
    _, stages, micro_batches = seconds.shape
    clock, at = np.zeros(stages), np.zeros(stages, dtype=np.int64)
    forward_link, backward_link = np.zeros(stages), np.zeros(stages)
    output, gradient = np.full((stages, micro_batches), -1.0), np.full((stages, micro_batches), -1.0)
    done = 0
    while done < stages:
        for stage in range(stages):
            ahead = min(stages - 1 - stage, micro_batches)
            while at[stage] < 2 * micro_batches:
                position = at[stage]
                # positions 0 .. ahead - 1 are forward, then forward and backward in turns, then backward alone
                beyond = position - ahead
                turns = 2 * (micro_batches - ahead)
                if beyond < 0:
                    is_forward, batch = True, position
                elif beyond < turns:
                    is_forward, batch = beyond % 2 == 0, ahead + beyond // 2
                    if not is_forward:
                        batch = beyond // 2
                else:
                    is_forward, batch = False, beyond - turns + micro_batches - ahead
                if is_forward:
                    if stage > 0:
                        if output[stage - 1, batch] < 0:
                            break
                        clock[stage] = max(clock[stage], output[stage - 1, batch])
                    clock[stage] += seconds[0, stage, batch]
                    forward_link[stage] = max(forward_link[stage], clock[stage]) + seconds[3, stage, batch]
                    output[stage, batch] = forward_link[stage]
                else:
                    follows = ahead == 0 or (micro_batches == 1)
                    start = clock[stage] + (0.0 if follows else seconds[1, stage, batch])
                    if stage < stages - 1:
                        if gradient[stage + 1, batch] < 0:
                            break
                        start = max(start, gradient[stage + 1, batch])
                    clock[stage] = start + seconds[2, stage, batch]
                    backward_link[stage] = max(backward_link[stage], clock[stage]) + seconds[4, stage, batch]
                    gradient[stage, batch] = backward_link[stage]
                at[stage] += 1
                if at[stage] == 2 * micro_batches:
                    done += 1
    return float(clock.max())
