"""Which layers of a stage to recompute so that it fits: the least extra time under a limit of bytes.

A stage of layers [i, j) keeps what a layer saves for every micro-batch in flight, or recomputes the layer as a part of
a segment (Chen et al., arXiv 1604.06174). With h_l the bytes that layer l keeps for all micro-batches in flight, k_l
those of one micro-batch, t_l its temporaries, g_p what crosses position p for all micro-batches in flight, and r(a, b)
the recompute seconds of layers [a, b), a choice of segments [a_1, b_1), ..., [a_n, b_n) costs

    e      seconds that a steady micro-batch takes longer: the sum of all r(a_s, b_s); without the last segment where
           every backward pass follows its forward pass (`last_free`);
    x      seconds that the micro-batch that turns around takes longer: the same sum without the last segment, see
           `planner.plan.stage.Segment`;
    held   bytes throughout: the sum of h_l over kept layers, and g_p at each position inside the stage where a segment
           begins, or where one ends and a kept layer follows, which may need its inputs in its backward pass;
    peak   the largest of all t_l, and for each segment of the sum of its k_l and its largest t_l. The values of the
           last segment are there while the layers after it go back, so the t_l of these count as its own.

It fits if held + peak <= available. Wanted are all choices that fit, none worse than another in both e and x.

Small stages are solved exactly (`exact_segments`), by labels (held, e, x, peak) from the last layer to the first:

1. Begin with the empty label at position j.
2. At each position p before it put one kept layer [p, p + 1), or one segment [p, q), in front of every label at the
   position where that ends.
3. Drop what cannot fit any more, and what has more than the largest e of interest.
4. Drop a label that another one dominates: none of its four numbers is larger, and layers in front of it pay no more.
5. At position i take the labels that are worth having, and walk back through their parents for the segments.

Larger stages get the best of some choices (`usual_segments`); what any choice costs at least is
`planner.kernel.recompute_bounds`'s business.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.rows import copy_row

Pattern: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""For each layer of a stage KEPT, INSIDE or START."""
KEPT, INSIDE, START = 0, 1, 2
"""What a pattern says of a layer: kept, in a segment, or first of a segment."""
HELD_BYTES, RECOMPUTE_S, TURNAROUND_S, PEAK_BYTES = range(4)
"""Columns of a label: held, e, x and peak."""
MOST_CHOICES = 4000
"""Labels at one position; a stage that has more counts as not solved exactly."""


class StageCosts(NamedTuple):
    """What decides the segments of a stage, for all layers of the model.

    Attributes:
        held_bytes: prefix sums of what layers keep for all micro-batches in flight, shape (L + 1,).
        entering_bytes: what crosses each boundary for all micro-batches in flight, shape (L + 1,).
        kept_one_bytes: prefix sums of what layers keep for one micro-batch, shape (L + 1,).
        transient_bytes: each layer's temporaries, shape (L,).
        recompute_s: prefix sums of recompute seconds of a steady micro-batch, shape (L + 1,).
        turnaround_s: the same for the micro-batch that turns around.
    """

    held_bytes: Floats
    entering_bytes: Floats
    kept_one_bytes: Floats
    transient_bytes: Floats
    recompute_s: Floats
    turnaround_s: Floats


class StageRoom(NamedTuple):
    """A stage, and what its segments may cost.

    Attributes:
        first: of its layers.
        stop: of its layers.
        last_free: whether every backward pass follows its forward pass, so that the last segment is never recomputed.
        available_bytes: for what is held and the peak.
        most_recompute_s: only an e up to this is of interest.
    """

    first: int
    stop: int
    last_free: bool
    available_bytes: float
    most_recompute_s: float


class FoundSegments(NamedTuple):
    """Choices for one stage, none better than another in both e and x.

    Attributes:
        recompute_s: e of each, ascending.
        turnaround_s: x of each.
        pattern: KEPT, INSIDE or START for each choice and layer.
        exact: whether no other choice is better than these.
        work: comparisons of labels, a measure of the time that it took.
    """

    recompute_s: Floats
    turnaround_s: Floats
    pattern: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    exact: bool
    work: int


@compiled
def pattern_costs(
    costs: StageCosts, first: int, stop: int, last_free: bool, pattern: Pattern
) -> tuple[float, float, float]:
    """Bytes (held and peak, the stage's inputs left out), e and x of one pattern.

    Args:
        costs: of all layers.
        first: of the stage.
        stop: of the stage.
        last_free: whether every backward pass follows its forward pass, so that the last segment is never recomputed.
        pattern: shape (stop - first,).
    """
    held, peak, recompute_s, turnaround_s = 0.0, 0.0, 0.0, 0.0
    trailing, segment_stop, is_last = 0.0, stop, True
    inside_peak = 0.0
    for layer in range(stop - 1, first - 1, -1):
        mark = pattern[layer - first]
        peak = max(peak, costs.transient_bytes[layer])
        if mark == KEPT:
            held += costs.held_bytes[layer + 1] - costs.held_bytes[layer]
            if layer > first and pattern[layer - 1 - first] != KEPT:
                held += costs.entering_bytes[layer]
            if is_last:
                trailing = max(trailing, costs.transient_bytes[layer])
            segment_stop = layer
            continue
        inside_peak = max(inside_peak, costs.transient_bytes[layer])
        if mark != START:
            continue
        if layer > first:
            held += costs.entering_bytes[layer]
        if is_last:
            inside_peak = max(inside_peak, trailing)
        peak = max(peak, costs.kept_one_bytes[segment_stop] - costs.kept_one_bytes[layer] + inside_peak)
        if not (is_last and last_free):
            recompute_s += costs.recompute_s[segment_stop] - costs.recompute_s[layer]
        if not is_last:
            turnaround_s += costs.turnaround_s[segment_stop] - costs.turnaround_s[layer]
        is_last = False
        segment_stop = layer
        inside_peak = 0.0
    return held + peak, recompute_s, turnaround_s


class _Labels(NamedTuple):
    """Choices for layers [p, j); those of position p lie at [begin[j - p], begin[j - p + 1]).

    Attributes:
        numbers: of each, shape (labels, 4), see `HELD_BYTES`.
        parent: the choice for the layers after its first segment or kept layer.
        first_mark: KEPT or START, what its first layer is.
        has_segment: whether it has one.
        alive: whether no other one at its position dominates it.
        begin: see above.
    """

    numbers: Floats
    parent: Indices
    first_mark: Indices
    has_segment: NDArray[np.bool_]
    alive: NDArray[np.bool_]
    begin: Indices


@compiled
def exact_segments(costs: StageCosts, stage: StageRoom, most_work: int) -> FoundSegments:
    """Every choice worth having; none, and not exact, when there are too many labels or too much work.

    Args:
        costs: of all layers.
        stage: its layers, and what they may cost.
        most_work: comparisons of labels that may be made.
    """
    first, stop = stage.first, stage.stop
    length = stop - first
    floor_bytes = costs.transient_bytes[first:stop].max()  # any peak reaches it
    labels = _empty_label(length)
    work = 0
    for place in range(1, length + 1):
        end, work = _fill_position(costs, stage, floor_bytes, labels, place, work, most_work)
        if end < 0:
            none = np.zeros(0)
            return FoundSegments(none, none, np.zeros((0, length), dtype=np.uint8), False, work)
        labels.begin[place + 1] = _compacted(labels, labels.begin[place], end)
    chosen = _worth_having(labels.numbers, labels.begin[length], labels.begin[length + 1])
    pattern = np.zeros((len(chosen), length), dtype=np.uint8)
    for place in range(len(chosen)):
        _trace_pattern(labels, chosen[place], first, stop, pattern[place])
    numbers = labels.numbers[chosen]
    return FoundSegments(numbers[:, RECOMPUTE_S].copy(), numbers[:, TURNAROUND_S].copy(), pattern, True, work)


@compiled
def _empty_label(length: int) -> _Labels:
    """Step 1: room for all labels, and the empty one."""
    room = (length + 1) * MOST_CHOICES
    labels = _Labels(
        np.empty((room, 4)),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.bool_),
        np.ones(room, dtype=np.bool_),
        np.zeros(length + 2, dtype=np.int64),
    )
    labels.numbers[0] = 0.0
    labels.parent[0], labels.first_mark[0], labels.has_segment[0], labels.begin[1] = -1, START, False, 1
    return labels


@compiled
def _fill_position(
    costs: StageCosts, stage: StageRoom, floor_bytes: float, labels: _Labels, place: int, work: int, most_work: int
) -> tuple[int, int]:
    """Steps 2 to 4 at position `stage.stop - place`: where its labels end, and the work so far.

    Where there are too many labels or too much work, the end is -1.
    """
    position = stage.stop - place
    begin = write = labels.begin[place]
    new = np.zeros(4)
    inside_peak, trailing_peak = 0.0, costs.transient_bytes[position : stage.stop].max()
    for end in range(position, stage.stop + 1):  # end == position: keep the layer; else: a segment [position, end)
        first_mark = KEPT if end == position else START
        if first_mark == START:
            inside_peak = max(inside_peak, costs.transient_bytes[end - 1])
        source = stage.stop - max(end, position + 1)
        for label in range(labels.begin[source], labels.begin[source + 1]):
            work += 1 + write - begin
            if work > most_work:
                return -1, work
            has_segment = labels.has_segment[label]
            copy_row(labels.numbers[label], new)
            if first_mark == KEPT:
                new[HELD_BYTES] += costs.held_bytes[position + 1] - costs.held_bytes[position]
            else:
                own_peak = inside_peak if has_segment else trailing_peak
                _add_segment(costs, stage, position, end, own_peak, labels.first_mark[label], has_segment, new)
                has_segment = True
            needed_bytes = new[HELD_BYTES] + max(new[PEAK_BYTES], floor_bytes)
            if needed_bytes > stage.available_bytes or new[RECOMPUTE_S] > stage.most_recompute_s:
                continue
            if _is_dominated(labels, begin, write, new, first_mark, has_segment):
                continue
            if write - begin >= MOST_CHOICES:
                return -1, work
            copy_row(new, labels.numbers[write])
            labels.parent[write] = label
            labels.first_mark[write], labels.has_segment[write] = first_mark, has_segment
            write += 1
    return write, work


@compiled
def _add_segment(
    costs: StageCosts,
    stage: StageRoom,
    position: int,
    end: int,
    own_peak: float,
    next_mark: int,
    has_segment: bool,
    numbers: Floats,
) -> None:
    """Add to the numbers of a label what a segment [position, end) in front of it costs.

    Args:
        costs: of all layers.
        stage: the stage.
        position: of the segment's first layer.
        end: of its layers, where the label begins.
        own_peak: the largest temporary while its values are there.
        next_mark: what the first layer of the label is.
        has_segment: whether the label has a segment.
        numbers: of the label.
    """
    if end < stage.stop and next_mark == KEPT:
        numbers[HELD_BYTES] += costs.entering_bytes[end]
    if position > stage.first:
        numbers[HELD_BYTES] += costs.entering_bytes[position]
    if has_segment or not stage.last_free:
        numbers[RECOMPUTE_S] += costs.recompute_s[end] - costs.recompute_s[position]
    if has_segment:
        numbers[TURNAROUND_S] += costs.turnaround_s[end] - costs.turnaround_s[position]
    kept_bytes = costs.kept_one_bytes[end] - costs.kept_one_bytes[position]
    numbers[PEAK_BYTES] = max(numbers[PEAK_BYTES], kept_bytes + own_peak)


@compiled
def _is_dominated(labels: _Labels, begin: int, write: int, new: Floats, first_mark: int, has_segment: bool) -> bool:
    """Whether a label at [begin, write) dominates a new one; those that it dominates are no longer alive.

    None of its numbers is larger, and what comes in front pays for its first layer no more: a segment costs a boundary
    more before a kept layer.
    """
    for other in range(begin, write):
        if not labels.alive[other] or labels.has_segment[other] != has_segment:
            continue
        no_more, no_less = True, True
        for column in range(4):
            no_more &= labels.numbers[other, column] <= new[column]
            no_less &= labels.numbers[other, column] >= new[column]
        if no_more and (labels.first_mark[other] == START or first_mark == KEPT):
            return True
        if no_less and (first_mark == START or labels.first_mark[other] == KEPT):
            labels.alive[other] = False
    return False


@compiled
def _compacted(labels: _Labels, begin: int, write: int) -> int:
    """Close up the labels at [begin, write) that are alive; where they end."""
    kept = begin
    for label in range(begin, write):
        if labels.alive[label]:
            copy_row(labels.numbers[label], labels.numbers[kept])
            labels.parent[kept] = labels.parent[label]
            labels.first_mark[kept], labels.has_segment[kept] = labels.first_mark[label], labels.has_segment[label]
            kept += 1
    labels.alive[begin:write] = True
    return kept


@compiled
def _worth_having(numbers: Floats, begin: int, end: int) -> Indices:
    """Step 5: labels at [begin, end) by ascending e, without those that another is no worse than in both e and x."""
    order = begin + np.argsort(numbers[begin:end, RECOMPUTE_S].copy())
    chosen = np.empty(len(order), dtype=np.int64)
    count = 0
    for label in order:
        worse = False
        for other in chosen[:count]:
            worse |= numbers[other, TURNAROUND_S] <= numbers[label, TURNAROUND_S]
        if not worse:
            if count and numbers[chosen[count - 1], RECOMPUTE_S] == numbers[label, RECOMPUTE_S]:
                count -= 1  # equal e: the one with the smaller x replaces
            chosen[count] = label
            count += 1
    return chosen[:count]


@compiled
def _trace_pattern(labels: _Labels, label: int, first: int, stop: int, pattern: Pattern) -> None:
    """Fill `pattern` with what a label at position `first` chose."""
    position = first
    while position < stop:
        parent = labels.parent[label]
        end = stop - (np.searchsorted(labels.begin, parent, side="right") - 1)
        if labels.first_mark[label] == START:
            pattern[position - first : end - first] = INSIDE
            pattern[position - first] = START
        position, label = end, parent
