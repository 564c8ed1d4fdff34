"""A program: the actions of one process for a batch of given sizes, with all that can be known before it comes.

Schedules, shapes and peers are the same in every step. They are worked out once and kept, so that a step only walks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from executor.layout import Layout
from executor.message import MessageForm, TensorSpec
from executor.rank_order import RECEIVES, SENDS, rank_lists
from executor.stage_runner import StageLayers
from executor.transport import Transfer
from planner.plan import Plan
from planner.schedule import Action, ActionKind, gpipe_schedule, make_schedule

_GRADIENTS = frozenset({ActionKind.RECV_B, ActionKind.SEND_B})
_COMPUTED = frozenset({ActionKind.F, ActionKind.R, ActionKind.B})


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A SEND or RECV action.

    Attributes:
        names: of the values that it moves, or whose gradients.
        specs: of what it moves, in this order.
        transfer: how.
        is_remote: whether the other end lies in another process.
        says_which: whether a mask of the gradients that exist leads the message.
    """

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    transfer: Transfer
    is_remote: bool
    says_which: bool


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One action with what it needs.

    Attributes:
        action: what is done.
        layers: of its stage.
        move: of a SEND or RECV.
        keep: of an F: whether it keeps what the last recomputed segment saves.
    """

    action: Action
    layers: StageLayers
    move: Move | None
    keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What one process does in a step.

    Attributes:
        instructions: in order.
        remote: receives from other processes, in order.
        training: whether it has backward passes.
    """

    instructions: tuple[Instruction, ...]
    remote: tuple[Transfer, ...]
    training: bool


def compiled(
    plan: Plan,
    layout: Layout,
    layers: Mapping[int, StageLayers],
    devices: Mapping[int, torch.device],
    sizes: Sequence[int],
    *,
    training: bool,
) -> Program:
    """The program of one process.

    Args:
        plan: the plan.
        layout: of this process.
        layers: of this process's stages; they say what crosses each boundary.
        devices: of this process's stages.
        sizes: samples of each micro-batch of one replica.
        training: with backward passes, else forward only.
    """
    lists = _lists(plan, layout, len(sizes), training=training)
    recomputed = {(action.stage, action.micro_batch) for action in lists if action.kind is ActionKind.R}
    first_back = _first_back(lists)
    instructions = []
    remote = []
    for action in lists:
        move = None
        if action.kind not in _COMPUTED:
            move = _move(plan, layout, layers[action.stage], devices, sizes, action, action in first_back)
            if move.is_remote and action.kind in RECEIVES:
                remote.append(move.transfer)
        keep = (action.stage, action.micro_batch) not in recomputed
        instructions.append(Instruction(action, layers[action.stage], move, keep))
    return Program(tuple(instructions), tuple(remote), training)


def _lists(plan: Plan, layout: Layout, micro_batches: int, *, training: bool) -> tuple[Action, ...]:
    """This process's actions in order."""
    if training:
        recompute = [bool(stage.recompute) for stage in plan.stages]
        schedule = make_schedule(plan.schedule, stages=plan.K, micro_batches=micro_batches, recompute=recompute)
    else:
        whole = gpipe_schedule(stages=plan.K, micro_batches=micro_batches, recompute=(False,) * plan.K)
        forward_only = (ActionKind.RECV_F, ActionKind.F, ActionKind.SEND_F)
        schedule = tuple(tuple(action for action in actions if action.kind in forward_only) for actions in whole)
    if len(layout.stages) == 1:
        return schedule[layout.stages[0]]
    rank_of = (0,) * plan.K if layout.alone else tuple(stage.rank for stage in plan.stages)
    return rank_lists(schedule, rank_of, _seconds(plan))[rank_of[layout.stages[0]]]


def _seconds(plan: Plan) -> Callable[[Action], float]:
    """Predicted times for the largest micro-batch, from which the order of a rank with several stages follows."""
    times = [stage.times_at(max(plan.micro_batch_sizes)) for stage in plan.stages]
    table = {
        ActionKind.F: [entry.forward_s for entry in times],
        ActionKind.R: [entry.recompute_s for entry in times],
        ActionKind.B: [entry.backward_s for entry in times],
    }
    return lambda action: table[action.kind][action.stage]


def _first_back(actions: Sequence[Action]) -> frozenset[Action]:
    """Of each stage the first action that receives gradients and the first that sends them."""
    first: dict[tuple[int, ActionKind], Action] = {}
    for action in actions:
        if action.kind in _GRADIENTS:
            first.setdefault((action.stage, action.kind), action)
    return frozenset(first.values())


def _move(
    plan: Plan,
    layout: Layout,
    layers: StageLayers,
    devices: Mapping[int, torch.device],
    sizes: Sequence[int],
    action: Action,
    is_first_back: bool,
) -> Move:
    """What travels: all values of a boundary, or the gradients of those that have one."""
    values = layers.entering if action.kind in (ActionKind.RECV_F, ActionKind.SEND_B) else layers.leaving
    if action.kind in _GRADIENTS:
        values = tuple(value for value in values if value.requires_grad)
    samples = sizes[action.micro_batch]
    specs = tuple(TensorSpec(value.shape_at(samples), value.dim_order, value.dtype) for value in values)
    says_which = is_first_back and bool(values)
    mask = [TensorSpec((len(values),), (0,), torch.bool)] if says_which else []
    other = action.other_end.stage
    is_remote = layout.process_of[other] != layout.process
    receiver = other if action.kind in SENDS else action.stage
    here = devices[action.stage]
    # GPipe keeps the inputs of all micro-batches until their backward pass anyway: their buffers may exist from the
    # start. 1F1B keeps few.
    unlimited = action.kind is ActionKind.RECV_F and plan.schedule == "gpipe"
    form = MessageForm([*mask, *specs], here)
    transfer = Transfer(action, form, devices.get(receiver, here), unlimited)
    return Move(tuple(value.name for value in values), specs, transfer, is_remote, says_which)
