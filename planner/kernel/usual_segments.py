"""Segments of a stage too large to be solved exactly: the best of some choices that fit; fast, not always the best.

What a choice costs is said in `planner.kernel.segments`. For each of three largest segments:

1. With a price for every byte held, the choice of least e + price * held is a shortest path over the layers with two
   states, kept and recomputed; a segment of it that keeps too much is split.
2. The smallest price at which that fits is found by bisection.
3. Recomputed layers are kept after all, the longest first, as long as it fits.

Then, once, the cheapest single segment that fits, with all other layers kept.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.rows import copy_row
from planner.kernel.segments import (
    INSIDE,
    KEPT,
    START,
    FoundSegments,
    Pattern,
    StageCosts,
    StageRoom,
    pattern_costs,
)

PARTS = (1, 4, 16)
"""A segment keeps no more than such a part of what the whole stage keeps for one micro-batch, some to try [chosen]."""
SINGLE = len(PARTS)
"""Place of the single segment; before it come those of `PARTS`."""
HALVINGS = 24
"""Steps of the bisection for the smallest price."""


@compiled
def usual_segments(costs: StageCosts, stage: StageRoom) -> FoundSegments:
    """Those of the four choices that another is not better than in both e and x."""
    first, stop = stage.first, stage.stop
    length = stop - first
    patterns = np.zeros((SINGLE + 1, length), dtype=np.uint8)
    recompute_s, turnaround_s = np.full(SINGLE + 1, np.inf), np.full(SINGLE + 1, np.inf)
    whole_bytes = costs.kept_one_bytes[stop] - costs.kept_one_bytes[first]
    longest_first = np.argsort(costs.recompute_s[first:stop] - costs.recompute_s[first + 1 : stop + 1])
    pattern = np.zeros(length, dtype=np.uint8)
    for kind in range(SINGLE):
        if not _with_least_price(costs, stage, whole_bytes / PARTS[kind], pattern):
            continue
        _keep_more(costs, stage, longest_first, pattern)
        needed_bytes, own_s, own_turnaround_s = pattern_costs(costs, first, stop, stage.last_free, pattern)
        if needed_bytes <= stage.available_bytes and own_s <= stage.most_recompute_s:
            recompute_s[kind], turnaround_s[kind] = own_s, own_turnaround_s
            copy_row(pattern, patterns[kind])
    recompute_s[SINGLE], turnaround_s[SINGLE] = _cheapest_single(costs, stage, patterns[SINGLE])
    chosen = _worth_having(recompute_s, turnaround_s)
    return FoundSegments(recompute_s[chosen], turnaround_s[chosen], patterns[chosen], False, length)


@compiled
def _needed_bytes(costs: StageCosts, stage: StageRoom, pattern: Pattern) -> float:
    return pattern_costs(costs, stage.first, stage.stop, stage.last_free, pattern)[0]


@compiled
def _with_least_price(costs: StageCosts, stage: StageRoom, largest_bytes: float, pattern: Pattern) -> bool:
    """Step 2: fill `pattern` with the choice at the smallest price at which it fits; False if it fits at none."""
    held_bytes = costs.held_bytes[stage.stop] - costs.held_bytes[stage.first]
    whole_s = costs.recompute_s[stage.stop] - costs.recompute_s[stage.first]
    low, high = 0.0, 64 * (whole_s + 1e-12) / max(1.0, held_bytes)
    _priced(costs, stage, high, largest_bytes, pattern)
    if _needed_bytes(costs, stage, pattern) > stage.available_bytes:
        high *= 1e6
        _priced(costs, stage, high, largest_bytes, pattern)
        if _needed_bytes(costs, stage, pattern) > stage.available_bytes:
            return False
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        _priced(costs, stage, middle, largest_bytes, pattern)
        if _needed_bytes(costs, stage, pattern) <= stage.available_bytes:
            high = middle
        else:
            low = middle
    _priced(costs, stage, high, largest_bytes, pattern)
    return True


@compiled
def _priced(costs: StageCosts, stage: StageRoom, price: float, largest_bytes: float, pattern: Pattern) -> None:
    """Step 1: fill `pattern` with the choice of least e + price * held, no segment larger than that."""
    first, stop = stage.first, stage.stop
    after_kept, after_recomputed = np.zeros(stop - first, dtype=np.bool_), np.zeros(stop - first, dtype=np.bool_)
    kept, recomputed = 0.0, 0.0  # the least costs from a layer on when it is kept, and when it is recomputed
    for layer in range(stop - 1, first - 1, -1):
        edge = price * costs.entering_bytes[layer + 1] if layer + 1 < stop else 0.0
        # whether the next layer is best kept when this one is kept, and when it is recomputed
        after_kept[layer - first] = kept <= recomputed + edge
        after_recomputed[layer - first] = kept + edge < recomputed
        rest_kept, rest_recomputed = min(kept, recomputed + edge), min(recomputed, kept + edge)
        kept = rest_kept + price * (costs.held_bytes[layer + 1] - costs.held_bytes[layer])
        recomputed = rest_recomputed + costs.recompute_s[layer + 1] - costs.recompute_s[layer]
    is_kept = kept <= recomputed
    begun = first
    for layer in range(first, stop):
        if is_kept:
            pattern[layer - first] = KEPT
        else:
            goes_on = layer > first and pattern[layer - 1 - first] != KEPT
            if goes_on and costs.kept_one_bytes[layer + 1] - costs.kept_one_bytes[begun] <= largest_bytes:
                pattern[layer - first] = INSIDE
            else:
                pattern[layer - first] = START
                begun = layer
        is_kept = after_kept[layer - first] if is_kept else after_recomputed[layer - first]


@compiled
def _keep_more(costs: StageCosts, stage: StageRoom, longest_first: Indices, pattern: Pattern) -> None:
    """Step 3: keep recomputed layers as long as it fits."""
    trial = np.zeros(len(pattern), dtype=np.uint8)
    for index in longest_first:
        if pattern[index] == KEPT:
            continue
        copy_row(pattern, trial)
        trial[index] = KEPT
        if index + 1 < len(pattern) and trial[index + 1] == INSIDE:
            trial[index + 1] = START
        if _needed_bytes(costs, stage, trial) <= stage.available_bytes:
            copy_row(trial, pattern)


@compiled
def _cheapest_single(costs: StageCosts, stage: StageRoom, best: Pattern) -> tuple[float, float]:
    """Fill `best` with the single segment of least e that fits, and say its e and x; infinite if none fits."""
    first, length = stage.first, stage.stop - stage.first
    pattern = np.zeros(length, dtype=np.uint8)
    held_bytes = costs.held_bytes[stage.stop] - costs.held_bytes[first]
    best_s, best_turnaround_s = np.inf, np.inf
    for end in range(first + 1, stage.stop + 1):
        for start in range(end - 1, first - 1, -1):
            own_s = 0.0 if stage.last_free else costs.recompute_s[end] - costs.recompute_s[start]
            if own_s >= best_s or own_s > stage.most_recompute_s:
                break
            freed_bytes = costs.held_bytes[end] - costs.held_bytes[start]
            segment_bytes = costs.kept_one_bytes[end] - costs.kept_one_bytes[start]
            if held_bytes - freed_bytes + segment_bytes > stage.available_bytes:  # at least: no temporaries, no edges
                continue
            pattern[:] = KEPT
            pattern[start - first : end - first] = INSIDE
            pattern[start - first] = START
            needed_bytes, own_s, own_turnaround_s = pattern_costs(costs, first, stage.stop, stage.last_free, pattern)
            if needed_bytes <= stage.available_bytes:
                best_s, best_turnaround_s = own_s, own_turnaround_s
                copy_row(pattern, best)
                break
    return best_s, best_turnaround_s


@compiled
def _worth_having(recompute_s: Floats, turnaround_s: Floats) -> Indices:
    """Choices that there are by ascending e, without those that one before is no worse than in x."""
    chosen = np.empty(len(recompute_s), dtype=np.int64)
    count = 0
    for number in np.argsort(recompute_s):
        if recompute_s[number] == np.inf:
            continue
        worse = False
        for other in chosen[:count]:
            worse |= turnaround_s[other] <= turnaround_s[number]
        if not worse:
            chosen[count] = number
            count += 1
    return chosen[:count]
