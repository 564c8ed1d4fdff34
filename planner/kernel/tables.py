"""All that the compiled search reads of a problem, and what a stage needs of its device's memory by these numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.cost.stage_sums import AS_ONE, KEPT, StageSums
from planner.kernel.compiled import compiled
from planner.kernel.segments import StageCosts
from profiler import between_sizes

AUTO, ALWAYS, NEVER = 0, 1, 2
"""Modes of recompute."""
on_line, whole_bytes = compiled(between_sizes.on_line), compiled(between_sizes.whole_bytes)


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
        memory: what stages take of it, added up; see `StageSums`, and so C, V, L and N.
        stage_kept: bytes that one micro-batch of a measured size keeps of layers [i, j), shape (sizes, N, N).
        stage_most: the most bytes that it has at any moment, shape (sizes, N, N).
        stage_at: the measured sizes around that of the large and of the small micro-batches, shape (C, 2, 2).
        stage_share: where between them these sizes are, shape (C, 2).
        prices: seconds of recompute per byte held, ascending, some to try, shape (C, V, P).
        trainable_bytes: the trainable part of parameters, shape (N, N).
        limit: bytes that a stage may fill beside what any stage needs, shape (C, V).
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
    memory: StageSums
    stage_kept: Floats
    stage_most: Floats
    stage_at: Indices
    stage_share: Floats
    prices: Floats
    trainable_bytes: Floats
    limit: Floats
    optimizer_rate: Floats
    optimizer_fixed: float
    allowed: NDArray[np.bool_]
    demanded: Indices
    pinned: Indices
    capacity: Indices


class Moments(NamedTuple):
    """The largest transient bytes of one layer of a stage.

    Attributes:
        kept: if the stage keeps everything, beside what it has as a whole.
        as_one: the same if it is one segment.
        in_parts: with other segments.
    """

    kept: float
    as_one: float
    in_parts: float


class Needs(NamedTuple):
    """What a stage of a range of layers needs.

    Attributes:
        over_kept: bytes that are missing if it keeps everything; at most 0 if it fits.
        over_as_one: the same if it is one segment.
        room: bytes for what its kept layers, edges of segments and transients take in any other case.
    """

    over_kept: float
    over_as_one: float
    room: float


@compiled
def no_moments() -> Moments:
    """Of no layer."""
    return Moments(0.0, 0.0, 0.0)


@compiled
def with_layer(moments: Moments, tables: Tables, device: int, layer: int) -> Moments:
    """Of one layer more."""
    memory = tables.memory
    return Moments(
        max(moments.kept, memory.beside_whole[KEPT, device, layer]),
        max(moments.as_one, memory.beside_whole[AS_ONE, device, layer]),
        max(moments.in_parts, memory.beside[device, layer]),
    )


@compiled
def stage_needs(tables: Tables, device: int, variant: int, first: int, stop: int, moments: Moments) -> Needs:
    """What a stage of layers [first, stop) needs, as the rows of `planner.cost.ledger` say: see `StageSums`."""
    memory = tables.memory
    taken = memory.ranges[memory.range_of[device], first, stop]
    taken += memory.first_boundary[device, variant, first] + memory.last_boundary[device, variant, stop]
    room = tables.limit[device, variant] - taken
    own_kept = memory.own_kept[device, variant, stop] - memory.own_kept[device, variant, first]
    own_recomputed = memory.own_recomputed[device, variant, stop] - memory.own_recomputed[device, variant, first]
    kept_large, most_large = _whole_stage(tables, device, 0, first, stop)
    kept_small, most_small = _whole_stage(tables, device, 1, first, stop)
    in_flight = memory.in_flight[variant, 0] * kept_large + memory.in_flight[variant, 1] * kept_small
    beside = max(most_large - kept_large, most_small - kept_small) + moments.kept
    most = max(most_large, most_small) + moments.as_one
    return Needs(
        own_kept + in_flight + beside - room,
        own_recomputed + most - room,
        room - own_recomputed,
    )


@compiled
def _whole_stage(tables: Tables, device: int, size: int, first: int, stop: int) -> tuple[float, float]:
    """What one micro-batch of layers [first, stop) keeps, and the most that it has; `size` is 0 for a large one."""
    below, above = tables.stage_at[device, size, 0], tables.stage_at[device, size, 1]
    share = tables.stage_share[device, size]
    kept, most = tables.stage_kept[below, first, stop], tables.stage_most[below, first, stop]
    if share > 0:
        kept = whole_bytes(on_line(kept, tables.stage_kept[above, first, stop], share))
        most = whole_bytes(on_line(most, tables.stage_most[above, first, stop], share))
    return kept, most


@compiled
def segment_costs(tables: Tables, device: int, variant: int) -> StageCosts:
    """What decides the segments of stages on one class of devices, with one number of micro-batches in flight."""
    memory = tables.memory
    return StageCosts(
        memory.kept_layers[device, variant],
        memory.segment_edges[device, variant],
        memory.segment[device],
        memory.beside[device],
        tables.again[device],
        tables.again_passing[device],
    )
