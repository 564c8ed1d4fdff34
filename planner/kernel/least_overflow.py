"""The cuts whose worst stage overflows its device the least, for when nothing fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Indices
from planner.kernel.candidate_stages import used_numbers
from planner.kernel.compiled import compiled
from planner.kernel.segments import StageCosts, pattern_costs
from planner.kernel.tables import (
    ALWAYS,
    AUTO,
    NEVER,
    Tables,
    segment_costs,
    stage_needs,
)


class LeastBad(NamedTuple):
    """A plan that does not fit.

    Attributes:
        over_bytes: what its worst stage has too much; infinite when rules leave no plan at all.
        cuts: positions 0, ..., L.
        classes: of its stages.
        parts: for each stage in how many equal segments it recomputes; 0 for none.
    """

    over_bytes: float
    cuts: Indices
    classes: Indices
    parts: Indices


@compiled
def equal_segments(costs: StageCosts, first: int, stop: int, parts: int) -> NDArray[np.uint8]:
    """The pattern that recomputes a stage in about that many segments of equal bytes; nothing for 0."""
    pattern = np.zeros(stop - first, dtype=np.uint8)
    size = (costs.kept_one[stop] - costs.kept_one[first]) / max(1, parts)
    begun = first
    for layer in range(first, stop if parts else first):
        if layer == first or costs.kept_one[layer + 1] - costs.kept_one[begun] > size * (1 + 1e-12):
            pattern[layer - first] = 2
            begun = layer
        else:
            pattern[layer - first] = 1
    return pattern


@compiled
def least_bad(tables: Tables) -> LeastBad:
    """A dynamic program from the last stage to the first."""
    used, total = used_numbers(tables.capacity)
    ways, classes = used.shape
    positions = tables.passing.shape[1]
    last = positions - 1
    worst = np.full((ways, positions), np.inf)
    came_from, by_class = np.zeros((ways, positions), dtype=np.int64), np.zeros((ways, positions), dtype=np.int64)
    in_parts = np.zeros((ways, positions), dtype=np.int64)
    worst[0, last] = -np.inf
    best, best_way = np.inf, -1
    for number in range(1, tables.most_stages + 1):
        variant = number - 1 if tables.by_number else 0
        for way in range(ways):
            if total[way] != number:
                continue
            stride = 1
            for device in range(classes):
                rest = way - stride
                stride *= tables.capacity[device] + 1
                if used[way, device] == 0:
                    continue
                costs = segment_costs(tables, device, variant)
                for stop in range(1, positions):
                    if worst[rest, stop] == np.inf:
                        continue
                    needs = stage_needs(tables, device, variant, 0, stop)
                    for first in range(stop - 1, -1, -1):
                        if tables.pinned[first] != -1 and tables.pinned[first] != device:
                            break
                        if first + 1 < stop and tables.demanded[stop - 1] > tables.demanded[first]:
                            break
                        if not tables.allowed[first]:
                            continue
                        over, parts = np.inf, 0
                        if tables.recompute != ALWAYS:
                            over = needs.over_kept[first]
                        if tables.recompute != NEVER and needs.over_as_one[first] < over:
                            over, parts = needs.over_as_one[first], 1
                        number_parts = 2
                        while tables.recompute == AUTO and last <= 300 and number_parts <= min(16, stop - first):
                            if needs.moment[first] - needs.room[first] >= worst[way, first]:
                                break
                            pattern = equal_segments(costs, first, stop, number_parts)
                            needed = pattern_costs(costs, first, stop, False, pattern)[0]
                            if needed - needs.room[first] < over:
                                over, parts = needed - needs.room[first], number_parts
                            number_parts *= 2
                        over = max(over, worst[rest, stop])
                        if over < worst[way, first]:
                            worst[way, first] = over
                            came_from[way, first], by_class[way, first] = stop, device
                            in_parts[way, first] = parts
            if number >= tables.least_stages and worst[way, 0] < best:
                best, best_way = worst[way, 0], way
    cuts, chosen = np.zeros(tables.most_stages + 1, dtype=np.int64), np.zeros(tables.most_stages, dtype=np.int64)
    chosen_parts = np.zeros(tables.most_stages, dtype=np.int64)
    count, way = 0, best_way
    while way >= 0 and cuts[count] < last:
        device = by_class[way, cuts[count]]
        chosen[count], chosen_parts[count] = device, in_parts[way, cuts[count]]
        cuts[count + 1] = came_from[way, cuts[count]]
        stride = 1
        for before in range(device):
            stride *= tables.capacity[before] + 1
        way -= stride
        count += 1
    return LeastBad(best, cuts[: count + 1].copy(), chosen[:count].copy(), chosen_parts[:count].copy())
