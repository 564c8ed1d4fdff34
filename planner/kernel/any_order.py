"""What no order of the passes takes less than, for stages of known seconds: the bound of schedules that make their own.

Let stage k take f, i, w for a micro-batch, head_k be the seconds until the first input is there, tail_k those from
its last backward pass until the first stage has made the last gradients, its last pass of weights included; and n_k the
most micro-batches that it can hold. Micro-batches go forward, and back, in order; messages wait for nothing here, but
in 5.

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
5. A link carries its messages one after the other: all of a stage's after its first one is made, and after the last one
   that micro-batch goes the rest of its way. So it does with all messages of the link, of however many stages: the
   first of them is made as soon as that of any of them may be, and as little follows the last one as of any.

A stage that is recomputed takes r more for each backward pass that does not follow its own forward pass; if it does,
the stage has nothing to do while the micro-batch is after it. The smaller of the two counts in 1. Where the rank has a
later chunk, that one's passes always lie between, and it is r.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W
from planner.kernel.turns import BACKWARD, FORWARD, Ways


@compiled
def any_order_s(seconds: Floats, most: Indices, ways: Ways) -> float:
    """No order of these passes takes less.

    Args:
        seconds: as `planner.kernel.makespan.makespan_s` has them, shape (6, K, M).
        most: micro-batches that each stage can hold, at least 1, shape (K,).
        ways: where stages are.
    """
    _, stages, count = seconds.shape
    after_s, again_s = _after_s(seconds), np.zeros(stages)
    _recomputed(seconds, after_s, len(ways.stages), again_s)
    least_s = _by_link_s(seconds, ways)
    if ways.stages.shape[1] > 1:
        least_s = max(least_s, _by_rank_s(seconds, ways, again_s))
    head_s = back_s = 0.0
    for stage in range(stages):
        holds = min(most[stage], count)
        forward, backward, weights = seconds[F, stage], seconds[B, stage], seconds[W, stage]
        tail_s = max(weights[-1], back_s + seconds[W, 0, -1]) if stage else weights[-1]
        own_s = head_s + forward.sum() + backward.sum() + again_s[stage] + max(weights.sum(), tail_s)
        first_s = head_s + forward[0] + after_s[stage, 0]
        back_first_s = first_s + forward[holds:].sum() + backward.sum() + max(weights.sum(), tail_s)
        there_and_back_s = after_s[stage, -1] + backward[-1] + tail_s
        last_s = head_s + forward.sum() + backward[: count - holds].sum() + there_and_back_s
        rounds_s = head_s + tail_s + forward[: (count - 1) % holds].sum()
        for batch in range(count - 1, -1, -holds):
            rounds_s += forward[batch] + after_s[stage, batch] + backward[batch]
        least_s = max(least_s, own_s, back_first_s, last_s, rounds_s)
        head_s += forward[0] + seconds[SEND_F, stage, 0]
        back_s += backward[-1] + (seconds[SEND_B, stage + 1, -1] if stage < stages - 1 else 0.0)
    return least_s


@compiled
def ranks_s(seconds: Floats, ways: Ways) -> float:
    """Path 1 alone, of all ranks."""
    again_s = np.zeros(seconds.shape[1])
    if seconds[R].any():
        _recomputed(seconds, _after_s(seconds), len(ways.stages), again_s)
    return _by_rank_s(seconds, ways, again_s)


@compiled
def _after_s(seconds: Floats) -> Floats:
    """Of each stage and micro-batch the seconds from its forward pass until its gradient is there, at least."""
    _, stages, count = seconds.shape
    after_s = np.zeros((stages, count))
    for stage in range(stages - 2, -1, -1):
        there_s = seconds[SEND_F, stage] + seconds[F, stage + 1]
        after_s[stage] = there_s + after_s[stage + 1] + seconds[B, stage + 1] + seconds[SEND_B, stage + 1]
    return after_s


@compiled
def _recomputed(seconds: Floats, after_s: Floats, ranks: int, again_s: Floats) -> None:
    """Fill in what recompute takes of each stage, or what that waits instead."""
    stages = seconds.shape[1]
    for stage in range(stages):
        again_s[stage] = (
            np.minimum(seconds[R, stage], after_s[stage]) if stage >= stages - ranks else seconds[R, stage]
        ).sum()


@compiled
def _by_rank_s(seconds: Floats, ways: Ways, again_s: Floats) -> float:
    """Path 1 of ranks, whose stages are all before the last backward pass of the first one."""
    least_s = head_s = back_s = 0.0
    for rank in range(len(ways.stages)):
        first = ways.stages[rank, 0]  # the ranks' first stages are those of the pipeline, in order
        tail_s = max(seconds[W, first, -1], back_s + seconds[W, 0, -1] if first else 0.0)
        work_s = weights_s = 0.0
        for stage in ways.stages[rank]:
            work_s += seconds[F, stage].sum() + seconds[B, stage].sum() + again_s[stage]
            weights_s += seconds[W, stage].sum()
        least_s = max(least_s, head_s + work_s + max(weights_s, tail_s))
        head_s += seconds[F, first, 0] + seconds[SEND_F, first, 0]
        back_s += seconds[B, first, -1] + (seconds[SEND_B, first + 1, -1] if first + 1 < seconds.shape[1] else 0.0)
    return least_s


@compiled
def _by_link_s(seconds: Floats, ways: Ways) -> float:
    """Path 5: of each stage's messages, and of all that go over one link."""
    stages = seconds.shape[1]
    ranks, chunks = ways.stages.shape
    end = 4 * stages - 1
    first_s, last_s = np.zeros(end + 1), np.zeros(end + 1)  # on the way to the end and back: passes and messages
    for stage in range(stages):
        first_s[2 * stage], last_s[2 * stage] = seconds[F, stage, 0], seconds[F, stage, -1]
        first_s[end - 2 * stage - 1], last_s[end - 2 * stage - 1] = seconds[B, stage, 0], seconds[B, stage, -1]
        if stage < stages - 1:
            first_s[2 * stage + 1], last_s[2 * stage + 1] = seconds[SEND_F, stage, 0], seconds[SEND_F, stage, -1]
        if stage > 0:
            first_s[end - 2 * stage], last_s[end - 2 * stage] = seconds[SEND_B, stage, 0], seconds[SEND_B, stage, -1]
    last_s[end] = seconds[W, 0, -1]
    to_s, from_s = np.cumsum(first_s), np.cumsum(last_s[::-1])[::-1]
    least_s = 0.0
    for rank in range(ranks):
        for link in range(2):
            all_s, earliest, latest = 0.0, end, 0
            for chunk in range(chunks):
                stage = ways.stages[rank, chunk]
                for way, sends, place in ((FORWARD, SEND_F, 2 * stage + 1), (BACKWARD, SEND_B, end - 2 * stage)):
                    if ways.links[way, stage] == link:
                        own_s = seconds[sends, stage].sum()
                        all_s += own_s
                        earliest, latest = min(earliest, place), max(latest, place)
                        least_s = max(least_s, to_s[place - 1] + own_s + from_s[place + 1])
            if latest:
                least_s = max(least_s, to_s[earliest - 1] + all_s + from_s[latest + 1])
    return least_s
