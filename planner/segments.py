"""Which layers of a stage to run again so that it fits: the least extra time under a limit of bytes.

A stage of layers [i, j) keeps a layer's values for every micro-batch in flight, or recomputes the layer as a part of a
segment (Chen et al., arXiv 1604.06174). A choice of segments costs

- e, seconds a steady micro-batch takes longer: recompute of all segments;
- x, seconds the micro-batch that turns around takes longer: recompute of all segments but the last, see `Segment`;
- bytes held throughout: what kept layers keep, and what crosses each boundary next to a segment inside the stage (the
  values that enter a segment; and those that leave it for a kept layer, which may need them in its backward pass);
- a peak: the largest temporary of a layer, or one segment's values with the temporaries beside them. The last
  segment's values are there while the layers behind it go back.

Small stages are solved exactly: labels (bytes, e, x, peak) from the last layer to the first, without those that another
one dominates. Larger ones get the best of some patterns; what any choice costs at least is `planner.arcs`'s business.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.compiled import compiled
from planner.costs import Floats

KEPT, INSIDE, START = 0, 1, 2
"""What a pattern says of a layer: kept, in a segment, or first of a segment."""
MOST_LABELS = 200
"""Labels at one position; a stage that has more counts as not solved exactly."""


class StageCosts(NamedTuple):
    """What decides the segments of a stage, for all layers of the model.

    Attributes:
        held: prefix sums of the bytes that layers keep for all micro-batches in flight, shape (L + 1,).
        entering: bytes of all micro-batches in flight that cross each boundary, shape (L + 1,).
        kept_one: prefix sums of the bytes that layers keep for one micro-batch.
        transient: bytes of each layer's temporaries, shape (L,).
        again: prefix sums of recompute seconds of a steady micro-batch.
        again_turning: the same for the micro-batch that turns around.
    """

    held: Floats
    entering: Floats
    kept_one: Floats
    transient: Floats
    again: Floats
    again_turning: Floats


class Found(NamedTuple):
    """Choices for one stage, none better than another in both e and x.

    Attributes:
        extra: e of each, ascending.
        turning: x of each.
        pattern: KEPT, INSIDE or START for each choice and layer.
        exact: whether no other choice is better than these.
        work: labels made, a measure of the time that it took.
    """

    extra: Floats
    turning: Floats
    pattern: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    exact: bool
    work: int


@compiled
def pattern_costs(
    costs: StageCosts, first: int, stop: int, last_free: bool, pattern: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> tuple[float, float, float]:
    """Bytes (held and peak, the stage's inputs left out), e and x of one pattern.

    Args:
        costs: of all layers.
        first: of the stage.
        stop: of the stage.
        last_free: whether every backward pass follows its forward pass, so that the last segment never runs again.
        pattern: shape (stop - first,).
    """
    held, peak, extra, turning = 0.0, 0.0, 0.0, 0.0
    trailing, stop_segment, is_last = 0.0, stop, True
    inside_peak = 0.0
    for layer in range(stop - 1, first - 1, -1):
        mark = pattern[layer - first]
        peak = max(peak, costs.transient[layer])
        if mark == KEPT:
            held += costs.held[layer + 1] - costs.held[layer]
            if layer > first and pattern[layer - 1 - first] != KEPT:
                held += costs.entering[layer]
            if is_last:
                trailing = max(trailing, costs.transient[layer])
            stop_segment = layer
            continue
        inside_peak = max(inside_peak, costs.transient[layer])
        if mark != START:
            continue
        if layer > first:
            held += costs.entering[layer]
        if is_last:
            inside_peak = max(inside_peak, trailing)
        peak = max(peak, costs.kept_one[stop_segment] - costs.kept_one[layer] + inside_peak)
        if not (is_last and last_free):
            extra += costs.again[stop_segment] - costs.again[layer]
        if not is_last:
            turning += costs.again_turning[stop_segment] - costs.again_turning[layer]
        is_last = False
        stop_segment = layer
        inside_peak = 0.0
    return held + peak, extra, turning


@compiled
def exact_segments(
    costs: StageCosts, first: int, stop: int, last_free: bool, available: float, extra_cap: float, most_work: int
) -> Found:
    """Every choice worth having, by labels from the last layer to the first.

    Args:
        costs: of all layers.
        first: of the stage.
        stop: of the stage.
        last_free: see `pattern_costs`.
        available: bytes for what is held and the peak.
        extra_cap: only an e up to this is of interest.
        most_work: labels that may be made; `exact` is False when they do not suffice.
    """
    length = stop - first
    nothing = Found(np.zeros(0), np.zeros(0), np.zeros((0, length), dtype=np.uint8), False, 0)
    room = (length + 1) * MOST_LABELS
    held, extra, turning, peak = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
    parent, beside, has = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    begin = np.zeros(length + 2, dtype=np.int64)  # labels of position q lie at [begin[stop - q], begin[stop - q + 1])
    held[0], extra[0], turning[0], peak[0] = 0.0, 0.0, 0.0, 0.0
    parent[0], beside[0], has[0] = -1, START, 0
    begin[1] = 1
    alive = np.ones(room, dtype=np.bool_)
    work = 0
    floor = 0.0
    for layer in range(first, stop):
        floor = max(floor, costs.transient[layer])
    for place in range(1, length + 1):
        position = stop - place
        write = begin[place]
        inside_peak, behind_peak = 0.0, 0.0
        for layer in range(position, stop):
            behind_peak = max(behind_peak, costs.transient[layer])
        for end in range(position, stop + 1):  # end == position: keep the layer; else: a segment [position, end)
            if end > position:
                inside_peak = max(inside_peak, costs.transient[end - 1])
            source = stop - max(end, position + 1)
            for label in range(begin[source], begin[source + 1]):
                work += 1
                if work > most_work:
                    return Found(nothing.extra, nothing.turning, nothing.pattern, False, work)
                new_held, new_extra, new_turning, new_peak = held[label], extra[label], turning[label], peak[label]
                new_beside, new_has = KEPT, has[label]
                if end == position:
                    new_held += costs.held[position + 1] - costs.held[position]
                else:
                    if end < stop and beside[label] == KEPT:
                        new_held += costs.entering[end]
                    if position > first:
                        new_held += costs.entering[position]
                    again = costs.again[end] - costs.again[position]
                    temporary = inside_peak if new_has else behind_peak
                    new_peak = max(new_peak, costs.kept_one[end] - costs.kept_one[position] + temporary)
                    if new_has or not last_free:
                        new_extra += again
                    if new_has:
                        new_turning += costs.again_turning[end] - costs.again_turning[position]
                    new_beside, new_has = START, 1
                if new_held + max(new_peak, floor) > available or new_extra > extra_cap:
                    continue
                dominated = False
                for other in range(begin[place], write):
                    if not alive[other] or has[other] != new_has:
                        continue
                    no_more = (
                        held[other] <= new_held
                        and extra[other] <= new_extra
                        and turning[other] <= new_turning
                        and peak[other] <= new_peak
                    )
                    if no_more and (beside[other] == START or new_beside == KEPT):
                        dominated = True
                        break
                    no_less = (
                        held[other] >= new_held
                        and extra[other] >= new_extra
                        and turning[other] >= new_turning
                        and peak[other] >= new_peak
                    )
                    if no_less and (new_beside == START or beside[other] == KEPT):
                        alive[other] = False
                if dominated:
                    continue
                if write - begin[place] >= MOST_LABELS:
                    return Found(nothing.extra, nothing.turning, nothing.pattern, False, work)
                held[write], extra[write], turning[write], peak[write] = new_held, new_extra, new_turning, new_peak
                parent[write], beside[write], has[write] = label, new_beside, new_has
                alive[write] = True
                write += 1
        kept = begin[place]
        for label in range(begin[place], write):
            if alive[label]:
                held[kept], extra[kept], turning[kept], peak[kept] = (
                    held[label],
                    extra[label],
                    turning[label],
                    peak[label],
                )
                parent[kept], beside[kept], has[kept] = parent[label], beside[label], has[label]
                kept += 1
        for label in range(begin[place], write):
            alive[label] = True
        begin[place + 1] = kept
        if kept == begin[place] and place == length:
            return Found(nothing.extra, nothing.turning, nothing.pattern, True, work)
    begin_last, stop_last = begin[length], begin[length + 1]
    order = begin_last + np.argsort(extra[begin_last:stop_last])
    count = 0
    chosen = np.empty(len(order), dtype=np.int64)
    for label in order:
        worse = False
        for number in range(count):
            if turning[chosen[number]] <= turning[label]:
                worse = True
        if not worse:
            # equal e: the one with the smaller x replaces
            if count and extra[chosen[count - 1]] == extra[label]:
                count -= 1
            chosen[count] = label
            count += 1
    pattern = np.zeros((count, length), dtype=np.uint8)
    out_extra, out_turning = np.empty(count), np.empty(count)
    for number in range(count):
        label = chosen[number]
        out_extra[number], out_turning[number] = extra[label], turning[label]
        position = first
        while position < stop:
            before = parent[label]
            place = np.searchsorted(begin[: length + 2], before, side="right") - 1
            end = stop - place
            if beside[label] == START:
                pattern[number, position - first : end - first] = INSIDE
                pattern[number, position - first] = START
            position = end
            label = before
    return Found(out_extra, out_turning, pattern, True, work)


@compiled
def _priced(
    costs: StageCosts,
    first: int,
    stop: int,
    price: float,
    most_kept: float,
    pattern: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> None:
    """Fill `pattern` with the choice of least e + price * bytes held, its segments split where one keeps too much.

    The choice is a shortest path over the layers with two states, kept and recomputed.
    """
    length = stop - first
    from_kept, from_recomputed = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.bool_)
    kept, recomputed = 0.0, 0.0
    for layer in range(stop - 1, first - 1, -1):
        edge = price * costs.entering[layer + 1] if layer + 1 < stop else 0.0
        from_kept[layer - first] = kept <= recomputed + edge  # what is best behind this layer when it is kept
        from_recomputed[layer - first] = kept + edge < recomputed  # the same when it is recomputed
        behind_kept, behind_recomputed = min(kept, recomputed + edge), min(recomputed, kept + edge)
        kept = behind_kept + price * (costs.held[layer + 1] - costs.held[layer])
        recomputed = behind_recomputed + costs.again[layer + 1] - costs.again[layer]
    is_kept = kept <= recomputed
    begun = first
    for layer in range(first, stop):
        if is_kept:
            pattern[layer - first] = KEPT
        else:
            before = layer > first and pattern[layer - 1 - first] != KEPT
            if before and costs.kept_one[layer + 1] - costs.kept_one[begun] <= most_kept:
                pattern[layer - first] = INSIDE
            else:
                pattern[layer - first] = START
                begun = layer
        is_kept = from_kept[layer - first] if is_kept else from_recomputed[layer - first]


@compiled
def usual_segments(
    costs: StageCosts, first: int, stop: int, last_free: bool, available: float, extra_cap: float
) -> Found:
    """The best of some patterns that fit; fast, and not always the best of all.

    1. The least e + price * bytes with the smallest price at which it fits, by bisection, for three largest segments;
       then recomputed layers are kept, the longest first, as long as it fits.
    2. The cheapest single segment.
    """
    length = stop - first
    best = np.zeros((4, length), dtype=np.uint8)
    best_extra, best_turning = np.full(4, np.inf), np.full(4, np.inf)
    pattern, trial = np.zeros(length, dtype=np.uint8), np.zeros(length, dtype=np.uint8)
    whole = costs.kept_one[stop] - costs.kept_one[first]
    held = costs.held[stop] - costs.held[first]
    again = costs.again[stop] - costs.again[first]
    longest = np.argsort(costs.again[first:stop] - costs.again[first + 1 : stop + 1])
    for kind in range(3):
        most_kept = whole / (1, 4, 16)[kind]
        low, high = 0.0, 64 * (again + 1e-12) / max(1.0, held)
        _priced(costs, first, stop, high, most_kept, pattern)
        if pattern_costs(costs, first, stop, last_free, pattern)[0] > available:
            high *= 1e6
            _priced(costs, first, stop, high, most_kept, pattern)
            if pattern_costs(costs, first, stop, last_free, pattern)[0] > available:
                continue
        for _ in range(24):
            middle = (low + high) / 2
            _priced(costs, first, stop, middle, most_kept, pattern)
            if pattern_costs(costs, first, stop, last_free, pattern)[0] <= available:
                high = middle
            else:
                low = middle
        _priced(costs, first, stop, high, most_kept, pattern)
        for index in longest:
            if pattern[index] == KEPT:
                continue
            trial[:] = pattern
            trial[index] = KEPT
            if index + 1 < length and trial[index + 1] == INSIDE:
                trial[index + 1] = START
            if pattern_costs(costs, first, stop, last_free, trial)[0] <= available:
                pattern[:] = trial
        needed, extra, turning = pattern_costs(costs, first, stop, last_free, pattern)
        if needed <= available and extra <= extra_cap:
            best_extra[kind], best_turning[kind] = extra, turning
            best[kind] = pattern

    for end in range(1, length + 1):
        for start in range(end - 1, -1, -1):
            extra = 0.0 if last_free else costs.again[first + end] - costs.again[first + start]
            if extra >= best_extra[3] or extra > extra_cap:
                break
            freed = costs.held[first + end] - costs.held[first + start]
            if held - freed + costs.kept_one[first + end] - costs.kept_one[first + start] > available:
                continue
            pattern[:] = KEPT
            pattern[start:end] = INSIDE
            pattern[start] = START
            needed, extra, turning = pattern_costs(costs, first, stop, last_free, pattern)
            if needed <= available:
                best_extra[3], best_turning[3] = extra, turning
                best[3] = pattern
                break

    order = np.argsort(best_extra)
    keep = np.empty(4, dtype=np.int64)
    count = 0
    for number in order:
        if best_extra[number] == np.inf:
            continue
        worse = False
        for other in keep[:count]:
            if best_turning[other] <= best_turning[number]:
                worse = True
        if not worse:
            keep[count] = number
            count += 1
    return Found(best_extra[keep[:count]], best_turning[keep[:count]], best[keep[:count]], False, length)
