"""A program: the actions of one process for a batch of given sizes, with all that can be known before it comes.

Schedules, shapes and peers are the same in every step. They are worked out once and kept, so that a step only walks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from executor.layout import Layout
from executor.run.message import MessageForm, TensorSpec
from executor.run.one_order import in_one_order
from executor.run.rank_order import RECEIVES, SENDS, rank_lists
from executor.run.stage_runner import StageLayers
from executor.run.transport import Transfer
from executor.watch.position import ActionNumbers, numbers_of
from planner.plan.actions import COMPUTING, Action, ActionKind, Schedule, most_in_flight, receives_ahead, room_between
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from profiler.machine.backend import backend_of
from profiler.tracing.sequence import BoundaryValue

_GRADIENTS = frozenset({ActionKind.RECV_B, ActionKind.SEND_B})


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A SEND or RECV action.

    Attributes:
        names: of the values that it moves, or whose gradients.
        specs: of what it moves, in this order.
        transfer: how.
        is_remote: whether the other end lies in another process.
        says_which: whether a mask of the gradients that exist leads the message.
        is_last: of the messages that the stage sends or receives with one another.
    """

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    transfer: Transfer
    is_remote: bool
    says_which: bool
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One action with what it needs.

    What the loop of a step asks of each action is worked out here: a kind is a member of an enum, which takes ten times
    as long to look up in a set as a plain value to read.

    Attributes:
        action: what is done.
        layers: of its stage.
        move: of a SEND or RECV.
        keep: of an F: whether it keeps what the last recomputed segment saves.
        posts: receives from other processes that are posted before; where messages come in the order of their calls.
        prepares: of a pass: the receives that are posted between it and the next one, likewise.
        numbers: of the action, as the journal holds it.
        receives: whether it is a RECV.
        waits: whether it waits for another process.
        has_loss: whether it computes the loss.
    """

    action: Action
    layers: StageLayers
    move: Move | None
    keep: bool
    posts: tuple[Transfer, ...] = ()
    prepares: tuple[Transfer, ...] = ()
    numbers: ActionNumbers = field(init=False)
    receives: bool = field(init=False)
    waits: bool = field(init=False)
    has_loss: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", numbers_of(self.action))
        object.__setattr__(self, "receives", self.action.kind in RECEIVES)
        object.__setattr__(self, "waits", self.receives and self.move is not None and self.move.is_remote)
        object.__setattr__(self, "has_loss", self.action.kind is ActionKind.F and self.layers.is_last)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What one process does in a step.

    Attributes:
        instructions: in order.
        actions: theirs.
        remote: receives from other processes, in order.
        training: whether it has backward passes.
    """

    instructions: tuple[Instruction, ...]
    actions: tuple[Action, ...]
    remote: tuple[Transfer, ...]
    training: bool


def compiled_program(
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
    lists, own = _lists(plan, layout, len(sizes), training=training)
    actions = tuple(lists[own])
    posted: Mapping[int, Sequence[Action]] = {}
    prepared: Mapping[int, Sequence[Action]] = {}
    if not layout.alone and backend_of(devices[layout.stages[0]]).keeps_order:
        found = in_one_order(lists, own, _ticks(plan), partial(_most_under_way, plan))
        actions, posted, prepared = found.actions, found.posts, found.during
    recomputed = {(action.stage, action.micro_batch) for action in actions if action.kind is ActionKind.R}
    moves = _Moves(plan, layout, layers, devices, sizes, actions, training)
    instructions = []
    remote = []
    for index, action in enumerate(actions):
        move = None
        if action.kind not in COMPUTING:
            move = moves.of(action)
            if move.is_remote and action.kind in RECEIVES:
                remote.append(move.transfer)
        keep = (action.stage, action.micro_batch) not in recomputed
        posts, prepares = (
            tuple(moves.of(one).transfer for one in places.get(index, ())) for places in (posted, prepared)
        )
        instructions.append(Instruction(action, layers[action.stage], move, keep, posts, prepares))
    return Program(tuple(instructions), actions, tuple(remote), training)


def _lists(plan: Plan, layout: Layout, micro_batches: int, *, training: bool) -> tuple[Schedule, int]:
    """The actions of each rank in order, and which of these lists is this process's."""
    schedule = plan.actions(micro_batches)
    if not training:
        # values do not skip stages then
        forward_only = (ActionKind.RECV_F, ActionKind.F, ActionKind.SEND_F)
        schedule = tuple(
            tuple(action for action in actions if action.kind in forward_only and action.peer is None)
            for actions in schedule
        )
    own = plan.stages[layout.stages[0]].rank
    if plan.chunks > 1 and not layout.alone:
        return schedule, own
    if len(schedule) == plan.ranks and not layout.alone:
        return schedule, layout.stages[0]
    rank_of = (0,) * len(schedule) if layout.alone else tuple(stage.rank for stage in plan.stages)
    return rank_lists(schedule, rank_of, _seconds(plan)), 0 if layout.alone else own


def _most_under_way(plan: Plan, receive: Action) -> int | None:
    """How many messages of a channel may be under way, as a plan's memory has it."""
    if receive.kind is ActionKind.RECV_F and SCHEDULES[plan.schedule].keeps_all:
        return None
    return receives_ahead(abs(receive.other_end.stage - receive.stage), plan.ring)


def _ticks(plan: Plan) -> Callable[[Action], int]:
    """Predicted times in whole numbers."""
    seconds = _seconds(plan)
    kinds = (ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.I, ActionKind.W)
    table = {(kind, stage): seconds(Action(stage, kind, 0)) for kind in kinds for stage in range(plan.K)}
    longest = max(table.values())
    ticks = {key: max(1, round(1000 * taken / longest)) if longest else 1 for key, taken in table.items()}
    return lambda action: ticks[action.kind, action.stage]


def _seconds(plan: Plan) -> Callable[[Action], float]:
    """Predicted times for the largest micro-batch, from which the order of a rank with several stages follows."""
    times = [stage.times_at(max(plan.micro_batch_sizes)) for stage in plan.stages]
    table = {
        ActionKind.F: [entry.forward_s for entry in times],
        ActionKind.R: [entry.recompute_s for entry in times],
        ActionKind.B: [entry.backward_s for entry in times],
        ActionKind.I: [entry.backward_s - entry.weight_s for entry in times],
        ActionKind.W: [entry.weight_s for entry in times],
    }
    return lambda action: table[action.kind][action.stage]


class _Moves:
    """What the SEND and RECV actions of one process move.

    Args:
        plan: the plan.
        layout: of this process.
        layers: of its stages.
        devices: of its stages.
        sizes: samples of each micro-batch.
        actions: that it carries out.
        training: whether values skip stages, as they do in the graph that trains.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        layers: Mapping[int, StageLayers],
        devices: Mapping[int, torch.device],
        sizes: Sequence[int],
        actions: Sequence[Action],
        training: bool,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._layers = layers
        self._devices = devices
        self._sizes = sizes
        self._training = training
        self._skips = {skip.ends: frozenset(skip.values) for skip in plan.skips} if training else {}
        self._number = {skip.ends: plan.K + position for position, skip in enumerate(plan.skips)}
        self._most = most_in_flight(plan.actions(len(sizes)))
        self._forms: dict[tuple[tuple[TensorSpec, ...], torch.device], MessageForm] = {}
        first: dict[tuple[int, ActionKind, int | None], Action] = {}
        last: dict[tuple[int, ActionKind, int], Action] = {}
        for action in actions:
            first.setdefault((action.stage, action.kind, action.peer), action)
            last[action.stage, action.kind, action.micro_batch] = action
        self._first, self._last = frozenset(first.values()), frozenset(last.values())

    def of(self, action: Action) -> Move:
        """Values of a boundary, or the gradients of those that have one."""
        values = self._values(action)
        samples = self._sizes[action.micro_batch]
        specs = tuple(TensorSpec(value.shape_at(samples), value.dim_order, value.dtype) for value in values)
        says_which = action.kind in _GRADIENTS and action in self._first and bool(values)
        mask = [TensorSpec((len(values),), (0,), torch.bool)] if says_which else []
        here = self._devices[action.stage]
        other = action.other_end.stage
        receiver = other if action.kind in SENDS else action.stage
        # A schedule that keeps the inputs of all micro-batches until their backward pass may have their buffers from
        # the start.
        unlimited = action.kind is ActionKind.RECV_F and SCHEDULES[self._plan.schedule].keeps_all
        form = self._form((*mask, *specs), here)
        most = self._most[min(action.stage, other)]
        if not self._training:  # nothing comes back that would hold up the sender
            most = max(most, room_between(action.stage, other, self._plan.ring))
        return Move(
            names=tuple(value.name for value in values),
            specs=specs,
            transfer=Transfer(
                action,
                form,
                self._devices.get(receiver, here),
                self._channel(action),
                unlimited,
                most,
                ring=self._plan.ring,
                borrows=receiver == action.stage and self._borrows(receiver),
            ),
            is_remote=self._layout.process_of[other] != self._layout.process,
            says_which=says_which,
            is_last=action in self._last,
        )

    def _borrows(self, stage: int) -> bool:
        """Whether a stage is through with a message when it waits for the next one.

        It trains, and keeps it; or hands on to a stage of this process what it may have received, which is read later.
        A rank with chunks waits for room in its other channels meanwhile: the message would take its sender's there.
        """
        hands_on = stage + 1 < self._plan.K and self._layout.process_of[stage + 1] == self._layout.process
        return not self._training and self._plan.chunks == 1 and not hands_on

    def _form(self, specs: tuple[TensorSpec, ...], device: torch.device) -> MessageForm:
        """Equal messages share one, by which their places in shared memory are found."""
        known = self._forms.get((specs, device))
        if known is None:
            known = self._forms[specs, device] = MessageForm(specs, device)
        return known

    def _values(self, action: Action) -> tuple[BoundaryValue, ...]:
        """Those of the boundary that the message holds."""
        inward = action.kind in (ActionKind.RECV_F, ActionKind.SEND_B)
        alive = self._layers[action.stage].entering if inward else self._layers[action.stage].leaving
        if action.peer is not None:
            own = self._skips[_ends(action.stage, action.peer)]
            alive = tuple(value for value in alive if value.name in own)
        elif self._skips:
            skipping = [names for ends, names in self._skips.items() if ends[inward] == action.stage]
            alive = tuple(value for value in alive if not any(value.name in names for names in skipping))
        return tuple(value for value in alive if value.requires_grad or action.kind not in _GRADIENTS)

    def _channel(self, action: Action) -> int:
        """A number of the boundary, or of the skip, and of the direction; the same at both ends."""
        receive = action if action.kind in RECEIVES else action.other_end
        number = receive.stage if receive.peer is None else self._number[_ends(receive.stage, receive.peer)]
        return 2 * number + (receive.kind is ActionKind.RECV_B)


def _ends(stage: int, other: int) -> tuple[int, int]:
    """Sender and receiver of a skip."""
    return min(stage, other), max(stage, other)
