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
from planner.kernel.two_sizes import Four, Machine, both_phases, front_with
from planner.plan.schedules import Objective
from profiler import between_sizes

FLOW_SHOPS, ROUNDS, WORK = (int(objective) for objective in Objective)
IMPOSSIBLE, KEEPS, RECOMPUTES = 0, 1, 2
"""What a stage must do to fit."""
AUTO, ALWAYS, NEVER = 0, 1, 2
"""Modes of recompute."""


class Tables(NamedTuple):
    """All that the search reads of a problem, for one schedule, R and M.

    C classes of equal devices, L layers, N = L + 1 positions, V variants of what is in flight (1 where that is all
    micro-batches; else one for each number of a stage from the end). Arrays over positions are prefix sums where they
    say so; seconds are those of one micro-batch, a steady one being the mean of the first M - 1.

    Attributes:
        objective: of the schedule, see `planner.plan.schedules.Objective`; FLOW_SHOPS, ROUNDS or WORK.
        by_number: whether there is a variant for each number of a stage from the end.
        last_turns_around: whether the last stage never runs a segment again.
        two_sizes: whether the flow shops have unequal micro-batches.
        steady: M - 1.
        recompute: AUTO, ALWAYS or NEVER.
        least_stages: smallest K.
        most_stages: largest K.
        passing: prefix sums of the least f + b of a micro-batch, shape (C, N).
        forward: prefix sums of steady f, shape (C, N).
        backward: prefix sums of steady b, shape (C, N).
        again: prefix sums of steady recompute, shape (C, N).
        again_passing: prefix sums of the least recompute of a micro-batch, shape (C, N).
        forward_most: prefix sums of the largest f, shape (C, N).
        forward_least: prefix sums of the least f, shape (C, N).
        crossing: least transfer of a micro-batch, both directions, shape (N,).
        forward_link: steady transfer of outputs, shape (N,).
        backward_link: steady transfer of their gradients, shape (N,).
        forward_head: seconds that only the larger micro-batches cost before a stage, shape (N,).
        backward_head: the same, backward.
        more_large: how many large micro-batches there are, less one.
        more_small: how many small ones, less one.
        sized: prefix sums of f, b and recompute, each of a large and of a small micro-batch, shape (6, C, N).
        sized_links: transfers of outputs and of gradients, each of a large and of a small one, shape (4, N).
        held: prefix sums of bytes that all micro-batches in flight keep of layers that are not recomputed, (C, V, N).
        entering: bytes at boundaries of all micro-batches in flight, shape (C, V, N).
        kept_one: prefix sums of bytes that one micro-batch keeps, shape (C, N).
        transient: bytes beside these at most, shape (C, L).
        remaining: prefix sums of bytes that all micro-batches in flight keep of any layer, shape (C, V, N).
        in_flight: how many micro-batches of the larger and of the smaller size are, shape (V, 2).
        stage_kept: bytes that one micro-batch of a measured size keeps of layers [i, j), shape (sizes, N, N).
        stage_most: the most bytes that it has at any moment, shape (sizes, N, N).
        stage_at: the measured sizes around that of the large and of the small micro-batches, shape (C, 2, 2).
        stage_share: where between them these sizes are, shape (C, 2).
        prices: seconds of recompute per byte held, ascending, some to try, shape (C, V, P).
        message_bytes: bytes of messages under way at a stage's first and at its last boundary, shape (2, C, V, N).
        fixed_bytes: parameters, buffers and gradients of layers [i, j), shape (N, N).
        trainable_bytes: the trainable part of parameters, shape (N, N).
        state_factor: bytes of optimizer state for each of trainable parameters, shape (C,).
        limit: bytes that a stage may fill beside what every stage needs, shape (C,).
        optimizer_rate: seconds of optimizer and all-reduce for each trainable byte, shape (C,).
        optimizer_fixed: seconds of an all-reduce of no bytes.
        allowed: whether a cut is allowed at a position, shape (N,).
        demanded: number of positions before or at each one where a cut must be, shape (N,).
        pinned: class that must run a layer, or -1, shape (L,).
        capacity: how many stages a class can run, shape (C,).
    """

    objective: int
    by_number: bool
    last_turns_around: bool
    two_sizes: bool
    steady: int
    recompute: int
    least_stages: int
    most_stages: int
    passing: Floats
    forward: Floats
    backward: Floats
    again: Floats
    again_passing: Floats
    forward_most: Floats
    forward_least: Floats
    crossing: Floats
    forward_link: Floats
    backward_link: Floats
    forward_head: Floats
    backward_head: Floats
    more_large: float
    more_small: float
    sized: Floats
    sized_links: Floats
    held: Floats
    entering: Floats
    kept_one: Floats
    transient: Floats
    remaining: Floats
    in_flight: Floats
    stage_kept: Floats
    stage_most: Floats
    stage_at: Indices
    stage_share: Floats
    prices: Floats
    message_bytes: Floats
    fixed_bytes: Floats
    trainable_bytes: Floats
    state_factor: Floats
    limit: Floats
    optimizer_rate: Floats
    optimizer_fixed: float
    allowed: NDArray[np.bool_]
    demanded: Indices
    pinned: Indices
    capacity: Indices


on_line, whole_bytes = compiled(between_sizes.on_line), compiled(between_sizes.whole_bytes)

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


@compiled
def make_arcs(tables: Tables, below_s: float) -> Arcs:
    """The stages that rules, memory and a step time below `below_s` leave, with bounds of their recompute."""
    classes, variants, positions = tables.held.shape
    offset, length = _reach(tables, below_s)
    count = int(length.sum())
    need, whole = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.bool_)
    extra, terms = np.zeros(count), np.zeros((count, 6))
    for variant in range(variants):
        for device in range(classes):
            for stop in range(1, positions):
                places = offset[variant, device, stop], length[variant, device, stop]
                _fill(tables, variant, device, stop, places, below_s, need, whole, extra, terms)
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
    classes, variants, positions = tables.held.shape
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
                    if tables.fixed_bytes[first, stop] > tables.limit[device]:
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
    tables: Tables,
    variant: int,
    device: int,
    stop: int,
    places: tuple[int, int],
    below_s: float,
    need: NDArray[np.uint8],
    whole: NDArray[np.bool_],
    extra: Floats,
    terms: Floats,
) -> None:
    """What `Arcs` says of the stages that end at `stop`, the shortest first.

    A stage's segments cost at least min(e + price * bytes held) - price * bytes available, whatever the price
    (Lagrange); the minimum is a shortest path over its layers with two states, kept and recomputed.
    """
    prices = tables.prices[device, variant]
    kept, recomputed = np.zeros(len(prices)), np.zeros(len(prices))
    at, share = tables.stage_at[device], tables.stage_share[device]
    large, small = tables.in_flight[variant, 0], tables.in_flight[variant, 1]
    priced = stop  # `kept` and `recomputed` hold the least e + price * bytes of layers [priced, stop)
    temporary = 0.0
    for step in range(places[1]):
        first, place = stop - 1 - step, places[0] + step
        temporary = max(temporary, tables.transient[device, first])
        if not tables.allowed[first]:
            continue
        room = room_for(tables, device, variant, first, stop)
        kept_large, kept_small, beside, most = whole_stage(tables.stage_kept, tables.stage_most, at, share, first, stop)
        keeps = tables.recompute != ALWAYS and large * kept_large + small * kept_small + beside <= room
        room -= tables.remaining[device, variant, stop] - tables.remaining[device, variant, first]
        whole[place] = tables.recompute != NEVER and most <= room
        terms[place, ROOM] = room
        room -= temporary
        if not (keeps or whole[place] or (tables.recompute == AUTO and room >= 0)):
            continue
        forward = tables.forward[device, stop] - tables.forward[device, first]
        backward = tables.backward[device, stop] - tables.backward[device, first]
        own = tables.passing[device, stop] - tables.passing[device, first]
        terms[place, THROUGH] = own + tables.crossing[first]
        if tables.objective == FLOW_SHOPS:
            terms[place, FORWARD] = tables.forward_head[first]
            terms[place, FORWARD] += tables.steady * max(forward, tables.forward_link[first])
            terms[place, BACKWARD] = tables.steady * backward
        else:
            terms[place, FORWARD] = tables.steady * (forward + backward)
        if tables.objective == ROUNDS:
            number = variant + 1
            forward_most = tables.forward_most[device, stop] - tables.forward_most[device, first]
            forward_least = tables.forward_least[device, stop] - tables.forward_least[device, first]
            terms[place, BACKWARD] = tables.steady * (forward + backward) - (number * forward_most - forward_least)
            terms[place, REST] = tables.steady % number * max(0.0, own - forward_most)
        if tables.trainable_bytes[first, stop] > 0:
            slope = tables.optimizer_rate[device]
            terms[place, OPTIMIZER] = slope * tables.trainable_bytes[first, stop] + tables.optimizer_fixed
        need[place] = KEEPS if keeps else RECOMPUTES
        if keeps or (tables.last_turns_around and variant == 0):
            continue
        all_again = tables.again[device, stop] - tables.again[device, first]
        if tables.recompute == ALWAYS or room < 0:
            extra[place] = all_again
            continue
        while priced > first:
            priced -= 1
            edge = tables.entering[device, variant, priced + 1] if priced + 1 < stop else 0.0
            own_bytes = tables.held[device, variant, priced + 1] - tables.held[device, variant, priced]
            again = tables.again[device, priced + 1] - tables.again[device, priced]
            for index in range(len(prices)):
                one, other = kept[index], recomputed[index]
                kept[index] = min(one, other + prices[index] * edge) + prices[index] * own_bytes
                recomputed[index] = min(other, one + prices[index] * edge) + again
        least = 0.0
        for index in range(len(prices)):
            least = max(least, min(kept[index], recomputed[index]) - prices[index] * room)
        extra[place] = least * (1 - 1e-9)
        if whole[place]:
            extra[place] = min(extra[place], all_again)
        step_s = terms[place, THROUGH] + terms[place, FORWARD] + steady_again(tables) * extra[place]
        if step_s + (terms[place, BACKWARD] if tables.objective == FLOW_SHOPS else 0.0) >= below_s:
            need[place] = IMPOSSIBLE


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
def room_for(tables: Tables, device: int, variant: int, first: int, stop: int) -> float:
    """Bytes that a stage of layers [first, stop) leaves for what it keeps beside its inputs, and for temporaries."""
    state = np.ceil(tables.state_factor[device] * tables.trainable_bytes[first, stop])
    buffers = tables.message_bytes[0, device, variant, first] + tables.message_bytes[1, device, variant, stop]
    taken = tables.fixed_bytes[first, stop] + state + tables.entering[device, variant, first] + buffers
    return float(tables.limit[device] - taken)


@compiled
def whole_stage(
    stage_kept: Floats, stage_most: Floats, at: Indices, share: Floats, first: int, stop: int
) -> tuple[float, float, float, float]:
    """Bytes of a stage that keeps everything or nothing; see `Tables` for the arrays of one class.

    Returns:
        What one large and one small micro-batch keeps, the most beside that, and the most in all.
    """
    kept_large, kept_small = stage_kept[at[0, 0], first, stop], stage_kept[at[1, 0], first, stop]
    most_large, most_small = stage_most[at[0, 0], first, stop], stage_most[at[1, 0], first, stop]
    if share[0] > 0:
        kept_large = whole_bytes(on_line(kept_large, stage_kept[at[0, 1], first, stop], share[0]))
        most_large = whole_bytes(on_line(most_large, stage_most[at[0, 1], first, stop], share[0]))
    if share[1] > 0:
        kept_small = whole_bytes(on_line(kept_small, stage_kept[at[1, 1], first, stop], share[1]))
        most_small = whole_bytes(on_line(most_small, stage_most[at[1, 1], first, stop], share[1]))
    beside = max(most_large - kept_large, most_small - kept_small)
    return kept_large, kept_small, beside, max(most_large, most_small)


@compiled
def least_recompute_s(held: Floats, entering: Floats, again: Floats, prices: Floats, room: float) -> float:
    """Seconds of recompute at least when all layers together have `room` bytes; see `make_arcs`.

    Args:
        held: bytes that each layer keeps, shape (L,).
        entering: bytes at each boundary, shape (L + 1,).
        again: recompute seconds, shape (L,).
        prices: seconds per byte to try.
        room: bytes.
    """
    least = 0.0
    for price in prices:
        kept, recomputed = 0.0, 0.0
        for layer in range(len(held) - 1, -1, -1):
            edge = price * entering[layer + 1]
            one, other = kept, recomputed
            kept = min(one, other + edge) + price * held[layer]
            recomputed = min(other, one + edge) + again[layer]
        least = max(least, min(kept, recomputed) - price * room)
    return least


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
