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
one dominates. Larger ones get the best of some patterns; what any choice costs at least is
`planner.kernel.candidate_stages`'s business.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled

KEPT, INSIDE, START = 0, 1, 2
"""What a pattern says of a layer: kept, in a segment, or first of a segment."""
MOST_LABELS = 4000
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
        work: comparisons of labels, a measure of the time that it took.
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


class _Labels(NamedTuple):
    """Choices for layers [i, stop); those of position i lie at [begin[stop - i], begin[stop - i + 1]).

    Attributes:
        numbers: bytes held, e, x and peak of each, shape (labels, 4).
        parent: the choice for the layers behind its first segment or kept layer.
        beside: KEPT or START, what its first layer is.
        has: whether it has a segment.
        alive: whether no other one at its position dominates it.
        begin: see above.
    """

    numbers: Floats
    parent: Indices
    beside: Indices
    has: Indices
    alive: NDArray[np.bool_]
    begin: Indices


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
        most_work: comparisons of labels that may be made; `exact` is False when they do not suffice.
    """
    length = stop - first
    none = np.zeros(0)
    room = (length + 1) * MOST_LABELS
    labels = _Labels(
        np.empty((room, 4)),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.ones(room, dtype=np.bool_),
        np.zeros(length + 2, dtype=np.int64),
    )
    labels.numbers[0] = 0.0
    labels.parent[0], labels.beside[0], labels.has[0], labels.begin[1] = -1, START, 0, 1
    new = np.zeros(4)
    work = 0
    floor = costs.transient[first:stop].max()
    for place in range(1, length + 1):
        position = stop - place
        begin = write = labels.begin[place]
        inside_peak, behind_peak = 0.0, costs.transient[position:stop].max()
        for end in range(position, stop + 1):  # end == position: keep the layer; else: a segment [position, end)
            if end > position:
                inside_peak = max(inside_peak, costs.transient[end - 1])
            source = stop - max(end, position + 1)
            for label in range(labels.begin[source], labels.begin[source + 1]):
                work += 1 + write - begin
                if work > most_work:
                    return Found(none, none, np.zeros((0, length), dtype=np.uint8), False, work)
                has, beside = labels.has[label], labels.beside[label]
                new[:] = labels.numbers[label]
                if end == position:
                    new[0] += costs.held[position + 1] - costs.held[position]
                else:
                    if end < stop and beside == KEPT:
                        new[0] += costs.entering[end]
                    if position > first:
                        new[0] += costs.entering[position]
                    if has or not last_free:
                        new[1] += costs.again[end] - costs.again[position]
                    if has:
                        new[2] += costs.again_turning[end] - costs.again_turning[position]
                    kept_one = costs.kept_one[end] - costs.kept_one[position]
                    new[3] = max(new[3], kept_one + (inside_peak if has else behind_peak))
                    has = 1
                beside = KEPT if end == position else START
                if new[0] + max(new[3], floor) > available or new[1] > extra_cap:
                    continue
                if _is_dominated(labels, begin, write, new, beside, has):
                    continue
                if write - begin >= MOST_LABELS:
                    return Found(none, none, np.zeros((0, length), dtype=np.uint8), False, work)
                labels.numbers[write], labels.parent[write] = new, label
                labels.beside[write], labels.has[write] = beside, has
                write += 1
        labels.begin[place + 1] = _compacted(labels, begin, write)
    chosen = _worth_having(labels.numbers, labels.begin[length], labels.begin[length + 1])
    pattern = np.zeros((len(chosen), length), dtype=np.uint8)
    for number in range(len(chosen)):
        _trace_pattern(labels, chosen[number], first, stop, pattern[number])
    numbers = labels.numbers[chosen]
    return Found(numbers[:, 1].copy(), numbers[:, 2].copy(), pattern, True, work)


@compiled
def _is_dominated(labels: _Labels, begin: int, write: int, new: Floats, beside: int, has: int) -> bool:
    """Whether a label at [begin, write) dominates a new one; those that it dominates are no longer alive.

    None of its numbers is larger, and what comes in front pays for its first layer no more: a segment costs a boundary
    more behind a kept layer.
    """
    for other in range(begin, write):
        if not labels.alive[other] or labels.has[other] != has:
            continue
        no_more, no_less = True, True
        for column in range(4):
            no_more &= labels.numbers[other, column] <= new[column]
            no_less &= labels.numbers[other, column] >= new[column]
        if no_more and (labels.beside[other] == START or beside == KEPT):
            return True
        if no_less and (beside == START or labels.beside[other] == KEPT):
            labels.alive[other] = False
    return False


@compiled
def _compacted(labels: _Labels, begin: int, write: int) -> int:
    """Close up the labels at [begin, write) that are alive; where they end."""
    kept = begin
    for label in range(begin, write):
        if labels.alive[label]:
            labels.numbers[kept], labels.parent[kept] = labels.numbers[label], labels.parent[label]
            labels.beside[kept], labels.has[kept] = labels.beside[label], labels.has[label]
            kept += 1
    labels.alive[begin:write] = True
    return kept


@compiled
def _worth_having(numbers: Floats, begin: int, end: int) -> Indices:
    """Labels at [begin, end) by ascending e, without those that another is no worse than in both e and x."""
    order = begin + np.argsort(numbers[begin:end, 1])
    chosen = np.empty(len(order), dtype=np.int64)
    count = 0
    for label in order:
        worse = False
        for number in range(count):
            worse |= numbers[chosen[number], 2] <= numbers[label, 2]
        if not worse:
            if count and numbers[chosen[count - 1], 1] == numbers[label, 1]:
                count -= 1  # equal e: the one with the smaller x replaces
            chosen[count] = label
            count += 1
    return chosen[:count]


@compiled
def _trace_pattern(
    labels: _Labels, label: int, first: int, stop: int, pattern: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    """Fill `pattern` with what a label at position `first` chose."""
    position = first
    while position < stop:
        parent = labels.parent[label]
        end = stop - (np.searchsorted(labels.begin, parent, side="right") - 1)
        if labels.beside[label] == START:
            pattern[position - first : end - first] = INSIDE
            pattern[position - first] = START
        position, label = end, parent


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
