"""The one runtime: walks the action lists of the stages that this process runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.position import Logbook, Phase
from executor.stage_runner import MicroBatch, StageRunner
from executor.stopwatch import Stopwatch
from executor.transport import TensorSpec, Transport
from planner.plan import Plan
from planner.schedule import Action, ActionKind
from profiler.errors import ExecutionError
from profiler.sequence import BoundaryValue, LayerSequence
from profiler.stage_function import StageFunction

ActionLists = Mapping[int, Sequence[Action]]  # by stage
_TIMED = frozenset({ActionKind.F, ActionKind.R, ActionKind.B})
_RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
_GRADIENTS = frozenset({ActionKind.RECV_B, ActionKind.SEND_B})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The layers in evaluation mode, and this process's stages of them."""

    sequence: LayerSequence
    functions: Mapping[int, StageFunction]


class Runtime:
    """Carries out action lists.

    Args:
        runners: the stages of this process.
        transport: between stages.
        sequence: the model's layers.
        plan: says which layers a stage holds.
        log: where each action is noted before it begins.
        check_finite: whether a loss that is not finite is an error.
    """

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        sequence: LayerSequence,
        plan: Plan,
        log: Logbook,
        check_finite: bool,
    ) -> None:
        self._runners = runners
        self._transport = transport
        self._check_finite = check_finite
        self._plan = plan
        self._log = log
        self._sequence = sequence
        self.stopwatch = Stopwatch(next(iter(runners.values())).device)

    def run(
        self, lists: ActionLists, batches: Sequence[MicroBatch], step: int, evaluation: Evaluation | None = None
    ) -> None:
        """Carry out one list per local stage; of several stages the last that can go on acts first.

        Args:
            lists: actions by stage.
            batches: the micro-batches.
            step: number of the step, which keys random numbers.
            evaluation: run these functions without gradient instead of the training ones.

        Raises:
            ExecutionError: an action failed, or no stage can go on.
        """
        messages = _messages(self._sequence if evaluation is None else evaluation.sequence, self._plan)
        work = _Work(
            self._runners,
            self._transport,
            self.stopwatch,
            messages,
            batches,
            lists,
            evaluation,
            self._log,
            self._check_finite,
        )
        self.stopwatch.start()
        for runner in self._runners.values():
            runner.begin(step)
        self._transport.begin((a for actions in lists.values() for a in actions), work.spec)
        position = dict.fromkeys(sorted(lists, reverse=True), 0)
        while True:
            heads = {stage: lists[stage][at] for stage, at in position.items() if at < len(lists[stage])}
            if not heads:
                break
            stage = next((s for s, a in heads.items() if a.kind not in _RECEIVES or self._transport.ready(a)), None)
            if stage is None:
                raise ExecutionError(f"the schedule cannot go on: waiting for {', '.join(map(str, heads.values()))}")
            work.carry_out(heads[stage])
            position[stage] += 1
        self._log.phase(Phase.END_OF_STEP)
        self._transport.end()


Messages = Mapping[tuple[ActionKind, int], Sequence[BoundaryValue]]  # by kind of transfer and stage


def _messages(sequence: LayerSequence, plan: Plan) -> Messages:
    """What travels, in that order: all values of a boundary, and the gradients of those that have one."""
    found: dict[tuple[ActionKind, int], Sequence[BoundaryValue]] = {}
    for index, stage in enumerate(plan.stages):
        entering, leaving = sequence.boundaries[stage.first_layer], sequence.boundaries[stage.stop_layer]
        found[ActionKind.RECV_F, index], found[ActionKind.SEND_F, index] = entering, leaving
        found[ActionKind.RECV_B, index] = [value for value in leaving if value.requires_grad]
        found[ActionKind.SEND_B, index] = [value for value in entering if value.requires_grad]
    return found


def _recomputed(lists: ActionLists) -> frozenset[tuple[int, int]]:
    """Pairs (stage, micro-batch) whose forward pass keeps nothing, since it will be run again."""
    return frozenset(
        (action.stage, action.micro_batch)
        for actions in lists.values()
        for action in actions
        if action.kind is ActionKind.R
    )


def _first_back(lists: ActionLists) -> frozenset[Action]:
    """Of each stage the first action that receives gradients and the first that sends them."""
    first: dict[tuple[int, ActionKind], Action] = {}
    for stage, actions in lists.items():
        for action in actions:
            if action.kind in _GRADIENTS:
                first.setdefault((stage, action.kind), action)
    return frozenset(first.values())


class _Work:
    """What is under way in one run: received messages that wait for their action, and results that wait to leave."""

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        stopwatch: Stopwatch,
        messages: Messages,
        batches: Sequence[MicroBatch],
        lists: ActionLists,
        evaluation: Evaluation | None,
        log: Logbook,
        check_finite: bool,
    ) -> None:
        self._check_finite = check_finite
        self._log = log
        self._runners = runners
        self._transport = transport
        self._stopwatch = stopwatch
        self._messages = messages
        self._batches = batches
        self._recomputed = _recomputed(lists)
        self._first_back = _first_back(lists)
        self._evaluation = evaluation
        self._incoming: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._outgoing: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._existing: dict[tuple[ActionKind, int], list[bool]] = {}

    def spec(self, action: Action) -> list[TensorSpec]:
        """What a SEND action sends or a RECV action receives."""
        values = self._messages[action.kind, action.stage]
        size = self._batches[action.micro_batch].size
        specs = [TensorSpec(value.shape_at(size), value.dim_order, value.dtype) for value in values]
        mask = [TensorSpec((len(values),), (0,), torch.bool)] if self._has_mask(action) else []
        return [*mask, *specs]

    def _has_mask(self, action: Action) -> bool:
        """Whether a mask of the gradients that exist leads the message: those that are first to go back in a step."""
        return action in self._first_back and bool(self._messages[action.kind, action.stage])

    def carry_out(self, action: Action) -> None:
        """Do what the action says; the logbook says of any failure where it happened."""
        self._log.action(action)
        if action.kind in _TIMED:
            with self._stopwatch.timing(action):
                self._compute(action)
        else:
            self._move(action)

    def _move(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        values = self._messages[action.kind, action.stage]
        if action.kind in _RECEIVES:
            received = self._transport.receive(action)
            if self._has_mask(action):
                self._existing[action.kind, action.stage] = received.pop(0).tolist()
            exists = self._existing.get((action.kind, action.stage), [True] * len(values))
            arrived = zip(values, received, exists, strict=True)
            self._incoming[place] = {value.name: tensor for value, tensor, there in arrived if there}
        elif action.kind in _GRADIENTS:
            self._transport.send(action, self._gradients(action, self._outgoing.pop(place)))
        else:
            outgoing = self._outgoing.pop(place)
            self._transport.send(action, [outgoing[value.name] for value in values])

    def _gradients(self, action: Action, found: Mapping[str, Tensor]) -> list[Tensor]:
        """The message with the gradients of a stage's inputs.

        A value without a path to the loss has none, which is not the same as zeros: weight decay would move what no
        gradient reaches. Which ones exist follows from the graph, so the first micro-batch to go back says it for all.
        """
        values = self._messages[action.kind, action.stage]
        device = self._runners[action.stage].device
        exists = [value.name in found for value in values]
        mask = [torch.tensor(exists, device=device)] if self._has_mask(action) else []
        known = self._existing.setdefault((action.kind, action.stage), exists)
        for value, there, expected in zip(values, exists, known, strict=True):
            if there and not expected:
                raise ExecutionError(
                    f"{action}: {value.name} has a gradient, but had none in the micro-batches that went back before; "
                    "let loss_fn use the same outputs in every micro-batch of a step, with weight 0 where need be"
                )
        size = self._batches[action.micro_batch].size
        return mask + [
            found[value.name]
            if value.name in found
            else torch.zeros(value.shape_at(size), dtype=value.dtype, device=device)
            for value in values
        ]

    def _compute(self, action: Action) -> None:
        runner = self._runners[action.stage]
        batch = self._batches[action.micro_batch]
        self._pass(action, runner, batch)
        if self._check_finite and action.kind is ActionKind.F and runner.is_last:
            self._refuse_infinite(runner.loss_of(batch))

    def _refuse_infinite(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise ExecutionError(
                f"{self._log.position}: the loss of this micro-batch is {loss.item()}; look at its samples, or "
                "lower the learning rate"
            )

    def _pass(self, action: Action, runner: StageRunner, batch: MicroBatch) -> None:
        place = (action.stage, action.micro_batch)
        if action.kind is ActionKind.R:
            runner.recompute(batch)
        elif action.kind is ActionKind.B:
            self._outgoing[place] = runner.backward(batch, self._incoming.pop(place, {}))
        elif self._evaluation is not None:
            function = self._evaluation.functions[action.stage]
            received = self._incoming.pop(place, {})
            self._outgoing[place] = runner.evaluate(self._evaluation.sequence, function, batch, received)
        else:
            keep = place not in self._recomputed
            self._outgoing[place] = runner.forward(batch, self._incoming.pop(place, {}), keep=keep)
