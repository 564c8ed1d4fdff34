"""All that the compiled search reads of a problem, and what a stage needs of its device's memory by these numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.cost.stage_sums import AS_ONE_PLACE, KEPT_PLACE, StageSums
from planner.kernel.compiled import compiled
from planner.kernel.segments import StageCosts
from profiler import between_sizes

AUTO, ALWAYS, NEVER = 0, 1, 2
"""Modes of recompute."""
FORWARD_STEADY, FORWARD_MOST, BACKWARD_STEADY, BACKWARD_SIZED, FORWARD_SIZED = 2, 3, 6, 4, 0
"""Rows of `Tables.copies`; those of a large and of a small micro-batch are next to each other."""
on_line, whole_bytes = compiled(between_sizes.on_line), compiled(between_sizes.whole_bytes)


class Tables(NamedTuple):
    """All that the search reads of a problem, for one schedule, R and M.

    C classes of equal devices, L layers, N = L + 1 positions, V in-flight indices (1 where that is all
    micro-batches; else one for each number of a stage from the end). Arrays over positions are prefix sums where they
    say so; seconds are those of one micro-batch, a steady one being the mean of the first M - 1.

    Attributes:
        objective: of the schedule, see `planner.plan.schedules.Objective`; FLOW_SHOPS, ROUNDS or WORK.
        by_number: whether there is an in-flight index for each number of a stage from the end.
        last_turns_around: whether the last stage never recomputes a segment.
        two_sizes: whether the flow shops have unequal micro-batches.
        steady: M - 1.
        recompute: AUTO, ALWAYS or NEVER.
        least_stages: smallest K.
        most_stages: largest K.
        passing: prefix sums of f + b of a micro-batch that passes, shape (C, N): the least; of rounds the first
            micro-batch's f, which is large, and the least b.
        passing_least: the least in any case.
        forward: prefix sums of steady f, shape (C, N); of rounds the mean of all but the first micro-batch.
        backward: prefix sums of steady b, shape (C, N).
        steady_recompute: prefix sums of steady recompute, shape (C, N); of rounds as with `forward`.
        passing_recompute: prefix sums of the least recompute of a micro-batch, shape (C, N).
        forward_most: prefix sums of the largest f, shape (C, N).
        crossing: whole message of a micro-batch, both directions, shape (N,): what `passing` is of a stage.
        crossing_least: the least in any case.
        forward_link: of a steady message of outputs what it is under way, shape (N,).
        backward_link: the same of their gradients, shape (N,).
        copies: what a stage that begins, or ends, there spends on copies of messages; by kind of pass, see the rows:
            steady, the most, and of a large and of a small micro-batch, shape (2, 7, N). No prefix sums: these are
            without copies.
        forward_head: seconds that only the larger micro-batches cost before a stage, shape (N,).
        backward_head: the same, backward.
        more_large: how many large micro-batches there are, less one.
        more_small: how many small ones, less one.
        large: how many large micro-batches there are, with the smallest and the largest M that the tables are for,
            shape (2,): with those between there are as many as on the line.
        small: likewise.
        around: of rounds prefix sums of f + b on the class that is fastest, of a large and of a small micro-batch,
            shape (2, N).
        around_crossing: the shortest whole message, both directions, of a large and of a small one, shape (2,).
        first_back: of rounds prefix sums of what b of the first micro-batch takes longer than the least, shape (N,).
        first_back_most: the same on the class for which that is most, shape (N,).
        small_back: of rounds prefix sums of the least b of a small micro-batch, shape (N,).
        recompute_share: the least that recompute of a layer is, with any micro-batch, of its steady one.
        sized: prefix sums of f, b and recompute, each of a large and of a small micro-batch, shape (6, C, N).
        sized_links: how long outputs and gradients are under way, each of a large and of a small one, shape (4, N).
        memory: what stages take of it, added up; see `StageSums`, and so C, V, L and N.
        stage_kept: bytes that one micro-batch of a measured size keeps of layers [i, j), shape (sizes, N, N).
        stage_most: the most bytes that it has at any moment, shape (sizes, N, N).
        stage_at: the measured sizes around that of the large and of the small micro-batches, shape (C, 2, 2).
        stage_share: where between them these sizes are, shape (C, 2).
        prices: seconds of recompute per byte held, ascending, some to try, shape (C, V, P).
        trainable_bytes: the trainable part of parameters, shape (N, N).
        stepped_bytes: of these what one replica's optimizer steps, likewise.
        limit: bytes that a stage may fill in addition to what any stage needs, shape (C, V).
        reduce_rate: seconds of the all-reduce for each trainable byte, shape (C,).
        optimizer_rate: seconds of the optimizer for each byte that it steps, likewise.
        optimizer_fixed: the same for a stage with trainable parameters, shape (C,).
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
    passing_least: Floats
    forward: Floats
    backward: Floats
    steady_recompute: Floats
    passing_recompute: Floats
    forward_most: Floats
    crossing: Floats
    crossing_least: Floats
    forward_link: Floats
    backward_link: Floats
    copies: Floats
    forward_head: Floats
    backward_head: Floats
    more_large: float
    more_small: float
    large: Indices
    small: Indices
    around: Floats
    around_crossing: Floats
    first_back: Floats
    first_back_most: Floats
    small_back: Floats
    recompute_share: float
    sized: Floats
    sized_links: Floats
    memory: StageSums
    stage_kept: Floats
    stage_most: Floats
    stage_at: Indices
    stage_share: Floats
    prices: Floats
    trainable_bytes: Floats
    stepped_bytes: Floats
    limit: Floats
    reduce_rate: Floats
    optimizer_rate: Floats
    optimizer_fixed: Floats
    allowed: NDArray[np.bool_]
    demanded: Indices
    pinned: Indices
    capacity: Indices


@compiled
def copied_s(copies: Floats, row: int, first: int, stop: int) -> float:
    """What a pass of a stage of layers [first, stop) spends on copies; `copies` are those of `Tables`."""
    return float(copies[0, row, first] + copies[1, row, stop])


class Needs(NamedTuple):
    """What stages that end at one position need of memory; entries are those of first layers, ascending.

    Attributes:
        over_kept: bytes that are missing if a stage keeps everything; at most 0 if it fits.
        over_as_one: the same if it is one segment.
        room: bytes for what its kept layers, edges of segments and transients take in any other case.
        moment: what a layer takes of these for a moment, at most.
    """

    over_kept: Floats
    over_as_one: Floats
    room: Floats
    moment: Floats


@compiled
def stage_needs(tables: Tables, device: int, in_flight_index: int, begin: int, stop: int) -> Needs:
    """What the stages of layers [begin, stop), [begin + 1, stop), ... need, by the rows of `planner.cost.ledger`.

    The sums are explained in `planner.cost.stage_sums`. All stages of one end are looked at in one call: to hand these
    arrays on costs more than to read them.
    """
    memory, at, share = tables.memory, tables.stage_at[device], tables.stage_share[device]
    ranges, ends = memory.ranges[memory.range_of[device]], memory.ends[memory.range_of[device]]
    limit = tables.limit[device, in_flight_index]
    first_boundary = memory.first_boundary[device, in_flight_index]
    last_boundary = memory.last_boundary[device, in_flight_index]
    own_kept, own_recomputed = memory.own_kept[device, in_flight_index], memory.own_recomputed[device, in_flight_index]
    moments_kept, moments_as_one = memory.moments_whole[KEPT_PLACE, device], memory.moments_whole[AS_ONE_PLACE, device]
    moments = memory.moments[device]
    many, few = memory.in_flight[in_flight_index, 0], memory.in_flight[in_flight_index, 1]
    kept_large = _bytes_at(tables.stage_kept, at[0], share[0], begin, stop)
    kept_small = _bytes_at(tables.stage_kept, at[1], share[1], begin, stop)
    most_large = _bytes_at(tables.stage_most, at[0], share[0], begin, stop)
    most_small = _bytes_at(tables.stage_most, at[1], share[1], begin, stop)
    over_kept, over_as_one, left, moment = np.empty((4, stop - begin))
    moment_kept, moment_as_one, moment_in_parts = 0.0, 0.0, 0.0
    for first in range(stop - 1, begin - 1, -1):
        place = first - begin
        moment_kept = max(moment_kept, moments_kept[first])
        moment_as_one = max(moment_as_one, moments_as_one[first])
        moment_in_parts = max(moment_in_parts, moments[first])
        room = limit - (ranges[first, stop] + first_boundary[first] + last_boundary[stop])
        over_at_end = ranges[first, stop] + ends[first, stop] - limit
        own_bytes = own_recomputed[stop] - own_recomputed[first]
        in_flight = own_kept[stop] - own_kept[first] + many * kept_large[place] + few * kept_small[place]
        most_passing = max(most_large[place] - kept_large[place], most_small[place] - kept_small[place])
        over_kept[place] = max(in_flight + most_passing + moment_kept - room, over_at_end)
        over_as_one[place] = max(
            own_bytes + max(most_large[place], most_small[place]) + moment_as_one - room, over_at_end
        )
        left[place], moment[place] = room - own_bytes, moment_in_parts
        if over_at_end > 0:  # whatever is recomputed
            left[place] = min(left[place], -over_at_end)
    return Needs(over_kept, over_as_one, left, moment)


@compiled
def _bytes_at(measured: Floats, sizes: Indices, share: float, begin: int, stop: int) -> Floats:
    """Bytes of the stages that end at `stop` for a micro-batch between two of the sizes."""
    found = measured[sizes[0], begin:stop, stop].copy()
    if share > 0:
        above = measured[sizes[1], begin:stop, stop]
        for place in range(stop - begin):
            found[place] = whole_bytes(on_line(found[place], above[place], share))
    return found


@compiled
def segment_costs(tables: Tables, device: int, in_flight_index: int) -> StageCosts:
    """What decides the segments of stages on one class of devices, with one number of micro-batches in flight."""
    memory = tables.memory
    return StageCosts(
        memory.kept_layers[device, in_flight_index],
        memory.segment_edges[device, in_flight_index],
        memory.segment[device],
        memory.moments[device],
        tables.steady_recompute[device],
        tables.passing_recompute[device],
    )
