"""The time of a GPipe step, in closed form and exactly.

Stages k = 1..K take f_k forward, r_k recompute and b_k backward for each of M micro-batches; boundary k, between
stages k and k + 1, takes c_k forward and c'_k backward. With prefix quantities

    S(k)  = sum of f_i + b_i over i <= k and of c_i + c'_i over i < k
    mf(k) = max of f_i over i <= k and of c_i over i < k
    mb(k) = max of b_i + r_i over i <= k and of c'_i over i < k

the step takes, for equal micro-batches,

    T = max( S(K) + (M-1) (mf(K) + mb(K)),
             S(k) + (M-1) (mf(k) + mb(k)) + r_k   for each k < K ) + slowest optimizer step.

The first line is the critical path of two flow shops in a row, forward and backward: it passes every machine once and
stays at one of them, the bottleneck, for the other M - 1 micro-batches. In the second, the first recompute of stage k
is longer than the turn-around at the stages behind it, and the critical path turns around at k itself. Everything is
a prefix quantity, so a partition can be built stage by stage; `extend` adds one.

For unequal micro-batches the larger go first, and the same form with the smallest sizes in S and the mean over the
first M - 1 micro-batches in mf and mb is a lower bound: it is the length of a path that stays at one machine.
`gpipe_makespan_s` is exact for any durations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs import Floats, Indices, Mask


class Prefix(NamedTuple):
    """The prefix quantities of partial plans, one entry each; all arrays have shape (n,) and hold seconds.

    Attributes:
        through: S(k).
        forward: mf(k).
        backward: mb(k).
        turned: largest second line of the objective so far.
        optimizer: slowest optimizer step so far.
    """

    through: Floats
    forward: Floats
    backward: Floats
    turned: Floats
    optimizer: Floats

    @classmethod
    def empty(cls) -> Prefix:
        """One plan without a stage."""
        return cls(*(np.zeros(1) for _ in cls._fields))

    def take(self, selection: Indices | Mask) -> Prefix:
        """The selected entries, by index or by mask."""
        return Prefix(*(values[selection] for values in self))


class StageTerms(NamedTuple):
    """What a stage, with the boundary before it, adds to the objective; arrays of shape (n,), in seconds.

    Attributes:
        through: f + b, and c + c' of the boundary.
        forward: the larger of f and c.
        backward: the larger of b + r and c'.
        first_recompute: r of the micro-batch that turns around first.
        optimizer: the stage's optimizer step.
    """

    through: Floats
    forward: Floats
    backward: Floats
    first_recompute: Floats
    optimizer: Floats


def extend(prefix: Prefix, stage: StageTerms, steady: int) -> Prefix:
    """The prefix quantities after one more stage that is not the last.

    Args:
        prefix: partial plans.
        stage: the stage that each of them gets.
        steady: M - 1.
    """
    through = prefix.through + stage.through
    forward = np.maximum(prefix.forward, stage.forward)
    backward = np.maximum(prefix.backward, stage.backward)
    turned = through + steady * (forward + backward) + stage.first_recompute
    return Prefix(
        through, forward, backward, np.maximum(prefix.turned, turned), np.maximum(prefix.optimizer, stage.optimizer)
    )


def complete(prefix: Prefix, stage: StageTerms, steady: int) -> Floats:
    """Step times T, shape (n,), when `stage` is the last one; its first micro-batch is never recomputed."""
    without_turn = stage._replace(first_recompute=np.zeros_like(stage.first_recompute))
    whole = extend(prefix, without_turn, steady)
    return whole.turned + whole.optimizer


def gpipe_makespan_s(
    forward_s: Floats, recompute_s: Floats, backward_s: Floats, send_forward_s: Floats, send_backward_s: Floats
) -> float:
    """Seconds of forward and backward phase; the same number as the simulator's makespan for `gpipe_schedule`.

    Args:
        forward_s: shape (K, M), as all others; row k is stage k.
        recompute_s: 0 for stages that keep everything.
        backward_s: see `forward_s`.
        send_forward_s: from stage k to k + 1; the last row is not used.
        send_backward_s: from stage k to k - 1; the first row is not used.
    """
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
