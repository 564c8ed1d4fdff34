"""Memory of one stage, by class, as the rows of `planner.cost.ledger` say it: what a plan reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict, Unpack

import numpy as np

from planner.cost.layer_costs import CostModel, Floats, LayerArrays
from planner.cost.ledger import Ledger, range_rows, rows_of
from planner.cost.ledger_rows import ONE_REPLICA, Basis, Counts, Form, Of, Replicas, Row, When
from planner.cost.messages import Carrier, Message, carrier_of
from planner.cost.parameter_ranges import ParameterRanges
from planner.plan.held import Held
from planner.plan.micro_batches import MicroBatches
from planner.plan.orders import PassKind
from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring, ScheduleName
from planner.plan.stage import Segment, StageMemory
from profiler.device import Device
from profiler.record import OptimizerCost


@dataclass(frozen=True, slots=True, eq=False)
class StageSkips:
    """What comes to a stage, leaves it and goes past it other than from neighbour to neighbour.

    Attributes:
        incoming: messages from stages before its neighbour.
        outgoing: messages to stages after its neighbour.
        past: bytes of outputs that go past it, and of their gradients, for a large and for a small micro-batch.
    """

    incoming: tuple[Message, ...] = ()
    outgoing: tuple[Message, ...] = ()
    past: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))


NO_SKIPS = StageSkips()


class StageAbout(TypedDict):
    """Which stage it is.

    Attributes:
        number: from the end, 1 for the last.
        first: of its layers.
        stop: after its layers.
        segments: what is recomputed.
        skips: of the values alive at its boundaries those that do not come from, or go to, its neighbours.
        ring: ranks, and chunks of each.
        held: micro-batches in flight and waiting, at all moments that may need most; by default as the schedule's
            record has it.
        replicas: of the stage.
        carrier: what carries messages; by default what does so on one host.
        under_way: see `planner.cost.ledger_rows.Basis`.
    """

    number: int
    first: int
    stop: int
    segments: Sequence[Segment]
    skips: NotRequired[StageSkips]
    ring: NotRequired[Ring]
    held: NotRequired[Sequence[Held]]
    replicas: NotRequired[Replicas]
    carrier: NotRequired[Carrier]
    under_way: NotRequired[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class StageMoments:
    """Bytes of a stage at one or several moments.

    Attributes:
        classes: by field of `StageMemory`, one number for all moments or one for each.
        at_hand: of messages under way those bytes that are there while the stage computes.
    """

    classes: Mapping[str, Floats]
    at_hand: float = 0.0

    @property
    def totals(self) -> Floats:
        """Of all classes together."""
        return np.array(sum(self.classes.values()))

    @property
    def passing(self) -> Floats:
        """The part of them that is there while the stage computes."""
        return self.classes["transient"] + self.at_hand

    @property
    def largest(self) -> StageMemory:
        """The moment at which all classes together need most."""
        return self.at(int(np.argmax(self.totals)))

    def at(self, moment: int) -> StageMemory:
        """One of the moments."""
        return StageMemory(**{name: int(kept[moment if len(kept) > 1 else 0]) for name, kept in self.classes.items()})


def together(chunks: Sequence[StageMoments], computing: Sequence[int]) -> StageMoments:
    """A rank's bytes at each moment, of which only the chunk that computes has what passes.

    Args:
        chunks: what each has at these moments.
        computing: which chunk that is, at each.
    """
    classes = {name: np.array(sum(chunk.classes[name] for chunk in chunks)) for name in StageMemory.model_fields}
    transient = [np.broadcast_to(chunk.classes["transient"], len(computing)) for chunk in chunks]
    classes["transient"] = np.array([transient[chunk][at] for at, chunk in enumerate(computing)])
    at_hand = np.array([chunk.at_hand for chunk in chunks])
    classes["receive_buffers"] = classes["receive_buffers"] - at_hand.sum() + at_hand[list(computing)]
    return StageMoments(classes)


def stage_memory(
    costs: CostModel,
    parameters: ParameterRanges,
    device: Device,
    schedule: ScheduleName,
    micro_batches: MicroBatches,
    optimizer: OptimizerCost,
    **about: Unpack[StageAbout],
) -> StageMemory:
    """Peak bytes of the stage of layers [first, stop), see `stage_moments`.

    Where the backward pass is split, the moment counts at which micro-batches in flight and waiting ones need most
    together.
    """
    return stage_moments(costs, parameters, device, schedule, micro_batches, optimizer, **about).largest


def stage_moments(
    costs: CostModel,
    parameters: ParameterRanges,
    device: Device,
    schedule: ScheduleName,
    micro_batches: MicroBatches,
    optimizer: OptimizerCost,
    **about: Unpack[StageAbout],
) -> StageMoments:
    """Bytes of the stage of layers [first, stop) at each moment.

    Of the chunks of a rank the first has what a process has once, whatever its layers.

    Args:
        costs: costs of the layers.
        parameters: bytes of the parameters of every range.
        device: its kind selects the costs.
        schedule: says how many micro-batches are under way.
        micro_batches: how a replica's samples are cut.
        optimizer: what the optimizer keeps.
        about: which stage.
    """
    number, first, stop, skips = about["number"], about["first"], about["stop"], about.get("skips", NO_SKIPS)
    ring = about.get("ring", ONE_CHUNK)
    basis = Basis(
        costs,
        parameters,
        device.kind,
        optimizer,
        schedule,
        micro_batches,
        ring=ring,
        held=tuple(about.get("held", ())) or SCHEDULES[schedule].held(number, micro_batches.count, ring),
        replicas=about.get("replicas", ONE_REPLICA),
        carrier=about.get("carrier", carrier_of(device)),
        under_way=about.get("under_way", ()),
    )
    large, small = (
        _without(costs.layers(device.kind, size), range(max(0, first - 1), stop), past)
        for size, past in zip((micro_batches.largest, micro_batches.smallest), skips.past, strict=True)
    )
    ledger, turns = Ledger(basis, (number,), (large, small), (first, stop)), _turns(number, ring)
    stage = _Stage(first, stop, about["segments"], ledger, skips, *turns)
    found = {name: np.zeros(1) for name in StageMemory.model_fields} | {"transient": stage.peaks()}
    figures = basis.of_ranges((first, stop))
    for range_row in range_rows():
        found[range_row.memory_class] = found[range_row.memory_class] + float(range_row.figure(figures))
    later_chunk = ring.chunks > 1 and number <= ring.ranks * (ring.chunks - 1)
    passing = found["transient"]
    for row in rows_of(*(of for of in Of if not (later_chunk and of is Of.STAGE)), form=stage.form):
        counted = stage.bytes_of(row)
        found[row.memory_class] = found[row.memory_class] + counted
        passing = passing + counted if row.of is not Of.STAGE else passing
    end_bytes = float(sum(end_row.figure(figures) for end_row in range_rows(When.AT_END)))
    if ring.chunks > 1:  # all chunks of a rank end together, and of their moments the largest counts
        found["gradients"] = found["gradients"] + end_bytes
    else:
        found["transient"] = found["transient"] + np.maximum(0.0, end_bytes - passing)
    return StageMoments(found, stage.at_hand())


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """Layers [first, stop) with these segments, and the rows that say what they take.

    At a turn (`planner.plan.schedules.Ring`) a message is handed over as it is. Each micro-batch in flight before the
    turn has there one thing of that length: an output that waits for the next chunk, that chunk's input, or the
    gradient that comes back. So the stage before it counts them all, with its row of inputs, and the one after it none.

    Attributes:
        after_turn: whether the stage before is on the same rank.
        before_turn: whether the next one is.
    """

    first: int
    stop: int
    segments: Sequence[Segment]
    ledger: Ledger
    skips: StageSkips
    after_turn: bool
    before_turn: bool

    @property
    def form(self) -> Form:
        if not self.segments:
            return Form.KEPT
        whole = (self.segments[0].first, self.segments[0].stop) == (self.first, self.stop)
        return Form.AS_ONE if whole else Form.IN_PARTS

    def bytes_of(self, row: Row) -> Floats:
        """What a row counts for it, at all moments or at each."""
        if row.counts is Counts.UNDER_WAY:
            messages = [self.ledger.counted(row, message) for message in self._messages(row.of)]
            return np.zeros(1) + sum(messages)
        if row.of in {Of.STAGE, Of.WHOLE}:
            return self.ledger.counted(row)
        return self.ledger.counted_of(row, self._places(row.of))

    def at_hand(self) -> float:
        """Of what the rows count for messages under way, the bytes that are there while it computes."""
        ends = ((Of.FIRST_BOUNDARY, False), (Of.LAST_BOUNDARY, True))
        messages = [(message, sender) for of, sender in ends for message in self._messages(of)]
        shared = [one.at_hand(sender=sender) for one, sender in messages if one.carrier is Carrier.SLOTS]
        return float(sum(shared))

    def _places(self, of: Of) -> list[int]:
        """The layers, or the layers before the boundaries, of which a row is."""
        if of is Of.FIRST_BOUNDARY:
            return [self.first - 1] * (self._follows and not self.after_turn) + [self.stop - 1] * self.before_turn
        if of is Of.LAST_BOUNDARY:
            return [self.stop - 1] if self._goes_on else []
        if of is Of.SEGMENT_EDGES:
            edges = {edge for segment in self.segments for edge in (segment.first, segment.stop)}
            return [edge - 1 for edge in edges if self.first < edge < self.stop]
        layers = list(range(self.first, self.stop))
        if of is Of.LAYERS:
            return layers
        recomputed = {layer for segment in self.segments for layer in range(segment.first, segment.stop)}
        return [layer for layer in layers if layer not in recomputed]

    def peaks(self) -> Floats:
        """The transient rows together, at each moment: the most in addition to all else."""
        begun, kinds = self._begun(), self.ledger.kinds
        weights = self.ledger.making_weights(self.first, self.stop) if begun[self.first] else 0.0
        forward = back = self._going_back(begun)
        if self.form is Form.AS_ONE:
            going_on = self.ledger.going_on()[self.first : self.stop]
            going_on[1:] += np.maximum(*self.ledger.message.outputs)[self.first : self.stop - 1]
            forward = min(back, float(going_on.max()))
        return np.array([forward, back, weights])[kinds if len(kinds) else [PassKind.BACKWARD]]

    def _going_back(self, begun: Floats) -> float:
        """The same of a backward pass, which has no less than a forward pass."""
        none = np.zeros(self.ledger.layers)

        def moments(of: Of) -> Floats:
            rows = rows_of(of, form=self.form, transient=True)
            return none + sum(self.ledger.moments(row) for row in rows)

        whole, layers, values = moments(Of.WHOLE)[0], moments(Of.LAYERS), moments(Of.SEGMENT)
        peak = float(whole + layers[self.first : self.stop].max())
        if self.form is not Form.IN_PARTS:
            return max(peak, self._on_the_way(begun) + float(layers[self.first : self.stop].max()))
        for segment in self.segments:
            # the last segment's values are there while the layers after it go back
            stop = self.stop if segment is self.segments[-1] else segment.stop
            held = values[segment.first : segment.stop].sum()
            peak = max(peak, held + (layers + begun)[segment.first : stop].max())
        kept = self._places(Of.KEPT_LAYERS)
        return max(peak, float((layers + begun)[kept].max(initial=0.0)))

    def _begun(self) -> Floats:
        """Bytes of layers that a micro-batch has come back through, while it is in a layer, that one's among them.

        In a schedule that splits the backward pass it keeps something of these until the gradients of their parameters
        are made.
        """
        begun = self.ledger.begun()
        inside = slice(self.first, self.stop)
        begun[inside] = begun[inside][::-1].cumsum()[::-1]
        return begun

    def _on_the_way(self, begun: Floats) -> float:
        """The largest moment of a micro-batch that goes back through a stage which is measured as a whole.

        In layer i it has no more than layers [first, i] have at any moment, with the gradients of what comes after i;
        and what it has begun to keep.
        """
        if not begun[self.first]:
            return 0.0
        received = np.maximum(*self.ledger.message.gradients)[self.first : self.stop].copy()
        received[-1] = 0.0  # counts as a message
        peak = 0.0
        for at in (self.ledger.large, self.ledger.small):
            most = at.basis.costs.most_to(at.basis.device_kind, at.size, self.first, self.stop)
            on_the_way = (most + received + begun[self.first : self.stop]).max()
            peak = max(peak, float(on_the_way) - (at.whole[0] if self.form is Form.KEPT else 0.0))
        return peak

    @property
    def _follows(self) -> bool:
        return self.first > 0

    @property
    def _goes_on(self) -> bool:
        return self.stop < self.ledger.layers

    def _messages(self, of: Of) -> list[Message]:
        """What crosses its first or its last boundary, and comes or goes further."""
        message, skips = self.ledger.message, self.skips
        if self.after_turn if of is Of.FIRST_BOUNDARY else self.before_turn:
            return []
        if of is Of.FIRST_BOUNDARY:
            near = [message.at(self.first - 1).less(skips.incoming)] if self._follows else []
            return [*(replace(skip, carrier=message.carrier, ring=message.ring) for skip in skips.incoming), *near]
        near = [message.at(self.stop - 1).less(skips.outgoing)] if self._goes_on else []
        return [*(replace(skip, carrier=message.carrier, ring=message.ring) for skip in skips.outgoing), *near]


def _turns(number: int, ring: Ring) -> tuple[bool, bool]:
    """Whether the stages before and after one, by its number from the end, are on its rank."""
    if ring.chunks == 1:
        return False, False
    stage, last = ring.stages - number, ring.stages - 1
    return stage > 0 and ring.is_turn(stage - 1), stage < last and ring.is_turn(stage)


def _without(layers: LayerArrays, at: range, past: tuple[float, float]) -> LayerArrays:
    """The costs without outputs and gradients, of so many bytes after each of these layers, that go past a stage."""
    if not past[0]:
        return layers
    outputs, gradients = layers.output_bytes.copy(), layers.output_gradient_bytes.copy()
    outputs[at.start : at.stop] -= past[0]
    gradients[at.start : at.stop] -= past[1]
    # bytes between measured sizes are rounded up one by one, so parts can be a byte more than the whole
    return replace(layers, output_bytes=np.maximum(outputs, 0.0), output_gradient_bytes=np.maximum(gradients, 0.0))
