"""Memory of one stage, by class.

When most micro-batches are under way (all of them with GPipe, as many as there are stages from this one on with
1F1B), a stage keeps for each of them its inputs, what its kept layers save for the backward pass, and what crosses
each boundary next to a recomputed segment. Beside that it holds the values of one segment at a time.

A stage that keeps everything, or is one segment, is counted exactly (`planner.stage_bytes`). With other segments layers
count one by one, which is never less: what each keeps, and the largest of their temporaries.

What a segment hands to a kept layer counts, too: a layer's `kept_bytes` leave out its inputs, because they belong to
the layer that created them, and where that one is recomputed nobody has counted them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.costs import CostModel, Floats, LayerArrays, ParameterRanges
from planner.micro_batches import MicroBatches
from planner.plan import ScheduleName, Segment, StageMemory
from planner.schedule import AHEAD_BYTES, RECEIVES_AHEAD, SENDS_AHEAD
from profiler.device import Device
from profiler.record import OptimizerCost


def stage_memory(
    costs: CostModel,
    parameters: ParameterRanges,
    device: Device,
    schedule: ScheduleName,
    micro_batches: MicroBatches,
    optimizer: OptimizerCost,
    *,
    number: int,
    first: int,
    stop: int,
    segments: Sequence[Segment],
) -> StageMemory:
    """Peak bytes of the stage of layers [first, stop).

    Args:
        costs: costs of the layers.
        parameters: bytes of the parameters of every range.
        device: its kind selects the costs.
        schedule: says how many micro-batches are under way.
        micro_batches: how a replica's samples are cut.
        optimizer: what the optimizer keeps.
        number: of the stage from the end, 1 for the last.
        first: of its layers.
        stop: behind its layers.
        segments: what is recomputed.
    """
    profile = costs.profile
    large, small = (costs.layers(device.kind, size) for size in (micro_batches.largest, micro_batches.smallest))
    many_large, many_small = micro_batches.in_flight(schedule, number)
    entering = behind_boundary(many_large * large.output_bytes + many_small * small.output_bytes)
    remaining = (many_large * large.held_bytes + many_small * small.held_bytes)[first:stop].sum()
    if not segments or (segments[0].first, segments[0].stop) == (first, stop):
        (kept_large, most_large), (kept_small, most_small) = (
            costs.stage(device.kind, size, first, stop) for size in (micro_batches.largest, micro_batches.smallest)
        )
        if segments:
            held, peak = remaining, max(most_large, most_small)
        else:
            held = many_large * kept_large + many_small * kept_small
            peak = max(most_large - kept_large, most_small - kept_small)
    else:
        kept = many_large * large.kept_bytes + many_small * small.kept_bytes
        recomputed = np.zeros(len(kept), dtype=np.bool_)
        for segment in segments:
            recomputed[segment.first : segment.stop] = True
        again = recomputed[first:stop]
        held_again = many_large * large.held_bytes + many_small * small.held_bytes
        edges = {edge for segment in segments for edge in (segment.first, segment.stop) if first < edge < stop}
        held = kept[first:stop][~again].sum() + held_again[first:stop][again].sum() + sum(entering[e] for e in edges)
        one = np.maximum(large.kept_bytes, small.kept_bytes)
        temporary = temporary_bytes(large, small)
        peak = float(temporary[first:stop].max())
        for segment in segments:
            behind = stop if segment is segments[-1] else segment.stop
            peak = max(peak, one[segment.first : segment.stop].sum() + temporary[segment.first : behind].max())
    at_first, at_last = message_bytes(costs, device.kind, schedule, micro_batches, number)
    return StageMemory(
        parameters=int(parameters.unique[first, stop] + parameters.buffers[first, stop]),
        gradients=int(parameters.gradients[first, stop]),
        optimizer=int(np.ceil(optimizer.state_bytes_per_byte * parameters.trainable[first, stop])),
        activations=int(entering[first] + micro_batches.batch_size * profile.input_bytes + held),
        transient=int(peak),
        receive_buffers=int(at_first[first] + at_last[stop]),
        reserve=profile.reserve_bytes,
    )


def temporary_bytes(large: LayerArrays, small: LayerArrays) -> Floats:
    """What each layer needs beside what is kept, at most, shape (L,)."""
    most: Floats = np.maximum(
        large.transient_bytes + large.workspace_bytes, small.transient_bytes + small.workspace_bytes
    )
    return most


def message_bytes(
    costs: CostModel, kind: str, schedule: ScheduleName, micro_batches: MicroBatches, number: int
) -> tuple[Floats, Floats]:
    """Messages under way at a stage's first and at its last boundary, two arrays of shape (L + 1,).

    Behind the stage outputs that have not left, gradients whose receives are posted, and the one that is read; before
    it gradients of its inputs that have not left and, with 1F1B, inputs whose receives are posted. With GPipe the
    inputs of all micro-batches are kept anyway, and so are those that are under way here.

    Args:
        costs: costs of the layers.
        kind: of the device.
        schedule: says how many micro-batches are under way.
        micro_batches: how a replica's samples are cut.
        number: of the stage from the end, 1 for the last.
    """
    large, small = (costs.layers(kind, size) for size in (micro_batches.largest, micro_batches.smallest))
    outputs = np.maximum(large.output_bytes, small.output_bytes)
    gradients = np.maximum(large.output_gradient_bytes, small.output_gradient_bytes)
    shortest = np.minimum(large.output_gradient_bytes, small.output_gradient_bytes)
    sent_back = np.minimum(_ahead(SENDS_AHEAD, shortest), micro_batches.count)
    posted_and_read = np.minimum(_ahead(RECEIVES_AHEAD, shortest) + 1, micro_batches.count)
    shortest = np.minimum(large.output_bytes, small.output_bytes)
    sent = np.minimum(_ahead(SENDS_AHEAD, shortest), micro_batches.count)
    inputs = np.zeros(len(outputs))
    if schedule == "1f1b":
        flying = sum(micro_batches.in_flight(schedule, number))
        soon = np.minimum(number + _ahead(RECEIVES_AHEAD, shortest), micro_batches.count)
        soon_large, now_large = (np.minimum(many, micro_batches.number_largest) for many in (soon, flying))
        more_large = soon_large - now_large
        inputs = more_large * large.output_bytes + (soon - flying - more_large) * small.output_bytes
    return behind_boundary(sent_back * gradients + inputs), behind_boundary(
        posted_and_read * gradients + sent * outputs
    )


def _ahead(at_least: int, message_bytes: Floats) -> Floats:
    """How many messages of a length may be under way on one way."""
    many: Floats = np.maximum(at_least, AHEAD_BYTES // np.maximum(1, message_bytes))
    return many


def behind_boundary(layer_bytes: Floats) -> Floats:
    """Bytes at boundary i, between layers i - 1 and i, shape (L + 1,); 0 at both ends of the model."""
    at_boundary = np.zeros(len(layer_bytes) + 1)
    at_boundary[1:-1] = layer_bytes[:-1]
    return at_boundary
