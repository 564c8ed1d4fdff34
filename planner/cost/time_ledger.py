"""The one ledger of a step's time: each term is one row, and all that adds up seconds reads the rows.

    PassRow("forward pass", Pass.FORWARD, lambda layers: layers.forward_s)

The passes of a stage take the sum of `PASS_ROWS` over its layers, recompute over those of its segments; a message takes
the sum of `MESSAGE_ROWS`, between neighbours and past them; and at the end of the step a stage takes the sum of
`END_ROWS`. The report and the simulator (`planner.solve.balancer.stage_seconds`), the search's arrays
(`planner.solve.tables`) and the bounds (`planner.solve.work_bound`) follow.

Of a message its ends may copy a share each (`planner.cost.transfers`): that counts with their passes, and not with the
link. Three things are no rows. How long stages wait for each other is no term of a stage: it follows from the schedule
(`planner.kernel.makespan`). Whether a segment is recomputed once less, at the turn or where a backward pass follows its
forward pass, is a rule of the schedule about one row. And gaps between kernels are in the layers' measured seconds
(`planner.cost.next_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

import numpy as np

from planner.cost.layer_costs import CostModel, Floats, LayerArrays, LayerSeconds
from profiler.device import Link
from profiler.record import OptimizerCost


class Pass(Enum):
    """What a stage computes for each micro-batch."""

    FORWARD = auto()
    RECOMPUTE = auto()
    BACKWARD = auto()
    WEIGHTS = auto()
    """The part of the backward pass that schedules which split it take apart."""
    SPLIT = auto()
    """What that part takes in addition, if it is taken apart."""


@dataclass(frozen=True, slots=True)
class PassRow:
    """A term of a pass.

    Attributes:
        name: of the term, for people.
        of: which pass.
        figure: seconds of each layer for one micro-batch, shape (L,).
    """

    name: str
    of: Pass
    figure: Callable[[LayerArrays], Floats]


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A term of a message; an empty one is not sent.

    Attributes:
        name: of the term, for people.
        figure: seconds of messages of so many bytes over a link, one number or one for each.
    """

    name: str
    figure: Callable[[Link, Floats], Floats | float]


@dataclass(frozen=True, slots=True)
class EndFigures:
    """What an `EndRow`'s figure reads.

    Attributes:
        optimizer: what a step of it costs on the stage's device.
        link: between replicas; may be None for one.
        replicas: R.
        gradient_share: bytes of gradients as replicas exchange them, for each byte that the optimizer steps.
        shares: replicas that share the optimizer's state.
    """

    optimizer: OptimizerCost
    link: Link | None
    replicas: int
    gradient_share: float = 1.0
    shares: int = 1


@dataclass(frozen=True, slots=True)
class EndRow:
    """A term of what a stage with trainable parameters does after its last pass.

    Attributes:
        name: of the term, for people.
        field: of `planner.plan.stage.Stage` that it belongs to.
        figure: seconds for a stage, and more for each byte of its trainable parameters; in `optimizer_s` of those that
            one replica steps.
    """

    name: str
    field: Literal["all_reduce_s", "optimizer_s"]
    figure: Callable[[EndFigures], tuple[float, float]]


def _ring(at: EndFigures) -> tuple[float, float]:
    """A ring moves 2 (R - 1) / R of the bytes over each link, in 2 (R - 1) messages.

    Patarasuk and Yuan, JPDC 2009. Half of that, where each replica needs the sums of what it steps alone.
    """
    rounds = 1 if at.shares > 1 else 2
    return rounds * _round(at)[0], rounds * at.gradient_share * _round(at)[1]


def _gather(at: EndFigures) -> tuple[float, float]:
    """The other half, of parameters, where each replica has stepped its own."""
    return _round(at) if at.shares > 1 else (0.0, 0.0)


def _round(at: EndFigures) -> tuple[float, float]:
    """A share of what all have, or all have a share of, goes once around."""
    if at.replicas == 1 or at.link is None:
        return 0.0, 0.0
    messages = at.replicas - 1
    return messages * at.link.latency_s, messages / at.replicas / at.link.bytes_per_s


def _off_the_line(link: Link, size_bytes: Floats) -> Floats | float:
    if not link.measured:
        return 0.0
    line = link.model_copy(update={"measured": ()})
    flat = [link.transfer_s(size) - line.transfer_s(size) for size in np.ravel(size_bytes)]
    return np.reshape(np.array(flat, dtype=np.float64), np.shape(size_bytes))


PASS_ROWS: tuple[PassRow, ...] = (
    PassRow("forward pass", Pass.FORWARD, lambda layers: layers.forward_s),
    PassRow("recompute", Pass.RECOMPUTE, lambda layers: layers.recompute_s),
    PassRow("backward pass", Pass.BACKWARD, lambda layers: layers.backward_s),
    PassRow("gradients of parameters, of the backward pass", Pass.WEIGHTS, lambda layers: layers.weight_s),
    PassRow("two backward passes in place of one", Pass.SPLIT, lambda layers: layers.split_s),
)
MESSAGE_ROWS: tuple[MessageRow, ...] = (
    MessageRow("latency", lambda link, size_bytes: link.latency_s),
    MessageRow("bytes on their way", lambda link, size_bytes: size_bytes / link.bytes_per_s),
    MessageRow("what was measured, less this line, where it is not near", _off_the_line),
)
END_ROWS: tuple[EndRow, ...] = (
    EndRow("step of the optimizer", "optimizer_s", lambda at: (0.0, at.optimizer.seconds_per_byte)),
    EndRow("mean of the replicas' gradients", "all_reduce_s", _ring),
    EndRow("parameters that other replicas stepped", "all_reduce_s", _gather),
)


def layer_seconds(costs: CostModel, device_kind: str, micro_batch_size: int) -> LayerSeconds:
    """The passes of each layer; added up once for a kind of device and a size.

    Raises:
        ProfileError: the size lies outside the measured ones, or nothing was measured on that kind of device.
    """
    key = device_kind, micro_batch_size
    if key not in costs.seconds:
        layers = costs.layers(device_kind, micro_batch_size)
        none = np.zeros_like(layers.forward_s)
        costs.seconds[key] = LayerSeconds(
            *(sum((row.figure(layers) for row in PASS_ROWS if row.of is of), start=none) for of in Pass)
        )
    return costs.seconds[key]


def message_s(link: Link | None, size_bytes: Floats) -> Floats:
    """Seconds of messages of so many bytes; an empty one is not sent."""
    none = np.zeros_like(size_bytes)
    if link is None:
        return none
    sent: Floats = np.where(
        size_bytes > 0, sum((row.figure(link, size_bytes) for row in MESSAGE_ROWS), start=none), none
    )
    return sent


def end_s(at: EndFigures) -> dict[str, tuple[float, float]]:
    """For each field what a stage takes at the end of a step, and more for each byte, see `EndRow`."""
    found = dict.fromkeys(("optimizer_s", "all_reduce_s"), (0.0, 0.0))
    for row in END_ROWS:
        fixed_s, byte_s = row.figure(at)
        found[row.field] = found[row.field][0] + fixed_s, found[row.field][1] + byte_s
    return found
