"""Every stage that a device could run, as arcs from layer position i to j, with what it adds to a step at least.

The stages are numbered from the end of the model, 1 for the last: how many micro-batches a stage has in flight may
depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.recompute_bounds import least_at, price_layer
from planner.kernel.rounds import NONE_LATE, ROUNDS, Late, RoundSums, late_of, round_s, round_sums
from planner.kernel.tables import (
    ALWAYS,
    AUTO,
    BACKWARD_SIZED,
    BACKWARD_STEADY,
    FORWARD_MOST,
    FORWARD_SIZED,
    FORWARD_STEADY,
    NEVER,
    Tables,
    copied_s,
    segment_costs,
    stage_needs,
)
from planner.kernel.two_sizes import link_machines, stage_machines
from planner.plan.schedules import Objective

FLOW_SHOPS, _, WORK = (int(objective) for objective in Objective)
IMPOSSIBLE, KEEPS, RECOMPUTES = 0, 1, 2
"""What a stage must do to fit."""
THROUGH, FORWARD, BACKWARD, OPTIMIZER, REST, ROOM, THROUGH_LEAST, ROUND, TERMS = range(9)
"""Columns of `Arcs.terms`, and how many there are."""


class Arcs(NamedTuple):
    """Candidate stages: those that end at j for class c and in-flight index v start at j - 1, j - 2, ..., j - `length`.

    Attributes:
        objective: see `Tables`.
        by_number: see `Tables`.
        two_sizes: whether the flow shops have unequal micro-batches and `planner.kernel.two_sizes` says what they take:
            no stage has segments to choose.
        steady: M - 1.
        steady_recomputes: how many of these recompute segments for certain.
        least_stages: smallest K.
        most_stages: largest K.
        capacity: how many stages a class can run, shape (C,).
        allowed: whether a cut is allowed at a position, shape (N,).
        crossing_least: messages at a position of one micro-batch, both directions, at least, shape (N,).
        backward_link: M - 1 steady transfers of gradients, shape (N,).
        copies: see `Tables`.
        backward_head: see `Tables`.
        more_large: see `Tables`, and so the next four.
        largest_change: the most seconds of a stage or link by which a path with its small job in place of a large one
            to come there, which then stays, exceeds one that passes; and all that it gains after. Forward, backward.
        largest_stay: the most seconds of one more small job, forward and backward.
        offset: place of the first arc, shape (V, C, N).
        length: how many there are, shape (V, C, N).
        need: IMPOSSIBLE, KEEPS or RECOMPUTES of each arc.
        whole: whether it fits as one segment.
        least_recompute_s: that it needs.
        terms: what it adds to the objective without recompute, shape (arcs, TERMS); seconds, and bytes in ROOM:
            THROUGH, a micro-batch's passes without copies and its whole messages before them, whose copies at both
            ends are thus in it; of rounds the first one's, which is large;
            THROUGH_LEAST, the same of any micro-batch;
            FORWARD, of flow shops M - 1 times f, not less than the transfer, else M - 1 times f and b;
            BACKWARD, of flow shops M - 1 times b, of rounds what both phases leave when the stage waits once for all
            after it;
            OPTIMIZER, all-reduce and optimizer;
            REST, of rounds what it does while no round is complete;
            ROOM, bytes for activations and temporaries;
            ROUND, of rounds what both phases leave when the stage waits for all after it twice, at first and at last.
    """

    objective: int
    by_number: bool
    two_sizes: bool
    steady: int
    steady_recomputes: int
    least_stages: int
    most_stages: int
    capacity: Indices
    allowed: NDArray[np.bool_]
    crossing_least: Floats
    backward_link: Floats
    copies: Floats
    backward_head: Floats
    more_large: float
    more_small: float
    recompute_share: float
    sized: Floats
    sized_links: Floats
    largest_change: Floats
    largest_stay: Floats
    offset: Indices
    length: Indices
    need: NDArray[np.uint8]
    whole: NDArray[np.bool_]
    least_recompute_s: Floats
    terms: Floats


class _Facts(NamedTuple):
    """`need`, `whole`, `least_recompute_s` and `terms` of `Arcs`, while they are found."""

    need: NDArray[np.uint8]
    whole: NDArray[np.bool_]
    least_recompute_s: Floats
    terms: Floats


@compiled
def make_arcs(tables: Tables, below_s: float) -> Arcs:
    """The stages that rules, memory and a step time below `below_s` leave, with bounds of their recompute."""
    classes, in_flight_indices, positions = tables.memory.kept_layers.shape
    fewest = np.zeros(positions, dtype=np.int64)
    offset, length = _reach(tables, below_s, fewest)
    count = int(length.sum())
    need, whole = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.bool_)
    least_recompute_s, terms = np.zeros(count), np.zeros((count, TERMS))
    facts = _Facts(need, whole, least_recompute_s, terms)
    sums, late = round_sums(tables), late_of(tables, length, fewest)
    for device in range(classes):
        for stop in range(1, positions):  # whose columns of large matrices are read once for all in-flight indices
            for in_flight_index in range(in_flight_indices):
                places = offset[in_flight_index, device, stop], length[in_flight_index, device, stop]
                _fill(tables, in_flight_index, device, stop, places, below_s, fewest, facts)
                if tables.objective == ROUNDS:
                    _fill_rounds(sums, late, in_flight_index, device, stop, places, facts)
    if classes == 1:
        _drop_small(tables.forward[0] + tables.backward[0], tables.most_stages, offset, length, need)
    largest_change, largest_stay = np.zeros(2), np.zeros(2)
    two_sizes = tables.two_sizes and (tables.recompute != AUTO or not (need == RECOMPUTES).any())
    arcs = Arcs(
        tables.objective,
        tables.by_number,
        two_sizes,
        tables.steady,
        steady_recomputes(tables),
        tables.least_stages,
        tables.most_stages,
        tables.capacity,
        tables.allowed,
        tables.crossing_least,
        tables.steady * tables.backward_link,
        tables.copies,
        tables.backward_head,
        float(tables.large.min() - 1),
        tables.more_small,
        tables.recompute_share,
        tables.sized,
        tables.sized_links,
        largest_change,
        largest_stay,
        offset,
        length,
        need,
        whole,
        least_recompute_s,
        terms,
    )
    if two_sizes:
        _fill_largest(arcs)
    return arcs


@compiled
def steady_recomputes(tables: Tables) -> int:
    """How many of the M - 1 steady micro-batches recompute a stage's segments, whatever its place.

    In an order that nobody knows, any number of them may turn around at once.
    """
    return 0 if tables.objective == WORK else tables.steady


@compiled
def _reach(tables: Tables, below_s: float, fewest: Indices) -> tuple[Indices, Indices]:
    """For each in-flight index, class and position the first arc to there, and how many there are.

    Where in-flight indices are numbers from the end, a position counts that as many stages lead from it to the end, and
    from which the stages that may be left lead to the start. `fewest` is filled with the fewest stages of layers
    [0, i) as far as lengths say, zeros without such numbers.
    """
    classes, in_flight_indices, positions = tables.memory.kept_layers.shape
    length = np.zeros((in_flight_indices, classes, positions), dtype=np.int64)
    least_s, sums = _least_pass_s(tables.passing), round_sums(tables)
    ends, begins = np.zeros(positions, dtype=np.bool_), np.zeros(positions, dtype=np.bool_)
    ends[positions - 1] = True
    for in_flight_index in range(in_flight_indices):
        begins[:] = False
        for device in range(classes):
            for stop in range(1, positions):
                if not tables.allowed[stop] or (tables.by_number and not ends[stop]):
                    continue
                hint = length[max(0, in_flight_index - 1), device, stop - 1]
                longest = _longest(tables, sums, in_flight_index, device, stop, below_s, least_s, hint)
                length[in_flight_index, device, stop] = longest
                begins[stop - longest : stop] = True
        ends[:] = begins & tables.allowed
    if tables.by_number:
        _keep_what_begins(tables, length, fewest)
    offset = np.zeros((in_flight_indices, classes, positions), dtype=np.int64)
    total = 0
    for in_flight_index in range(in_flight_indices):
        for device in range(classes):
            for stop in range(1, positions):
                offset[in_flight_index, device, stop] = total
                total += length[in_flight_index, device, stop]
    return offset, length


@compiled
def _longest(
    tables: Tables,
    sums: RoundSums,
    in_flight_index: int,
    device: int,
    stop: int,
    below_s: float,
    least_s: float,
    hint: int,
) -> int:
    """Layers of the longest stage that ends at `stop`, as far as rules, seconds and parameters say; `hint`, perhaps."""
    memory = tables.memory
    forward, backward, passing = tables.forward[device], tables.backward[device], tables.passing[device]
    first = stop - 1
    while first >= 0:
        if tables.pinned[first] not in (-1, device):
            break
        if first + 1 < stop and tables.demanded[stop - 1] > tables.demanded[first]:
            break
        work_s = forward[stop] - forward[first] + backward[stop] - backward[first]
        own_s = passing[stop] - passing[first]
        if tables.steady * work_s + (least_s if tables.objective == FLOW_SHOPS else own_s) >= below_s:
            break
        if memory.ranges[memory.range_of[device], first, stop] > tables.limit[device, in_flight_index]:
            break
        first -= 1
    first += 1  # of the stage that may be longest by these
    if tables.objective != ROUNDS or first == stop:
        return stop - first
    place, number = min(stop, max(first, stop - hint)), in_flight_index + 1  # longer stages take longer
    while place > first and least_s + round_s(sums, NONE_LATE, number, device, place - 1, stop, False) < below_s:
        place -= 1
    while place < stop and least_s + round_s(sums, NONE_LATE, number, device, place, stop, False) >= below_s:
        place += 1
    return stop - place


@compiled
def _keep_what_begins(tables: Tables, length: Indices, fewest: Indices) -> None:
    """Leave out the arcs to positions that the stages which may be left do not lead to, and fill `fewest`."""
    in_flight_indices, classes, positions = length.shape
    fewest[1:] = positions
    for stop in range(1, positions):
        if not tables.allowed[stop]:
            continue
        longest = 0
        for in_flight_index in range(in_flight_indices):
            for device in range(classes):
                longest = max(longest, length[in_flight_index, device, stop])
        for first in range(stop - longest, stop):
            fewest[stop] = min(fewest[stop], fewest[first] + 1)
    for in_flight_index in range(in_flight_indices):
        for device in range(classes):
            for stop in range(1, positions):
                longest = length[in_flight_index, device, stop]
                if longest and fewest[stop - longest : stop].min() > tables.most_stages - 1 - in_flight_index:
                    length[in_flight_index, device, stop] = 0


@compiled
def _least_pass_s(passing: Floats) -> float:
    """Seconds that a micro-batch takes through all layers at least, each on the class that is fastest for it."""
    classes, positions = passing.shape
    least_s = 0.0
    for layer in range(positions - 1):
        one = np.inf
        for device in range(classes):
            one = min(one, passing[device, layer + 1] - passing[device, layer])
        least_s += one
    return least_s


@compiled
def _fill(
    tables: Tables,
    in_flight_index: int,
    device: int,
    stop: int,
    places: tuple[int, int],
    below_s: float,
    fewest: Indices,
    facts: _Facts,
) -> None:
    """What `Arcs` says of the stages that end at `stop`, each a layer longer than the one before.

    One before which there are more stages than may be is left out.

    1. What it needs of memory: whether it fits as it is, as one segment, or perhaps with some layers recomputed.
    2. What it adds to the objective without recompute.
    3. If it does not fit as it is, what recompute takes at least, see `price_layer`.
    4. If that is too much for a step below `below_s`, the stage is left out.
    """
    need, whole, least_recompute_s, terms = facts
    prices = tables.prices[device, in_flight_index]
    kept, recomputed = np.zeros(len(prices)), np.zeros(len(prices))
    priced = stop  # `kept` and `recomputed` are those of layers [priced, stop)
    costs = segment_costs(tables, device, in_flight_index)
    begin = stop - places[1]
    if not places[1]:
        return
    needs = stage_needs(tables, device, in_flight_index, begin, stop)
    turns_around = tables.last_turns_around and in_flight_index == 0
    for step in range(places[1]):
        first, place = stop - 1 - step, places[0] + step
        if not tables.allowed[first] or fewest[first] > tables.most_stages - 1 - in_flight_index:
            continue
        # 1
        keeps = tables.recompute != ALWAYS and needs.over_kept[first - begin] <= 0
        whole[place] = tables.recompute != NEVER and needs.over_as_one[first - begin] <= 0
        terms[place, ROOM] = needs.room[first - begin]
        room = needs.room[first - begin] - needs.moment[first - begin]
        if not (keeps or whole[place] or (tables.recompute == AUTO and room >= 0)):
            continue
        need[place] = KEEPS if keeps else RECOMPUTES
        # 2
        _fill_seconds(tables, in_flight_index, device, first, stop, terms[place])
        if keeps or turns_around:
            continue
        # 3
        whole_recompute_s = tables.steady_recompute[device, stop] - tables.steady_recompute[device, first]
        if tables.recompute == ALWAYS or room < 0:
            least_recompute_s[place] = whole_recompute_s
            continue
        while priced > first:
            priced -= 1
            edge = costs.entering_bytes[priced + 1] if priced + 1 < stop else 0.0
            own_bytes = costs.held_bytes[priced + 1] - costs.held_bytes[priced]
            layer_recompute_s = costs.recompute_s[priced + 1] - costs.recompute_s[priced]
            price_layer(own_bytes, edge, layer_recompute_s, prices, kept, recomputed)
        least_recompute_s[place] = least_at(prices, kept, recomputed, room) * (1 - 1e-9)
        if whole[place]:
            least_recompute_s[place] = min(least_recompute_s[place], whole_recompute_s)
        # 4
        step_s = terms[place, THROUGH] + terms[place, FORWARD] + steady_recomputes(tables) * least_recompute_s[place]
        if step_s + (terms[place, BACKWARD] if tables.objective == FLOW_SHOPS else 0.0) >= below_s:
            need[place] = IMPOSSIBLE


@compiled
def _fill_rounds(
    sums: RoundSums, late: Late, in_flight_index: int, device: int, stop: int, places: tuple[int, int], facts: _Facts
) -> None:
    """The column ROUND of the stages that end at `stop`.

    By itself: a call in the loop of `_fill` makes that take five times as long, for all arrays of `Tables` are counted
    at each turn then.
    """
    for step in range(places[1]):
        place = places[0] + step
        if facts.need[place] != IMPOSSIBLE:
            number, first = in_flight_index + 1, stop - 1 - step
            facts.terms[place, ROUND] = round_s(sums, late, number, device, first, stop, True)


@compiled
def _fill_seconds(tables: Tables, in_flight_index: int, device: int, first: int, stop: int, terms: Floats) -> None:
    """The columns of `Arcs.terms` that are seconds, of one stage."""
    forward = tables.forward[device, stop] - tables.forward[device, first]
    backward = tables.backward[device, stop] - tables.backward[device, first]
    forward += copied_s(tables.copies, FORWARD_STEADY, first, stop)
    backward += copied_s(tables.copies, BACKWARD_STEADY, first, stop)
    own = tables.passing[device, stop] - tables.passing[device, first]
    terms[THROUGH] = own + tables.crossing[first]
    if tables.objective == FLOW_SHOPS:
        terms[FORWARD] = tables.forward_head[first] + tables.steady * max(forward, tables.forward_link[first])
        terms[BACKWARD] = tables.steady * backward
    else:
        terms[FORWARD] = tables.steady * (forward + backward)
    if tables.objective == ROUNDS:
        number = in_flight_index + 1
        forward_most = tables.forward_most[device, stop] - tables.forward_most[device, first]
        forward_first = tables.sized[0, device, stop] - tables.sized[0, device, first]
        most_copied_s = copied_s(tables.copies, FORWARD_MOST, first, stop)
        first_copied_s = copied_s(tables.copies, FORWARD_SIZED, first, stop)
        left_out_s = number * (forward_most + most_copied_s) - (forward_first + first_copied_s)
        own_least = tables.passing_least[device, stop] - tables.passing_least[device, first]
        terms[BACKWARD] = tables.steady * (forward + backward) - left_out_s
        rest_s = own_least if tables.steady >= number else max(0.0, own_least - forward_most)
        terms[REST] = tables.steady % number * rest_s
        terms[THROUGH_LEAST] = own_least + tables.crossing_least[first]
    if tables.trainable_bytes[first, stop] > 0:
        reduce_s = tables.reduce_rate[device] * tables.trainable_bytes[first, stop]
        optimizer_s = tables.optimizer_rate[device] * tables.stepped_bytes[first, stop]
        terms[OPTIMIZER] = reduce_s + optimizer_s + tables.optimizer_fixed[device]


@compiled
def _drop_small(work: Floats, most_stages: int, offset: Indices, length: Indices, need: NDArray[np.uint8]) -> None:
    """On equal devices drop stages so small that the others, as large as they can be, do not hold the rest.

    `work` are prefix sums of what layers take.
    """
    in_flight_indices, _, positions = length.shape
    largest = 0.0
    for turn in range(2):
        least = work[-1] - (most_stages - 1) * largest - 1e-9 * work[-1]
        for in_flight_index in range(in_flight_indices):
            for stop in range(1, positions):
                for step in range(length[in_flight_index, 0, stop]):
                    place = offset[in_flight_index, 0, stop] + step
                    own = work[stop] - work[stop - 1 - step]
                    if turn == 0 and need[place] != IMPOSSIBLE:
                        largest = max(largest, own)
                    elif turn == 1 and own < least:
                        need[place] = IMPOSSIBLE


@compiled
def _fill_largest(arcs: Arcs) -> None:
    """`Arcs.largest_change` and `Arcs.largest_stay` over all stages and links.

    Where a layer or link takes longer with fewer samples, as measured ones may, a path gains that by changing early.
    """
    _, classes, positions = arcs.length.shape
    for device in range(classes):
        for stop in range(1, positions):
            for step in range(arcs.length[0, device, stop]):
                place = arcs.offset[0, device, stop] + step
                if arcs.need[place] == IMPOSSIBLE:
                    continue
                recomputes = arcs.need[place] == RECOMPUTES
                pair = stage_machines(arcs.sized, arcs.copies, device, stop - 1 - step, stop, recomputes)
                for phase in range(2):
                    machine = pair[phase]
                    change = machine.small + machine.large_stay - machine.large
                    arcs.largest_change[phase] = max(arcs.largest_change[phase], change)
                    arcs.largest_stay[phase] = max(arcs.largest_stay[phase], machine.small_stay)
    gained = np.zeros(2)
    for position in range(positions):
        pair = link_machines(arcs.sized_links, position)
        for phase in range(2):
            arcs.largest_change[phase] = max(arcs.largest_change[phase], pair[phase].small)
            arcs.largest_stay[phase] = max(arcs.largest_stay[phase], pair[phase].small)
            row = BACKWARD_SIZED if phase else FORWARD_SIZED
            small_s = pair[phase].small + copied_s(arcs.copies, row + 1, position, position)
            large_s = pair[phase].large + copied_s(arcs.copies, row, position, position)
            gained[phase] += max(0.0, small_s - large_s)
            if position + 1 < positions:
                most = 0.0
                for device in range(classes):
                    large, small = arcs.sized[2 * phase, device], arcs.sized[2 * phase + 1, device]
                    own = small[position + 1] - small[position]
                    most = max(most, own - (large[position + 1] - large[position]))
                gained[phase] += most
    for phase in range(2):
        arcs.largest_change[phase] += gained[phase]
