"""Every stage that a device could run, as arcs from layer position i to j, and what plans made of them cost at least.

The stages are numbered from the end of the model, 1 for the last: how many micro-batches a stage has in flight may
depend on it. Five numbers bound a plan: it takes at least

    sum(through) + max(max forward + max backward, max both) + max(optimizer)

with the steady bottlenecks of forward and backward phase and `both` of one stage; where
forward and backward passes alternate, `both` alone counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.tables import (
    ALWAYS,
    AUTO,
    NEVER,
    Tables,
    segment_costs,
    stage_needs,
)
from planner.kernel.two_sizes import Four, Machine, both_phases, front_with
from planner.plan.schedules import Objective

FLOW_SHOPS, ROUNDS, WORK = (int(objective) for objective in Objective)
IMPOSSIBLE, KEEPS, RECOMPUTES = 0, 1, 2
"""What a stage must do to fit."""


THROUGH, FORWARD, BACKWARD, OPTIMIZER, REST, ROOM = range(6)
"""Columns of `Arcs.terms`."""
STAYS_LEAST, FRONT_OPTIMIZER = 12, 14
"""Columns of `before_bounds` with two sizes of micro-batches: behind three times four numbers the least seconds of the
longest stay of large micro-batches, forward and backward, and of the slowest optimizer."""


class Arcs(NamedTuple):
    """Stages worth looking at: those that end at j for class c in variant v start at j - 1, j - 2, ..., j - `length`.

    Attributes:
        objective: see `Tables`.
        by_number: see `Tables`.
        two_sizes: whether the flow shops have unequal micro-batches and `planner.kernel.two_sizes` says what they take:
            no stage has segments to choose.
        steady: M - 1.
        steady_again: how many of these run segments again for certain.
        least_stages: smallest K.
        most_stages: largest K.
        capacity: how many stages a class can run, shape (C,).
        allowed: whether a cut is allowed at a position, shape (N,).
        crossing: transfers at a position of one micro-batch, both directions, shape (N,).
        backward_link: M - 1 steady transfers of gradients, shape (N,).
        backward_head: see `Tables`.
        more_large: see `Tables`, and so the next three.
        largest_change: the most seconds of a stage or link by which a path with its small job in place of a large one
            to come there, which then stays, exceeds one that passes; and all that it gains behind. Forward, backward.
        largest_stay: the most seconds of one more small job, forward and backward.
        offset: place of the first arc, shape (V, C, N).
        length: how many there are, shape (V, C, N).
        need: IMPOSSIBLE, KEEPS or RECOMPUTES of each arc.
        whole: whether it fits as one segment.
        extra: recompute seconds that it needs at least.
        terms: what it adds to the objective without recompute, shape (arcs, 6); seconds, and bytes in the last column:
            THROUGH, a micro-batch's passes and its transfers before them;
            FORWARD, of flow shops M - 1 times f, not less than the transfer, else M - 1 times f and b;
            BACKWARD, of flow shops M - 1 times b, of rounds what both phases leave when the stage waits once for all
            after it;
            OPTIMIZER, all-reduce and optimizer;
            REST, of rounds the backward passes of the last, incomplete one;
            ROOM, bytes for activations and temporaries.
    """

    objective: int
    by_number: bool
    two_sizes: bool
    steady: int
    steady_again: int
    least_stages: int
    most_stages: int
    capacity: Indices
    allowed: NDArray[np.bool_]
    crossing: Floats
    backward_link: Floats
    backward_head: Floats
    more_large: float
    more_small: float
    sized: Floats
    sized_links: Floats
    largest_change: Floats
    largest_stay: Floats
    offset: Indices
    length: Indices
    need: NDArray[np.uint8]
    whole: NDArray[np.bool_]
    extra: Floats
    terms: Floats


class _Facts(NamedTuple):
    """`need`, `whole`, `extra` and `terms` of `Arcs`, while they are found."""

    need: NDArray[np.uint8]
    whole: NDArray[np.bool_]
    extra: Floats
    terms: Floats


@compiled
def make_arcs(tables: Tables, below_s: float) -> Arcs:
    """The stages that rules, memory and a step time below `below_s` leave, with bounds of their recompute."""
    classes, variants, positions = tables.memory.kept_layers.shape
    offset, length = _reach(tables, below_s)
    count = int(length.sum())
    need, whole = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.bool_)
    extra, terms = np.zeros(count), np.zeros((count, 6))
    for variant in range(variants):
        for device in range(classes):
            for stop in range(1, positions):
                places = offset[variant, device, stop], length[variant, device, stop]
                _fill(tables, variant, device, stop, places, below_s, _Facts(need, whole, extra, terms))
    if classes == 1:
        _drop_small(tables.forward[0] + tables.backward[0], tables.most_stages, offset, length, need)
    largest_change, largest_stay = np.zeros(2), np.zeros(2)
    two_sizes = tables.two_sizes and (tables.recompute != AUTO or not (need == RECOMPUTES).any())
    arcs = Arcs(
        tables.objective,
        tables.by_number,
        two_sizes,
        tables.steady,
        steady_again(tables),
        tables.least_stages,
        tables.most_stages,
        tables.capacity,
        tables.allowed,
        tables.crossing,
        tables.steady * tables.backward_link,
        tables.backward_head,
        tables.more_large,
        tables.more_small,
        tables.sized,
        tables.sized_links,
        largest_change,
        largest_stay,
        offset,
        length,
        need,
        whole,
        extra,
        terms,
    )
    if two_sizes:
        _fill_largest(arcs)
    return arcs


@compiled
def steady_again(tables: Tables) -> int:
    """How many of the M - 1 steady micro-batches run a stage's segments again, whatever its place.

    In an order that nobody has looked into, any number of them may turn around at once.
    """
    return 0 if tables.objective == WORK else tables.steady


@compiled
def _reach(tables: Tables, below_s: float) -> tuple[Indices, Indices]:
    """For each variant, class and position the first arc to there, and how many there are."""
    memory = tables.memory
    classes, variants, positions = memory.kept_layers.shape
    offset = np.zeros((variants, classes, positions), dtype=np.int64)
    length = np.zeros((variants, classes, positions), dtype=np.int64)
    least_s = _least_pass_s(tables.passing)
    total = 0
    for variant in range(variants):
        for device in range(classes):
            forward, backward, passing = tables.forward[device], tables.backward[device], tables.passing[device]
            for stop in range(1, positions):
                offset[variant, device, stop] = total
                if not tables.allowed[stop]:
                    continue
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
                    if memory.ranges[memory.range_of[device], first, stop] > tables.limit[device, variant]:
                        break
                    first -= 1
                length[variant, device, stop] = stop - 1 - first
                total += stop - 1 - first
    return offset, length


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
    tables: Tables, variant: int, device: int, stop: int, places: tuple[int, int], below_s: float, facts: _Facts
) -> None:
    """What `Arcs` says of the stages that end at `stop`, each a layer longer than the one before.

    1. What it needs of memory: whether it fits as it is, as one segment, or perhaps with some layers recomputed.
    2. What it adds to the objective without recompute.
    3. If it does not fit as it is, what recompute takes at least, see `_price_layer`.
    4. If that is too much for a step below `below_s`, the stage is left out.
    """
    need, whole, extra, terms = facts
    prices = tables.prices[device, variant]
    kept, recomputed = np.zeros(len(prices)), np.zeros(len(prices))
    priced = stop  # `kept` and `recomputed` are those of layers [priced, stop)
    costs = segment_costs(tables, device, variant)
    begin = stop - places[1]
    needs = stage_needs(tables, device, variant, begin, stop)
    turns_around = tables.last_turns_around and variant == 0
    for step in range(places[1]):
        first, place = stop - 1 - step, places[0] + step
        if not tables.allowed[first]:
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
        _fill_seconds(tables, variant, device, first, stop, terms[place])
        if keeps or turns_around:
            continue
        # 3
        all_again = tables.again[device, stop] - tables.again[device, first]
        if tables.recompute == ALWAYS or room < 0:
            extra[place] = all_again
            continue
        while priced > first:
            priced -= 1
            edge = costs.entering_bytes[priced + 1] if priced + 1 < stop else 0.0
            own_bytes = costs.held_bytes[priced + 1] - costs.held_bytes[priced]
            again = costs.recompute_s[priced + 1] - costs.recompute_s[priced]
            _price_layer(own_bytes, edge, again, prices, kept, recomputed)
        extra[place] = _least_at(prices, kept, recomputed, room) * (1 - 1e-9)
        if whole[place]:
            extra[place] = min(extra[place], all_again)
        # 4
        step_s = terms[place, THROUGH] + terms[place, FORWARD] + steady_again(tables) * extra[place]
        if step_s + (terms[place, BACKWARD] if tables.objective == FLOW_SHOPS else 0.0) >= below_s:
            need[place] = IMPOSSIBLE


@compiled
def _fill_seconds(tables: Tables, variant: int, device: int, first: int, stop: int, terms: Floats) -> None:
    """The columns of `Arcs.terms` that are seconds, of one stage."""
    forward = tables.forward[device, stop] - tables.forward[device, first]
    backward = tables.backward[device, stop] - tables.backward[device, first]
    own = tables.passing[device, stop] - tables.passing[device, first]
    terms[THROUGH] = own + tables.crossing[first]
    if tables.objective == FLOW_SHOPS:
        terms[FORWARD] = tables.forward_head[first] + tables.steady * max(forward, tables.forward_link[first])
        terms[BACKWARD] = tables.steady * backward
    else:
        terms[FORWARD] = tables.steady * (forward + backward)
    if tables.objective == ROUNDS:
        number = variant + 1
        forward_most = tables.forward_most[device, stop] - tables.forward_most[device, first]
        forward_least = tables.forward_least[device, stop] - tables.forward_least[device, first]
        terms[BACKWARD] = tables.steady * (forward + backward) - (number * forward_most - forward_least)
        terms[REST] = tables.steady % number * max(0.0, own - forward_most)
    if tables.trainable_bytes[first, stop] > 0:
        slope = tables.optimizer_rate[device]
        terms[OPTIMIZER] = slope * tables.trainable_bytes[first, stop] + tables.optimizer_fixed


@compiled
def _price_layer(
    own_bytes: float, edge_bytes: float, again: float, prices: Floats, kept: Floats, recomputed: Floats
) -> None:
    """Put a layer before those whose least e + price * bytes held are `kept` and `recomputed`, for each price.

    A stage's segments cost at least min(e + price * bytes held) - price * bytes available, whatever the price
    (Lagrange); the minimum is a shortest path over its layers with two states: the first layer is kept, or recomputed.

    Args:
        own_bytes: of the layer, if it is kept.
        edge_bytes: at the boundary after it, if it lies next to a segment.
        again: its recompute seconds.
        prices: seconds per byte.
        kept: of the layers so far if the first is kept.
        recomputed: of the layers so far if the first is recomputed.
    """
    for index in range(len(prices)):
        one, other = kept[index], recomputed[index]
        edge = prices[index] * edge_bytes
        kept[index] = min(one, other + edge) + prices[index] * own_bytes
        recomputed[index] = min(other, one + edge) + again


@compiled
def _least_at(prices: Floats, kept: Floats, recomputed: Floats, room: float) -> float:
    """The largest of the least seconds that these prices give for so many bytes."""
    least = 0.0
    for index in range(len(prices)):
        least = max(least, min(kept[index], recomputed[index]) - prices[index] * room)
    return least


@compiled
def _drop_small(work: Floats, most_stages: int, offset: Indices, length: Indices, need: NDArray[np.uint8]) -> None:
    """On equal devices drop stages so small that the others, as large as they can be, do not hold the rest.

    `work` are prefix sums of what layers take.
    """
    variants, _, positions = length.shape
    largest = 0.0
    for turn in range(2):
        least = work[-1] - (most_stages - 1) * largest - 1e-9 * work[-1]
        for variant in range(variants):
            for stop in range(1, positions):
                for step in range(length[variant, 0, stop]):
                    place = offset[variant, 0, stop] + step
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
                pair = stage_machines(arcs, device, stop - 1 - step, stop, arcs.need[place] == RECOMPUTES)
                for phase in range(2):
                    machine = pair[phase]
                    change = machine.small + machine.large_stay - machine.large
                    arcs.largest_change[phase] = max(arcs.largest_change[phase], change)
                    arcs.largest_stay[phase] = max(arcs.largest_stay[phase], machine.small_stay)
    gained = np.zeros(2)
    for position in range(positions):
        pair = link_machines(arcs, position)
        for phase in range(2):
            arcs.largest_change[phase] = max(arcs.largest_change[phase], pair[phase].small)
            arcs.largest_stay[phase] = max(arcs.largest_stay[phase], pair[phase].small)
            gained[phase] += max(0.0, pair[phase].small - pair[phase].large)
            if position + 1 < positions:
                most = 0.0
                for device in range(classes):
                    one = stage_machines(arcs, device, position, position + 1, False)[phase]
                    most = max(most, one.small - one.large)
                gained[phase] += most
    arcs.largest_change[:] += gained


@compiled
def stage_machines(arcs: Arcs, device: int, first: int, stop: int, again: bool) -> tuple[Machine, Machine]:
    """A stage in the forward and in the backward phase, for two sizes of micro-batches; `again` if it is recomputed."""
    sums = arcs.sized
    large, small = sums[0, device, stop] - sums[0, device, first], sums[1, device, stop] - sums[1, device, first]
    back, back_small = sums[2, device, stop] - sums[2, device, first], sums[3, device, stop] - sums[3, device, first]
    again_large, again_small = 0.0, 0.0
    if again:
        again_large = sums[4, device, stop] - sums[4, device, first]
        again_small = sums[5, device, stop] - sums[5, device, first]
    return Machine(large, large, small, small), Machine(back, back + again_large, back_small, back_small + again_small)


@compiled
def link_machines(arcs: Arcs, position: int) -> tuple[Machine, Machine]:
    """A link in both phases."""
    links = arcs.sized_links
    there, there_small, back, back_small = (
        links[0, position],
        links[1, position],
        links[2, position],
        links[3, position],
    )
    return Machine(there, there, there_small, there_small), Machine(back, back, back_small, back_small)


@compiled
def least_recompute_s(held: Floats, entering: Floats, again: Floats, prices: Floats, room: float) -> float:
    """Seconds of recompute at least when all layers together have `room` bytes; see `_price_layer`.

    Args:
        held: bytes that each layer keeps, shape (L,).
        entering: bytes at each boundary, shape (L + 1,).
        again: recompute seconds, shape (L,).
        prices: seconds per byte to try.
        room: bytes.
    """
    kept, recomputed = np.zeros(len(prices)), np.zeros(len(prices))
    for layer in range(len(held) - 1, -1, -1):
        _price_layer(held[layer], entering[layer + 1], again[layer], prices, kept, recomputed)
    return _least_at(prices, kept, recomputed, room)


@compiled
def used_numbers(capacity: Indices) -> tuple[Indices, Indices]:
    """All ways to use up devices: how many stages each class has, shape (U, C), and how many there are in all, (U,).

    Way `u` less one stage of class c is way `u - stride[c]` with stride[c] = product of capacity + 1 of classes before.
    """
    ways = 1
    for number in capacity:
        ways *= number + 1
    used = np.zeros((ways, len(capacity)), dtype=np.int64)
    total = np.zeros(ways, dtype=np.int64)
    for way in range(ways):
        rest = way
        for device in range(len(capacity)):
            used[way, device] = rest % (capacity[device] + 1)
            rest //= capacity[device] + 1
            total[way] += used[way, device]
    return used, total


@compiled
def before_bounds(arcs: Arcs) -> Floats:
    """What the stages in front cost at least: at [u, i, :] of layers [0, i), when those behind use devices as in way u.

    Five numbers, those of the module; with two sizes of micro-batches fifteen, see `front_four`. Each number is the
    smallest of its own; infinite where nothing leads to the start, or no stages behind lead to the end.
    """
    used, total = used_numbers(arcs.capacity)
    ways, classes = used.shape
    positions = len(arcs.allowed)
    before = np.full((ways, positions, FRONT_OPTIMIZER + 1 if arcs.two_sizes else 5), np.inf)
    lowest = _lowest(arcs)
    for way in range(ways - 1, -1, -1):
        if total[way] > arcs.most_stages:
            continue
        if total[way] >= arcs.least_stages:
            before[way, 0, :] = 0.0
        if total[way] == arcs.most_stages:
            continue
        variant = total[way] if arcs.by_number else 0
        stride = 1
        for device in range(classes):
            rest = way + stride
            stride *= arcs.capacity[device] + 1
            if used[way, device] == arcs.capacity[device]:
                continue
            for stop in range(max(1, lowest[way]), positions):
                for step in range(arcs.length[variant, device, stop]):
                    first = stop - 1 - step
                    place = arcs.offset[variant, device, stop] + step
                    if arcs.need[place] == IMPOSSIBLE or before[rest, first, 0] == np.inf:
                        continue
                    if arcs.two_sizes:
                        _lower_two_sizes(arcs, device, first, stop, place, before[rest, first], before[way, stop])
                    else:
                        _lower(arcs, first, place, before[rest, first], before[way, stop])
    return before


@compiled
def _lowest(arcs: Arcs) -> Indices:
    """For each way to use devices a position such that no stages on them reach from further in front to the end."""
    used, total = used_numbers(arcs.capacity)
    ways, classes = used.shape
    positions = len(arcs.allowed)
    lowest = np.full(ways, positions, dtype=np.int64)
    lowest[0] = positions - 1
    for way in range(1, ways):
        if total[way] > arcs.most_stages:
            continue
        variant = total[way] - 1 if arcs.by_number else 0
        stride = 1
        for device in range(classes):
            rest = way - stride
            stride *= arcs.capacity[device] + 1
            if used[way, device] > 0:
                for stop in range(lowest[rest], positions):
                    lowest[way] = min(lowest[way], stop - arcs.length[variant, device, stop])
    return lowest


@compiled
def _lower(arcs: Arcs, first: int, place: int, front: Floats, here: Floats) -> None:
    """Lower the numbers `here` to those of a front with one more stage behind."""
    terms = arcs.terms[place]
    forward, backward = 0.0, 0.0
    both = max(0.0, terms[BACKWARD] + arcs.steady_again * arcs.extra[place])
    if arcs.objective == FLOW_SHOPS:
        forward = terms[FORWARD]
        backward = max(both, arcs.backward_link[first]) + arcs.backward_head[first]
        both = forward + backward
    here[0] = min(here[0], front[0] + terms[THROUGH])
    here[1] = min(here[1], max(front[1], forward))
    here[2] = min(here[2], max(front[2], backward))
    here[3] = min(here[3], max(front[3], both))
    here[4] = min(here[4], max(front[4], terms[OPTIMIZER]))


@compiled
def _lower_two_sizes(arcs: Arcs, device: int, first: int, stop: int, place: int, front: Floats, here: Floats) -> None:
    """The same with two sizes of micro-batches."""
    n, m = arcs.more_large, arcs.more_small
    stage, stage_back = stage_machines(arcs, device, first, stop, arcs.need[place] == RECOMPUTES)
    link, link_back = link_machines(arcs, first)
    for kind in range(3):
        one, other = link, stage
        if kind == 1:
            one, other = link_back, stage_back
        elif kind == 2:
            one, other = both_phases(link, link_back), both_phases(stage, stage_back)
        four = front_with(front_with(front_four(front, kind), one, n, m), other, n, m)
        for index in range(4):
            here[4 * kind + index] = min(here[4 * kind + index], four[index])
        if kind < 2:
            stay = max(max(one.large_stay, other.large_stay), front[STAYS_LEAST + kind])
            here[STAYS_LEAST + kind] = min(here[STAYS_LEAST + kind], stay)
    slowest = max(front[FRONT_OPTIMIZER], arcs.terms[place, OPTIMIZER])
    here[FRONT_OPTIMIZER] = min(here[FRONT_OPTIMIZER], slowest)


@compiled
def front_four(front: Floats, kind: int) -> Four:
    """Of what `before_bounds` says the four numbers of `two_sizes`: forward, backward, or both phases."""
    at = 4 * kind
    return front[at], front[at + 1], front[at + 2], front[at + 3]


@compiled
def step_bound_s(arcs: Arcs, front: Floats) -> float:
    """What a plan takes at least whose stages `front` describes."""
    if arcs.two_sizes:
        return float(max(front[3] + front[7], front[11]) + front[FRONT_OPTIMIZER])
    return float(front[0] + max(front[1] + front[2], front[3]) + front[4])
