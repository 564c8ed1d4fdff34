"""What a row of the memory ledger is: of what it is, how often and when it counts, and what its figure reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import NamedTuple

from planner.cost.layer_costs import CostModel, Floats, Indices, LayerArrays, Range
from planner.cost.messages import Carrier, Message
from planner.cost.parameter_ranges import ParameterRanges
from planner.plan.actions import AHEAD_BYTES
from planner.plan.held import Held
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring, ScheduleName
from profiler.record import OptimizerCost


class Of(Enum):
    """Of which layers or boundaries of a stage a row is, and so the shape of its figure."""

    STAGE = auto()
    """The stage, whatever its layers: one number. A rank with several chunks has it once."""
    WHOLE = auto()
    """Its layers as a whole, in the forms `KEPT` and `AS_ONE`: one number, for `Figures.layers_of_stage`."""
    LAYERS = auto()
    """Each of its layers: an array of shape (L,)."""
    KEPT_LAYERS = auto()
    """Each layer that no segment recomputes, likewise."""
    SEGMENT = auto()
    """Each layer of one segment, likewise; the segment that needs most counts."""
    FIRST_BOUNDARY = auto()
    """Where it begins, if not with the model: an array of shape (L,) with what lies after each layer."""
    LAST_BOUNDARY = auto()
    """Where it ends, if not with the model, likewise."""
    SEGMENT_EDGES = auto()
    """Each boundary inside the stage next to a segment, likewise."""


class Counts(Enum):
    """How often a row counts."""

    ONCE = auto()
    """Once, with the larger of the figures for a large and a small micro-batch."""
    IN_FLIGHT = auto()
    """For each micro-batch in flight, of its own size; how many, the schedule's record says."""
    WAITING = auto()
    """For each micro-batch that waits for the gradients of its parameters, of its own size; how many, likewise."""
    DEFERRING = auto()
    """While a micro-batch goes back, in schedules that split the backward pass: of the layers that it has come through,
    in place of what it kept of these; see `planner.cost.stage_memory`."""
    MAKING_WEIGHTS = auto()
    """In a pass of weights: of the layer that it is in."""
    GOING_ON = auto()
    """While a micro-batch goes forward through a stage that is recomputed as a whole: of the layer that it is in."""
    UNDER_WAY = auto()
    """For the messages under way at a boundary; how many, the figure says."""
    TRANSIENT = auto()
    """For a moment: the largest one, of the layers or segments that it is of, counts in addition to all else."""


class When(Enum):
    """When a row of what layers hold together counts."""

    ALWAYS = auto()
    """All along."""
    AT_END = auto()
    """After the last backward pass alone, when nothing is there that follows from micro-batches: the larger of both
    counts, see `planner.cost.stage_memory`."""
    WEIGHTS = auto()
    """In passes of weights alone, for a moment."""


class Form(Flag):
    """What a stage does about recompute."""

    KEPT = auto()
    """Nothing."""
    AS_ONE = auto()
    """All of it is one segment."""
    IN_PARTS = auto()
    """Some layers are kept, or there is more than one segment."""
    RECOMPUTES = AS_ONE | IN_PARTS
    ANY = KEPT | AS_ONE | IN_PARTS


class Replicas(NamedTuple):
    """How many replicas there are, and whether they share the optimizer's state."""

    number: int = 1
    sharing: bool = False

    @property
    def shares(self) -> int:
        """Parts of the optimizer's state: 1 where each replica has all of it."""
        return self.number if self.sharing else 1


ONE_REPLICA = Replicas()


@dataclass(frozen=True, slots=True, eq=False)
class RangeFigures:
    """What a `RangeRow`'s figure reads.

    Attributes:
        parameters: bytes of the parameters of every range.
        stage: index of these bytes.
        state: bytes that one replica's optimizer keeps there.
        replicas: of the stage.
    """

    parameters: ParameterRanges
    stage: Range
    state: Floats
    replicas: Replicas


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """What all stages of a plan on one kind of device have in common.

    Attributes:
        costs: of the layers.
        parameters: bytes of the parameters of every range.
        device_kind: selects the costs.
        optimizer: what it keeps there.
        schedule: says how many micro-batches are in flight.
        micro_batches: how a replica's samples are cut.
        ahead_bytes: see `Message`.
        ring: ranks, and chunks of each.
        held: what is, at the moments that are looked at, where several might need most; by default as many in flight as
            ever are.
        replicas: of each stage.
        carrier: what carries messages.
        under_way: micro-batches in flight at most, by number of the stage from the end less 1; empty where the
            schedule's record says it.
    """

    costs: CostModel
    parameters: ParameterRanges
    device_kind: str
    optimizer: OptimizerCost
    schedule: ScheduleName
    micro_batches: MicroBatches
    ahead_bytes: int = AHEAD_BYTES
    ring: Ring = ONE_CHUNK
    held: tuple[Held, ...] = ()
    replicas: Replicas = ONE_REPLICA
    carrier: Carrier = Carrier.POSTED
    under_way: tuple[int, ...] = ()

    def of_ranges(self, stage: Range) -> RangeFigures:
        """What rows of ranges read for these layers."""
        state = self.parameters.state(self.optimizer, self.replicas.shares, stage)
        return RangeFigures(self.parameters, stage, state, self.replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What a `Row`'s figure reads.

    Attributes:
        basis: the kind of device, the schedule and the cut of the mini-batch.
        size: samples of one micro-batch.
        layers: what all layers cost at that size.
        message: what crosses a boundary, or, in one value, what crosses after each layer.
        number: of the stage from the end, 1 for the last.
        layers_of_stage: the range of the one stage that is asked for, for rows of `Of.WHOLE`.
        flying: micro-batches in flight at each of the basis's moments; None where it has none.
    """

    basis: Basis
    size: int
    layers: LayerArrays
    message: Message
    number: int
    layers_of_stage: tuple[int, int] = (0, 0)
    flying: Indices | None = None

    @property
    def whole(self) -> tuple[float, float]:
        """What one micro-batch keeps of that stage, and the most that it has at any moment."""
        return self.basis.costs.stage(self.basis.device_kind, self.size, *self.layers_of_stage)

    @property
    def keeps_all(self) -> bool:
        """Whether the inputs of all micro-batches are kept."""
        return SCHEDULES[self.basis.schedule].keeps_all

    @property
    def in_flight(self) -> int | Indices:
        """How many micro-batches are, at each moment."""
        basis = self.basis
        if self.flying is not None:
            return self.flying
        return sum(basis.micro_batches.in_flight(basis.schedule, self.number, basis.ring))

    def most_under_way(self, before: int = 0) -> int:
        """Micro-batches in flight at most at the stage, or at one so many stages before it."""
        basis, number = self.basis, self.number + before
        if basis.under_way:
            return basis.under_way[min(number, len(basis.under_way)) - 1]
        return SCHEDULES[basis.schedule].most_under_way(number, basis.micro_batches.count, basis.ring)


@dataclass(frozen=True, slots=True)
class RangeRow:
    """A term of what layers hold together, once, whatever the micro-batches.

    Attributes:
        name: of the term, for people.
        memory_class: field of `planner.plan.stage.StageMemory` that it belongs to.
        figure: bytes of a range, or at [i, j] of all ranges; no less for a range that contains another.
        when: it counts.
    """

    name: str
    memory_class: str
    figure: Callable[[RangeFigures], Floats]
    when: When = When.ALWAYS


@dataclass(frozen=True, slots=True)
class Row:
    """Any other term.

    Attributes:
        name: of the term, for people.
        memory_class: field of `planner.plan.stage.StageMemory` that it belongs to; `transient` for a transient one.
        of: layers or boundaries, and so the figure's shape.
        counts: how often.
        figure: bytes for one micro-batch of one size; see `Of` for the shape.
        forms: of a stage in which it counts; other than any for rows of layers or of the whole stage alone.
    """

    name: str
    memory_class: str
    of: Of
    counts: Counts
    figure: Callable[[Figures], Floats | float]
    forms: Form = Form.ANY

    def __post_init__(self) -> None:
        possible = _MOMENTS if self.counts is Counts.TRANSIENT else _LASTING
        if self.forms not in possible.get(self.of, ()):
            raise ValueError(f"no sum is made of a row that is of {self.of}, counts {self.counts}, in {self.forms}")
        if (self.memory_class == "transient") != (self.counts in {Counts.TRANSIENT, *ON_THE_WAY}):
            raise ValueError(f"{self.name!r} counts {self.counts} and belongs to {self.memory_class}")


ON_THE_WAY = {Counts.DEFERRING, Counts.MAKING_WEIGHTS, Counts.GOING_ON}
"""Follow from where a micro-batch is, see `planner.cost.stage_memory`."""
_EVERY = (Form.ANY,)
_LASTING = {
    Of.STAGE: _EVERY,
    Of.WHOLE: (Form.KEPT,),
    Of.LAYERS: (Form.ANY, Form.KEPT, Form.RECOMPUTES),
    Of.KEPT_LAYERS: (Form.ANY, Form.KEPT, Form.IN_PARTS),
    Of.FIRST_BOUNDARY: _EVERY,
    Of.LAST_BOUNDARY: _EVERY,
    Of.SEGMENT_EDGES: (Form.ANY, Form.IN_PARTS),
}
_MOMENTS = {
    Of.WHOLE: (Form.KEPT, Form.AS_ONE),
    Of.LAYERS: (Form.ANY, Form.KEPT, Form.AS_ONE, Form.IN_PARTS, Form.RECOMPUTES),
    Of.SEGMENT: (Form.IN_PARTS,),
}
"""The forms in which rows may count that last, and rows that are there for a moment: the search has sums for these."""
