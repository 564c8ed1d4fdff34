"""What no order of the passes takes less than, for stages of known seconds: the bound of schedules that make their own.

Let stage k take f, i, w for a micro-batch, head_k be the seconds until the first input is there, tail_k those from
its last backward pass until the first stage has made the last gradients, its last pass of weights included; and n_k the
most micro-batches that it can hold. Micro-batches go forward, and back, in order; messages wait for nothing here.

1. A rank does all its work after head_k of its first stage k. Passes of weights that it does after the last backward
   pass there take as long as they take, or the tail is longer:

       T >= head_k + sum of f + i + max(sum of w, tail_k).

   For let x of the weights' seconds lie before the end of that pass: it ends at head_k + sum of f + i + x or later, and
   max(sum of w - x, tail_k) + x is no less than max(sum of w, tail_k).
2. Its first gradient is there when the first micro-batch has been to the end and back to it. All backward passes and
   weights come after that, and all forward passes but the first n_k, for there is room for no more.
3. At the end of its last forward pass all but n_k backward passes are done; that micro-batch goes to the end and back,
   and then its own backward pass and the tail follow.
4. With n_k in flight at most, micro-batch m goes forward after m - n_k is back: those of number M - 1, M - 1 - n_k, ...
   go to the end and back one after the other.

A stage that is recomputed takes r more for each backward pass that does not follow its own forward pass; if it does,
the stage has nothing to do while the micro-batch is after it. The smaller of the two counts in 1. Where the rank has a
later chunk, that one's passes always lie between, and it is r.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, Indices, prefix_sums
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W
from planner.plan.schedules import Ring


def any_order_s(seconds: Floats, most: Indices, ring: Ring | None = None) -> float:
    """No order of these passes takes less.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        most: micro-batches that each stage can hold, shape (K,).
        ring: which rank runs which stages; by default each has one of its own.
    """
    _, stages, count = seconds.shape
    ring = ring or Ring(stages)
    recompute_s = _recompute_s(seconds, ring)
    by_stage_s = max(
        _by_stage_s(seconds, stage, min(int(most[stage]), count), recompute_s[stage]) for stage in range(stages)
    )
    return by_stage_s if ring.chunks == 1 else max(by_stage_s, _by_rank_s(seconds, ring, recompute_s))


def ranks_s(seconds: Floats, ring: Ring) -> float:
    """Path 1 alone, of all ranks."""
    return _by_rank_s(seconds, ring, _recompute_s(seconds, ring))


def _recompute_s(seconds: Floats, ring: Ring) -> Floats:
    """Of each stage, or what it waits instead."""
    again, found = seconds[R], np.zeros(ring.stages)
    for stage in map(int, np.flatnonzero(again.any(axis=1))):
        last = stage >= ring.stages - ring.ranks
        found[stage] = np.minimum(again[stage], _after(seconds, stage) if last else np.inf).sum()
    return found


def _by_rank_s(seconds: Floats, ring: Ring, recompute_s: Floats) -> float:
    """Path 1 of ranks, whose stages are all before the last backward pass of the first one."""
    stages = np.array([ring.stages_of(rank) for rank in range(ring.ranks)])
    sums, first = seconds.sum(axis=2), stages[:, 0]
    head_s = _before(seconds[F, :, 0] + seconds[SEND_F, :, 0])[first]
    back_s = _before(seconds[B, :, -1] + np.append(seconds[SEND_B, 1:, -1], 0.0))[first]
    tail_s = np.maximum(seconds[W, first, -1], np.where(first > 0, back_s + seconds[W, 0, -1], 0.0))
    work_s = (sums[F] + sums[B] + recompute_s)[stages].sum(axis=1)
    return float((head_s + work_s + np.maximum(sums[W][stages].sum(axis=1), tail_s)).max())


def _before(each: Floats) -> Floats:
    """The sum of what comes before each."""
    before: Floats = np.cumsum(each) - each
    return before


def _after(seconds: Floats, stage: int) -> Floats:
    """Of each micro-batch the seconds from its forward pass at a stage until its gradient is there, at least."""
    after = seconds[F, stage + 1 :].sum(axis=0) + seconds[B, stage + 1 :].sum(axis=0)
    there: Floats = after + seconds[SEND_F, stage:-1].sum(axis=0) + seconds[SEND_B, stage + 1 :].sum(axis=0)
    return there


def _by_stage_s(seconds: Floats, stage: int, most: int, recompute_s: float) -> float:
    """The same from what one stage has to do."""
    count = seconds.shape[2]
    forward, backward, weights = seconds[F, stage], seconds[B, stage], seconds[W, stage]
    head_s = seconds[F, :stage, 0].sum() + seconds[SEND_F, :stage, 0].sum()
    tail_s = weights[-1]
    if stage:
        back_s = seconds[SEND_B, 1 : stage + 1, -1].sum() + seconds[B, :stage, -1].sum()
        tail_s = max(tail_s, back_s + seconds[W, 0, -1])
    after = _after(seconds, stage)
    own_s = head_s + forward.sum() + backward.sum() + recompute_s + max(weights.sum(), tail_s)
    first_s = head_s + forward[0] + after[0]
    back_first_s = first_s + forward[most:].sum() + backward.sum() + max(weights.sum(), tail_s)
    last_s = head_s + forward.sum() + backward[: count - most].sum() + after[-1] + backward[-1] + tail_s
    rounds = np.arange(count - 1, -1, -most)
    before_s = prefix_sums(forward)[rounds[-1]]
    rounds_s = head_s + before_s + (forward[rounds] + after[rounds] + backward[rounds]).sum() + tail_s
    return float(max(own_s, back_first_s, last_s, rounds_s))
