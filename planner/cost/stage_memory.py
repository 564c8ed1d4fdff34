"""Memory of one stage, by class.

When most micro-batches are under way (how many, the schedule's record says), a stage keeps for each of them its inputs,
what its kept layers save for the backward pass, and what crosses each boundary next to a recomputed segment. Beside
that it holds the values of one segment at a time.

A stage that keeps everything, or is one segment, is counted exactly (`planner.cost.stage_bytes`). With other segments
layers count one by one, which is never less: what each keeps, and the largest of their temporaries.

What a segment hands to a kept layer counts, too: a layer's `kept_bytes` leave out its inputs, because they belong to
the layer that created them, and where that one is recomputed nobody has counted them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.layer_costs import CostModel, Floats, LayerArrays, ParameterRanges
from planner.cost.messages import Message
from planner.plan.micro_batches import MicroBatches
from planner.plan.plan import Segment, StageMemory
from planner.plan.schedules import ScheduleName
from profiler.device import Device
from profiler.record import OptimizerCost


@dataclass(frozen=True, slots=True, eq=False)
class StageSkips:
    """What comes to a stage, leaves it and goes past it other than from neighbour to neighbour.

    Attributes:
        incoming: messages from stages before its neighbour.
        outgoing: messages to stages behind its neighbour.
        past: bytes of outputs that go past it, and of their gradients, for a large and for a small micro-batch.
    """

    incoming: tuple[Message, ...] = ()
    outgoing: tuple[Message, ...] = ()
    past: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))


NO_SKIPS = StageSkips()


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
    skips: StageSkips = NO_SKIPS,
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
        skips: of the values alive at its boundaries those that do not come from, or go to, its neighbours.
    """
    profile = costs.profile
    large, small = (
        _without(costs.layers(device.kind, size), range(max(0, first - 1), stop), past)
        for size, past in zip((micro_batches.largest, micro_batches.smallest), skips.past, strict=True)
    )
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
    incoming, outgoing = [*skips.incoming], [*skips.outgoing]
    if first > 0:
        incoming.append(Message.behind(large, small).at(first - 1).less(skips.incoming))
    if stop < len(large.output_bytes):
        outgoing.append(Message.behind(large, small).at(stop - 1).less(skips.outgoing))
    under_way = sum(float(message.at_receiver(schedule, micro_batches, number)) for message in incoming)
    under_way += sum(float(message.at_sender(micro_batches)) for message in outgoing)
    return StageMemory(
        parameters=int(parameters.unique[first, stop] + parameters.buffers[first, stop]),
        gradients=int(parameters.gradients[first, stop]),
        optimizer=int(np.ceil(optimizer.state_bytes_per_byte * parameters.trainable[first, stop])),
        activations=int(entering[first] + micro_batches.batch_size * profile.input_bytes + held),
        transient=int(peak),
        receive_buffers=int(under_way),
        reserve=profile.reserve_bytes,
    )


def temporary_bytes(large: LayerArrays, small: LayerArrays) -> Floats:
    """What each layer needs beside what is kept, at most, shape (L,)."""
    most: Floats = np.maximum(
        large.transient_bytes + large.workspace_bytes, small.transient_bytes + small.workspace_bytes
    )
    return most


def _without(layers: LayerArrays, at: range, past: tuple[float, float]) -> LayerArrays:
    """The costs without outputs and gradients, of so many bytes behind each of these layers, that go past a stage."""
    if not past[0]:
        return layers
    outputs, gradients = layers.output_bytes.copy(), layers.output_gradient_bytes.copy()
    outputs[at.start : at.stop] -= past[0]
    gradients[at.start : at.stop] -= past[1]
    # bytes between measured sizes are rounded up one by one, so parts can be a byte more than the whole
    return replace(layers, output_bytes=np.maximum(outputs, 0.0), output_gradient_bytes=np.maximum(gradients, 0.0))


def behind_boundary(layer_bytes: Floats) -> Floats:
    """Bytes at boundary i, between layers i - 1 and i, shape (L + 1,); 0 at both ends of the model."""
    at_boundary = np.zeros(len(layer_bytes) + 1)
    at_boundary[1:-1] = layer_bytes[:-1]
    return at_boundary
