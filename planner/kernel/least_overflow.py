"""The cuts whose worst stage overflows its device the least, for when nothing fits.

With o(i, j, c) the bytes that a stage of layers [i, j) on a device of class c lacks, by whichever choice of segments
lacks the least (negative where it fits), wanted are cuts and classes for which the largest o is smallest:

1. The empty rear, of no devices at position L, lacks nothing.
2. For k = 1, 2, ...: worst(u, i), for devices in use u that are k, and a position i, is the smallest
   max(o(i, j, c), worst(u - c, j)) over all stages [i, j) that the rules allow and classes c in use.
3. The plan is the smallest worst(u, 0) over all u of enough devices, read off from the first stage to the last.

A stage keeps everything, recomputes all as one segment, or in 2, 4, 8 or 16 segments of about equal bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.devices_used import used_numbers
from planner.kernel.segments import INSIDE, START, StageCosts, pattern_costs
from planner.kernel.tables import ALWAYS, AUTO, NEVER, Needs, Tables, segment_costs, stage_needs

LAYERS_TO_TRY = 300
"""A model of more layers is not tried with several segments for a stage [chosen]."""
MOST_PARTS = 16
"""Segments that a stage is tried with [chosen]."""


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
    size = (costs.kept_one_bytes[stop] - costs.kept_one_bytes[first]) / max(1, parts)
    begun = first
    for layer in range(first, stop if parts else first):
        if layer == first or costs.kept_one_bytes[layer + 1] - costs.kept_one_bytes[begun] > size * (1 + 1e-12):
            pattern[layer - first] = START
            begun = layer
        else:
            pattern[layer - first] = INSIDE
    return pattern


class _Rears(NamedTuple):
    """The best rear of each place, devices in use and position where it begins, shape (devices in use, positions).

    Attributes:
        worst_bytes: what its worst stage lacks; infinite where there is none.
        stop: of its first stage.
        device: class of its first stage.
        parts: in how many segments its first stage recomputes.
    """

    worst_bytes: Floats
    stop: Indices
    device: Indices
    parts: Indices


@compiled
def least_bad(tables: Tables) -> LeastBad:
    """Steps 1 to 3."""
    used, total = used_numbers(tables.capacity)
    combinations, classes = used.shape
    positions = tables.passing.shape[1]
    places = combinations, positions
    rears = _Rears(
        np.full(places, np.inf),
        np.zeros(places, dtype=np.int64),
        np.zeros(places, dtype=np.int64),
        np.zeros(places, dtype=np.int64),
    )
    rears.worst_bytes[0, positions - 1] = -np.inf
    best_bytes, best = np.inf, -1
    for from_end in range(1, tables.most_stages + 1):
        for devices_used in range(combinations):
            if total[devices_used] != from_end:
                continue
            stride = 1
            for device in range(classes):
                rest = devices_used - stride
                stride *= tables.capacity[device] + 1
                if used[devices_used, device] > 0:
                    _put_in_front(tables, rears, from_end, device, rest, devices_used)
            if from_end >= tables.least_stages and rears.worst_bytes[devices_used, 0] < best_bytes:
                best_bytes, best = rears.worst_bytes[devices_used, 0], devices_used
    return _traced(tables, rears, best_bytes, best)


@compiled
def _put_in_front(tables: Tables, rears: _Rears, from_end: int, device: int, rest: int, devices_used: int) -> None:
    """Step 2 for stages on one class, in front of the rears with the devices `rest`."""
    in_flight_index = from_end - 1 if tables.by_number else 0
    costs = segment_costs(tables, device, in_flight_index)
    worst_bytes = rears.worst_bytes
    for stop in range(1, worst_bytes.shape[1]):
        if worst_bytes[rest, stop] == np.inf:
            continue
        needs = stage_needs(tables, device, in_flight_index, 0, stop)
        for first in range(stop - 1, -1, -1):
            if tables.pinned[first] != -1 and tables.pinned[first] != device:
                break
            if first + 1 < stop and tables.demanded[stop - 1] > tables.demanded[first]:
                break
            if not tables.allowed[first]:
                continue
            enough = worst_bytes[devices_used, first]
            over_bytes, parts = _lacking(tables, costs, needs, first, stop, enough)
            over_bytes = max(over_bytes, worst_bytes[rest, stop])
            if over_bytes < enough:
                worst_bytes[devices_used, first] = over_bytes
                rears.stop[devices_used, first], rears.device[devices_used, first] = stop, device
                rears.parts[devices_used, first] = parts


@compiled
def _lacking(
    tables: Tables, costs: StageCosts, needs: Needs, first: int, stop: int, enough_bytes: float
) -> tuple[float, int]:
    """The bytes that a stage lacks at least, and in how many segments it then recomputes.

    Args:
        tables: of the problem.
        costs: of the class.
        needs: of all stages of that end.
        first: of its layers.
        stop: of its layers.
        enough_bytes: a stage that lacks as much is of no interest.
    """
    room_bytes = needs.room[first]
    over_bytes, parts = np.inf, 0
    if tables.recompute != ALWAYS:
        over_bytes = needs.over_kept[first]
    if tables.recompute != NEVER and needs.over_as_one[first] < over_bytes:
        over_bytes, parts = needs.over_as_one[first], 1
    many_layers = len(tables.allowed) - 1 > LAYERS_TO_TRY
    if tables.recompute != AUTO or many_layers or needs.moment[first] - room_bytes >= enough_bytes:
        return over_bytes, parts
    tried = 2
    while tried <= min(MOST_PARTS, stop - first):
        pattern = equal_segments(costs, first, stop, tried)
        needed_bytes = pattern_costs(costs, first, stop, False, pattern)[0]
        if needed_bytes - room_bytes < over_bytes:
            over_bytes, parts = needed_bytes - room_bytes, tried
        tried *= 2
    return over_bytes, parts


@compiled
def _traced(tables: Tables, rears: _Rears, over_bytes: float, devices_used: int) -> LeastBad:
    """The plan with these devices; nothing where `devices_used` is -1."""
    last = rears.worst_bytes.shape[1] - 1
    cuts, classes = np.zeros(tables.most_stages + 1, dtype=np.int64), np.zeros(tables.most_stages, dtype=np.int64)
    parts = np.zeros(tables.most_stages, dtype=np.int64)
    count = 0
    while devices_used >= 0 and cuts[count] < last:
        first = cuts[count]
        device = rears.device[devices_used, first]
        classes[count], parts[count] = device, rears.parts[devices_used, first]
        cuts[count + 1] = rears.stop[devices_used, first]
        stride = 1
        for smaller in range(device):
            stride *= tables.capacity[smaller] + 1
        devices_used -= stride
        count += 1
    return LeastBad(over_bytes, cuts[: count + 1].copy(), classes[:count].copy(), parts[:count].copy())
