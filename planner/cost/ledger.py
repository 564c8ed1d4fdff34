"""The one ledger of a stage's memory: each term is one row of `ROWS`, and all that counts bytes reads the rows.

A row says what it is, of which layers or boundaries, how it counts, and which figure of the profile it takes. A term
more is a row more: the report (`planner.cost.stage_memory`), the sums that the compiled search adds up
(`planner.cost.stage_sums`), the bounds, what a message says when nothing fits and the memory over time follow.

    Row("random states", "activations", Of.LAYERS, Counts.IN_FLIGHT, lambda at: at.layers.random_state_bytes)

What may stand in a row, `planner.cost.ledger_rows` says.

A stage takes one of three forms, and rows may count in some of them alone. One that recomputes nothing, or all of its
layers as one segment, is measured as a whole (`planner.cost.stage_bytes`). In any other layers count one by one, which
is never less: what each keeps, and the largest of their temporaries.

The search reads all rows as sums but those of stages measured as a whole: what one micro-batch keeps of layers [i, j),
and the most that it has, are measured for a few sizes, and matrices over all i and j for every other size would be made
for stages that are mostly never looked at. So the compiled search finds these two between the measured sizes where it
needs them, and has the three rows that are made of them written out; a fourth is refused (`planner.cost.stage_sums`).
Seconds have a ledger of their own, `planner.cost.time_ledger`.

Where passes of several kinds come at moments of their own (`planner.plan.held`), each counts what it has itself: a
forward pass of a recomputed stage one layer at a time, a pass of weights the gradient of one parameter.

What a segment hands to a kept layer counts, too: a layer's `kept_bytes` leave out its inputs, because they belong to
the layer that created them, and where that one is recomputed nobody has counted them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays
from planner.cost.ledger_rows import ON_THE_WAY, Basis, Counts, Figures, Form, Of, RangeFigures, RangeRow, Row, When
from planner.cost.messages import Message
from planner.plan.schedules import SCHEDULES
from planner.plan.shares import BUCKET_BYTES


def _exchanged_at_a_time(at: RangeFigures) -> Floats:
    """What goes out in a bucket, and what comes in; where each steps a share, all have as much as the largest."""
    number, shares = at.replicas.number, at.replicas.shares
    own = shares * at.parameters.stepped(shares) if shares > 1 else at.parameters.gradients
    return 2 * np.minimum(own[at.stage], BUCKET_BYTES) * (number > 1)


WHOLE_ROWS = (
    Row("saved by the stage", "activations", Of.WHOLE, Counts.IN_FLIGHT, lambda at: at.whole[0], Form.KEPT),
    Row(
        "most of one micro-batch in addition to what it saves",
        "transient",
        Of.WHOLE,
        Counts.TRANSIENT,
        lambda at: at.whole[1] - at.whole[0],
        Form.KEPT,
    ),
    Row(
        "most of one recomputed micro-batch",
        "transient",
        Of.WHOLE,
        Counts.TRANSIENT,
        lambda at: at.whole[1],
        Form.AS_ONE,
    ),
)
"""All rows of `Of.WHOLE`: `planner.kernel.tables.stage_needs` has these three written out, see above."""

ROWS: tuple[RangeRow | Row, ...] = (
    RangeRow("parameters", "parameters", lambda at: at.parameters.unique[at.stage]),
    RangeRow("buffers", "parameters", lambda at: at.parameters.buffers[at.stage]),
    RangeRow("gradients", "gradients", lambda at: at.parameters.gradients[at.stage]),
    RangeRow("master weights", "optimizer", lambda at: at.parameters.masters[at.stage]),
    RangeRow("state of the optimizer", "optimizer", lambda at: np.ceil(at.state)),
    RangeRow(
        "gradients cast for the optimizer",
        "gradients",
        lambda at: np.maximum(at.parameters.stepped_gradients[at.stage] - at.parameters.gradients[at.stage], 0.0),
        when=When.AT_END,
    ),
    RangeRow(
        "what replicas sum or exchange at a time",
        "gradients",
        _exchanged_at_a_time,
        when=When.AT_END,
    ),
    RangeRow(
        "gradient of a parameter, before it is added",
        "transient",
        lambda at: at.parameters.largest_gradient[at.stage],
        when=When.WEIGHTS,
    ),
    Row(
        "inputs of the model",
        "activations",
        Of.STAGE,
        Counts.ONCE,
        lambda at: at.basis.micro_batches.batch_size * at.basis.costs.profile.input_bytes,
    ),
    Row("inputs of the stage", "activations", Of.FIRST_BOUNDARY, Counts.IN_FLIGHT, lambda at: at.layers.output_bytes),
    WHOLE_ROWS[0],
    Row(
        "saved by kept layers",
        "activations",
        Of.KEPT_LAYERS,
        Counts.IN_FLIGHT,
        lambda at: at.layers.kept_bytes - at.layers.held_bytes,
        Form.IN_PARTS,
    ),
    Row(
        "kept until the end of the step, recomputed or not",
        "activations",
        Of.LAYERS,
        Counts.IN_FLIGHT,
        lambda at: at.layers.held_bytes,
        Form.RECOMPUTES,
    ),
    Row(
        "inputs and outputs of segments",
        "activations",
        Of.SEGMENT_EDGES,
        Counts.IN_FLIGHT,
        lambda at: at.layers.output_bytes,
        Form.IN_PARTS,
    ),
    Row(
        "kept for the gradients of parameters",
        "deferred",
        Of.LAYERS,
        Counts.WAITING,
        lambda at: at.layers.weight_kept_bytes,
    ),
    Row(
        "begun to be kept for the gradients of parameters",
        "transient",
        Of.LAYERS,
        Counts.DEFERRING,
        lambda at: at.layers.weight_kept_bytes,
    ),
    *WHOLE_ROWS[1:],
    Row(
        "values of a segment",
        "transient",
        Of.SEGMENT,
        Counts.TRANSIENT,
        lambda at: at.layers.kept_bytes,
        Form.IN_PARTS,
    ),
    Row(
        "temporaries",
        "transient",
        Of.LAYERS,
        Counts.TRANSIENT,
        lambda at: at.layers.transient_bytes + at.layers.workspace_bytes,
        Form.IN_PARTS,
    ),
    Row(
        "inside kernels that make gradients of parameters",
        "transient",
        Of.LAYERS,
        Counts.MAKING_WEIGHTS,
        lambda at: at.layers.workspace_bytes * (at.layers.weight_kept_bytes > 0),
    ),
    Row(
        "a layer of a recomputed stage, on the way forward",
        "transient",
        Of.LAYERS,
        Counts.GOING_ON,
        lambda at: at.layers.kept_bytes + at.layers.transient_bytes + at.layers.workspace_bytes,
    ),
    Row(
        "messages under way before the stage",
        "receive_buffers",
        Of.FIRST_BOUNDARY,
        Counts.UNDER_WAY,
        lambda at: at.message.at_receiver(
            at.most_under_way(at.message.distance), at.basis.micro_batches, at.in_flight, keeps_all=at.keeps_all
        ),
    ),
    Row(
        "messages under way after the stage",
        "receive_buffers",
        Of.LAST_BOUNDARY,
        Counts.UNDER_WAY,
        lambda at: at.message.at_sender(at.most_under_way(), at.basis.micro_batches.count),
    ),
    Row("process and allocator", "reserve", Of.STAGE, Counts.ONCE, lambda at: at.basis.costs.profile.reserve_bytes),
)


def range_rows(when: When = When.ALWAYS) -> Iterator[RangeRow]:
    """The rows of what layers hold together that count then."""
    return (row for row in ROWS if isinstance(row, RangeRow) and row.when is when)


def whole_rows() -> Iterator[Row]:
    """The rows of the stage as a whole."""
    return (row for row in ROWS if isinstance(row, Row) and row.of is Of.WHOLE)


@cache
def rows_of(*of: Of, form: Form = Form.ANY, transient: bool = False) -> tuple[Row, ...]:
    """The rows of these layers or boundaries that count in (all of) a form: transient ones, or such as last."""
    rows = [row for row in ROWS if isinstance(row, Row) and row.of in of and row.forms & form == form]
    rows = [row for row in rows if row.counts not in ON_THE_WAY]
    return tuple(row for row in rows if (row.counts is Counts.TRANSIENT) == transient)


def classes_that_count(counts: Counts) -> set[str]:
    """The fields of `planner.plan.stage.StageMemory` that have a row which counts so."""
    return {row.memory_class for row in ROWS if isinstance(row, Row) and row.counts is counts}


class Ledger:
    """The rows, counted for stages of one basis.

    Args:
        basis: kind of device, schedule and cut of the mini-batch.
        numbers: of the stages from the end; 1 for the last. Where the basis has moments, one.
        sized: the layers' costs for a large and for a small micro-batch, where not the basis's own.
        layers_of_stage: see `Figures`.

    Attributes:
        message: what crosses after each layer.
        in_flight: how many micro-batches of the larger and of the smaller size are, a row for each number or moment.
        waiting: how many wait for the gradients of their parameters, likewise.
        kinds: of the pass of each moment; empty where the basis has none.
        large: what rows read for a large micro-batch.
        small: and for a small one.
    """

    def __init__(
        self,
        basis: Basis,
        numbers: Sequence[int] = (1,),
        sized: tuple[LayerArrays, LayerArrays] | None = None,
        layers_of_stage: tuple[int, int] = (0, 0),
    ) -> None:
        split = basis.micro_batches
        sizes = split.largest, split.smallest
        large, small = sized or [basis.costs.layers(basis.device_kind, size) for size in sizes]
        message = self.message = Message.after_layers(large, small, basis.ahead_bytes, basis.carrier, basis.ring)
        self._numbers = numbers
        self._splits = SCHEDULES[basis.schedule].splits_backward
        self.kinds = np.array([held.kind for held in basis.held], dtype=np.intp)
        flying = None
        if basis.held:
            held = np.array([(held.flying, held.waiting) for held in basis.held])
            large_ones = np.minimum(held, split.number_largest)
            by_size = np.stack([large_ones, held - large_ones], axis=2, dtype=np.float64)
            self.in_flight, self.waiting = by_size[:, 0], by_size[:, 1]
            flying = held[:, 0]
        else:
            in_flight = [split.in_flight(basis.schedule, number, basis.ring) for number in numbers]
            self.in_flight = np.array(in_flight, dtype=np.float64)
            self.waiting = np.zeros_like(self.in_flight)
        self.large = self.small = Figures(basis, sizes[0], large, message, numbers[0], layers_of_stage, flying)
        if not split.equal:
            self.small = replace(self.large, size=sizes[1], layers=small)

    def counted_of(self, row: Row, places: Sequence[int]) -> Floats:
        """The bytes of a row that does not count messages, of some layers together: as `counted`, without their axis.

        Args:
            row: which.
            places: the layers, or the layers before boundaries.
        """
        if row.counts not in {Counts.IN_FLIGHT, Counts.WAITING}:
            once: Floats = np.atleast_1d(self.moments(row)[list(places)].sum())
            return once
        many, few = (self.in_flight if row.counts is Counts.IN_FLIGHT else self.waiting).T
        large, small = (np.asarray(row.figure(at))[list(places)].sum() for at in (self.large, self.small))
        of_each: Floats = many * large + few * small
        return of_each

    def counted(self, row: Row, message: Message | None = None) -> Floats:
        """Bytes of a row that lasts: those of its figure, one axis in front for the stages' numbers, or for moments.

        The axis has length 1 where they make no difference.

        Args:
            row: which.
            message: what crosses a boundary, where it is not what follows from the costs; one where there are moments.
        """
        if row.counts is Counts.UNDER_WAY:
            at = replace(self.large, message=message or self.message)
            if at.flying is not None:
                return np.atleast_1d(np.asarray(row.figure(at), dtype=np.float64))
            figures = [row.figure(replace(at, number=number)) for number in self._numbers]
            return np.stack([np.asarray(figure, dtype=np.float64) for figure in figures])
        if row.counts in {Counts.IN_FLIGHT, Counts.WAITING}:
            many, few = (self.in_flight if row.counts is Counts.IN_FLIGHT else self.waiting).T
            large, small = row.figure(self.large), row.figure(self.small)
            if isinstance(large, np.ndarray):
                many, few = many[:, None], few[:, None]
            of_each: Floats = many * large + few * small
            return of_each
        return self.moments(row)[None]

    def begun(self) -> Floats:
        """Bytes of each layer that a micro-batch begins to keep when it has come back through it, shape (L,)."""
        return self._on_the_way(Counts.DEFERRING) * self._splits

    def making_weights(self, first: int, stop: int) -> float:
        """Bytes that a pass of weights of layers [first, stop) has for a moment."""
        figures = self.large.basis.of_ranges((first, stop))
        gradients = sum(row.figure(figures) for row in range_rows(When.WEIGHTS))
        return float(gradients + self._on_the_way(Counts.MAKING_WEIGHTS)[first:stop].max())

    def going_on(self) -> Floats:
        """Bytes of each layer that a micro-batch has in it alone if nothing is kept, but what comes in; shape (L,)."""
        return self._on_the_way(Counts.GOING_ON)

    def _on_the_way(self, counts: Counts) -> Floats:
        rows = [row for row in ROWS if isinstance(row, Row) and row.counts is counts]
        return np.zeros(self.layers) + sum(self.moments(row) for row in rows)

    def moments(self, row: Row) -> Floats:
        """Bytes of a transient row, or one that counts once: those of its figure, for the size that has more."""
        large, small = row.figure(self.large), row.figure(self.small)
        if isinstance(large, np.ndarray):
            larger: Floats = np.maximum(large, small)
            return larger
        return np.array(max(large, small), dtype=np.float64)

    @property
    def layers(self) -> int:
        """L, of the model."""
        return len(self.large.layers.kept_bytes)
