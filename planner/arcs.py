"""Every stage that a device could run, as arcs from layer position i to j, and what plans made of them cost at least.

The stages are numbered from the end of the model, 1 for the last: with 1F1B that is the number of micro-batches that a
stage has in flight. Five numbers bound a plan: it takes at least

    sum(through) + max(max forward + max backward, max both) + max(optimizer)

with the steady bottlenecks of forward and backward phase and `both` of one stage; for 1F1B `both` alone counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled
from planner.costs import Floats, Indices

IMPOSSIBLE, KEEPS, RECOMPUTES = 0, 1, 2
"""What a stage must do to fit."""
AUTO, ALWAYS, NEVER = 0, 1, 2
"""Modes of recompute."""


class Tables(NamedTuple):
    """All that the search reads of a problem, for one schedule, R and M.

    C classes of equal devices, L layers, N = L + 1 positions, V variants of what is in flight (1 for GPipe; for 1F1B
    one for each number of a stage from the end). Arrays over positions are prefix sums where they say so; seconds
    are those of one micro-batch, a steady one being the mean of the first M - 1.

    Attributes:
        one_f_one_b: whether the schedule is 1F1B.
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
        receive_in: bytes of buffers for what comes back at the stage's first boundary, shape (C, N).
        receive_out: the same at its last boundary.
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

    one_f_one_b: bool
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
    receive_in: Floats
    receive_out: Floats
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


THROUGH, FORWARD, BACKWARD, OPTIMIZER, REST, ROOM = range(6)
"""Columns of `Arcs.terms`."""


class Arcs(NamedTuple):
    """Stages worth looking at: those that end at j for class c in variant v start at j - 1, j - 2, ..., j - `length`.

    Attributes:
        one_f_one_b: whether the schedule is 1F1B.
        steady: M - 1.
        least_stages: smallest K.
        most_stages: largest K.
        capacity: how many stages a class can run, shape (C,).
        allowed: whether a cut is allowed at a position, shape (N,).
        crossing: transfers at a position of one micro-batch, both directions, shape (N,).
        backward_link: M - 1 steady transfers of gradients, shape (N,).
        backward_head: see `Tables`.
        offset: place of the first arc, shape (V, C, N).
        length: how many there are, shape (V, C, N).
        need: IMPOSSIBLE, KEEPS or RECOMPUTES of each arc.
        whole: whether it fits as one segment.
        extra: recompute seconds that it needs at least.
        terms: what it adds to the objective without recompute, shape (arcs, 6); seconds, and bytes in the last column:
            THROUGH, a micro-batch's passes and its transfers before them;
            FORWARD, M - 1 times f, for GPipe not less than the transfer, for 1F1B with b;
            BACKWARD, M - 1 times b, for 1F1B what both phases leave when the stage waits once for all behind it;
            OPTIMIZER, all-reduce and optimizer;
            REST, for 1F1B the backward passes of the last, incomplete round;
            ROOM, bytes for activations and temporaries.
    """

    one_f_one_b: bool
    steady: int
    least_stages: int
    most_stages: int
    capacity: Indices
    allowed: NDArray[np.bool_]
    crossing: Floats
    backward_link: Floats
    backward_head: Floats
    offset: Indices
    length: Indices
    need: NDArray[np.uint8]
    whole: NDArray[np.bool_]
    extra: Floats
    terms: Floats


@compiled
def make_arcs(tables: Tables, below_s: float) -> Arcs:
    """The stages that rules, memory and a step time below `below_s` leave, with bounds of their recompute.

    A stage's segments cost at least min(e + price * bytes held) - price * bytes available, whatever the price
    (Lagrange); the minimum is a shortest path over its layers with two states, kept and recomputed.
    """
    classes, variants, positions = tables.held.shape
    layers = positions - 1
    offset = np.zeros((variants, classes, positions), dtype=np.int64)
    count = np.zeros((variants, classes, positions), dtype=np.int64)
    least_s = np.inf
    for device in range(classes):
        least_s = min(least_s, tables.passing[device, layers])
    if classes > 1:
        least_s = 0.0
        for layer in range(layers):
            one = np.inf
            for device in range(classes):
                one = min(one, tables.passing[device, layer + 1] - tables.passing[device, layer])
            least_s += one
    total = 0
    for variant in range(variants):
        for device in range(classes):
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
                    work = (
                        tables.forward[device, stop]
                        - tables.forward[device, first]
                        + tables.backward[device, stop]
                        - tables.backward[device, first]
                    )
                    own = tables.passing[device, stop] - tables.passing[device, first]
                    if tables.steady * work + (own if tables.one_f_one_b else least_s) >= below_s:
                        break
                    if tables.fixed_bytes[first, stop] > tables.limit[device]:
                        break
                    first -= 1
                count[variant, device, stop] = stop - 1 - first
                total += stop - 1 - first
    need = np.zeros(total, dtype=np.uint8)
    whole = np.zeros(total, dtype=np.bool_)
    extra = np.zeros(total)
    terms = np.zeros((total, 6))
    number_prices = tables.prices.shape[2]
    kept, recomputed = np.zeros(number_prices), np.zeros(number_prices)
    for variant in range(variants):
        for device in range(classes):
            for stop in range(1, positions):
                temporary = 0.0
                priced = stop  # `kept` and `recomputed` hold the least e + price * bytes of layers [priced, stop)
                kept[:] = 0.0
                recomputed[:] = 0.0
                for step in range(count[variant, device, stop]):
                    first = stop - 1 - step
                    place = offset[variant, device, stop] + step
                    temporary = max(temporary, tables.transient[device, first])
                    if not tables.allowed[first]:
                        continue
                    trainable = tables.trainable_bytes[first, stop]
                    room = room_for(tables, device, variant, first, stop)
                    large, small = tables.in_flight[variant, 0], tables.in_flight[variant, 1]
                    at, share = tables.stage_at[device], tables.stage_share[device]
                    kept_large, kept_small, beside, most = whole_stage(
                        tables.stage_kept, tables.stage_most, at, share, first, stop
                    )
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
                    if tables.one_f_one_b:
                        number = variant + 1
                        most = tables.forward_most[device, stop] - tables.forward_most[device, first]
                        least = tables.forward_least[device, stop] - tables.forward_least[device, first]
                        terms[place, FORWARD] = tables.steady * (forward + backward)
                        terms[place, BACKWARD] = tables.steady * (forward + backward) - (number * most - least)
                        terms[place, REST] = tables.steady % number * max(0.0, own - most)
                    else:
                        terms[place, FORWARD] = tables.forward_head[first]
                        terms[place, FORWARD] += tables.steady * max(forward, tables.forward_link[first])
                        terms[place, BACKWARD] = tables.steady * backward
                    if trainable > 0:
                        terms[place, OPTIMIZER] = tables.optimizer_rate[device] * trainable + tables.optimizer_fixed
                    if keeps:
                        need[place] = KEEPS
                        continue
                    need[place] = RECOMPUTES
                    if tables.one_f_one_b and variant == 0:
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
                        for index in range(number_prices):
                            price = tables.prices[device, variant, index]
                            one, other = kept[index], recomputed[index]
                            kept[index] = min(one, other + price * edge) + price * own_bytes
                            recomputed[index] = min(other, one + price * edge) + again
                    least = 0.0
                    for index in range(number_prices):
                        least = max(
                            least, min(kept[index], recomputed[index]) - tables.prices[device, variant, index] * room
                        )
                    extra[place] = least * (1 - 1e-9)
                    if whole[place]:
                        extra[place] = min(extra[place], all_again)
    return Arcs(
        tables.one_f_one_b,
        tables.steady,
        tables.least_stages,
        tables.most_stages,
        tables.capacity,
        tables.allowed,
        tables.crossing,
        tables.steady * tables.backward_link,
        tables.backward_head,
        offset,
        count,
        need,
        whole,
        extra,
        terms,
    )


@compiled
def room_for(tables: Tables, device: int, variant: int, first: int, stop: int) -> float:
    """Bytes that a stage of layers [first, stop) leaves for what it keeps beside its inputs, and for temporaries."""
    state = np.ceil(tables.state_factor[device] * tables.trainable_bytes[first, stop])
    buffers = tables.receive_in[device, first] + tables.receive_out[device, stop]
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
    kept_large = stage_kept[at[0, 0], first, stop]
    most_large = stage_most[at[0, 0], first, stop]
    if share[0] > 0:
        kept_large = np.ceil((1 - share[0]) * kept_large + share[0] * stage_kept[at[0, 1], first, stop] - 1e-6)
        most_large = np.ceil((1 - share[0]) * most_large + share[0] * stage_most[at[0, 1], first, stop] - 1e-6)
    kept_small = stage_kept[at[1, 0], first, stop]
    most_small = stage_most[at[1, 0], first, stop]
    if share[1] > 0:
        kept_small = np.ceil((1 - share[1]) * kept_small + share[1] * stage_kept[at[1, 1], first, stop] - 1e-6)
        most_small = np.ceil((1 - share[1]) * most_small + share[1] * stage_most[at[1, 1], first, stop] - 1e-6)
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
    """What the stages in front cost at least: shape (U, N, 5), the five numbers of the module at [u, i, :].

    They cover layers [0, i) when the stages behind have used devices as in way u. Each number is the smallest of its
    own; infinite where nothing leads to the start.
    """
    used, total = used_numbers(arcs.capacity)
    ways, classes = used.shape
    positions = len(arcs.allowed)
    before = np.full((ways, positions, 5), np.inf)
    for way in range(ways - 1, -1, -1):
        if total[way] > arcs.most_stages:
            continue
        if total[way] >= arcs.least_stages:
            before[way, 0, :] = 0.0
        if total[way] == arcs.most_stages:
            continue
        variant = total[way] if arcs.one_f_one_b else 0
        stride = 1
        for device in range(classes):
            rest = way + stride
            stride *= arcs.capacity[device] + 1
            if used[way, device] == arcs.capacity[device]:
                continue
            for stop in range(1, positions):
                here = before[way, stop]
                for step in range(arcs.length[variant, device, stop]):
                    first = stop - 1 - step
                    place = arcs.offset[variant, device, stop] + step
                    front = before[rest, first]
                    if arcs.need[place] == IMPOSSIBLE or front[0] == np.inf:
                        continue
                    terms = arcs.terms[place]
                    forward, backward = 0.0, 0.0
                    both = max(0.0, terms[2] + arcs.steady * arcs.extra[place])
                    if not arcs.one_f_one_b:
                        forward = terms[1]
                        backward = max(both, arcs.backward_link[first]) + arcs.backward_head[first]
                        both = forward + backward
                    here[0] = min(here[0], front[0] + terms[0])
                    here[1] = min(here[1], max(front[1], forward))
                    here[2] = min(here[2], max(front[2], backward))
                    here[3] = min(here[3], max(front[3], both))
                    here[4] = min(here[4], max(front[4], terms[3]))
    return before
