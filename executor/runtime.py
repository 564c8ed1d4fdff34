"""The one runtime: walks the action lists of the stages that this process runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from executor.stage_runner import MicroBatch, StageRunner
from executor.stopwatch import Stopwatch
from executor.transport import TensorSpec, Transport
from planner.plan import Plan
from planner.schedule import Action, ActionKind
from profiler.errors import ExecutionError, PlanError
from profiler.sequence import LayerSequence
from profiler.stage_function import StageFunction

ActionLists = Mapping[int, Sequence[Action]]  # by stage
_TIMED = frozenset({ActionKind.F, ActionKind.R, ActionKind.B})
_RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})


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
    """

    def __init__(
        self, runners: Mapping[int, StageRunner], transport: Transport, sequence: LayerSequence, plan: Plan
    ) -> None:
        self._runners = runners
        self._transport = transport
        entering = {index: sequence.boundaries[stage.first_layer] for index, stage in enumerate(plan.stages)}
        leaving = {index: sequence.boundaries[stage.stop_layer] for index, stage in enumerate(plan.stages)}
        self._values = {ActionKind.RECV_F: entering, ActionKind.SEND_F: leaving}
        self._gradients = {
            ActionKind.RECV_B: {k: [v for v in values if v.requires_grad] for k, values in leaving.items()},
            ActionKind.SEND_B: {k: [v for v in values if v.requires_grad] for k, values in entering.items()},
        }
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
        work = _Work(self, batches, _recomputed(lists), evaluation)
        self.stopwatch.start()
        for runner in self._runners.values():
            runner.begin(step)
        self._transport.begin((a for actions in lists.values() for a in actions), lambda a: self._spec(a, batches))
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
        self._transport.end()

    def _spec(self, action: Action, batches: Sequence[MicroBatch]) -> list[TensorSpec]:
        """What a SEND action sends or a RECV action receives."""
        table = self._values if action.kind in self._values else self._gradients
        size = batches[action.micro_batch].size
        return [
            TensorSpec(value.shape_at(size), value.dim_order, value.dtype) for value in table[action.kind][action.stage]
        ]

    def names(self, action: Action) -> list[str]:
        """Names of the values or gradients in a message, in the order in which they travel."""
        table = self._values if action.kind in self._values else self._gradients
        return [value.name for value in table[action.kind][action.stage]]

    def runner(self, stage: int) -> StageRunner:
        """The stage's runner."""
        return self._runners[stage]

    @property
    def transport(self) -> Transport:
        """What messages travel by."""
        return self._transport


def _recomputed(lists: ActionLists) -> frozenset[tuple[int, int]]:
    """Pairs (stage, micro-batch) whose forward pass keeps nothing, since it will be run again."""
    return frozenset(
        (action.stage, action.micro_batch)
        for actions in lists.values()
        for action in actions
        if action.kind is ActionKind.R
    )


class _Work:
    """What is under way in one run: received messages that wait for their action, and results that wait to leave."""

    def __init__(
        self,
        runtime: Runtime,
        batches: Sequence[MicroBatch],
        recomputed: frozenset[tuple[int, int]],
        evaluation: Evaluation | None,
    ) -> None:
        self._runtime = runtime
        self._batches = batches
        self._recomputed = recomputed
        self._evaluation = evaluation
        self._incoming: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._outgoing: dict[tuple[int, int], dict[str, Tensor]] = {}

    def carry_out(self, action: Action) -> None:
        """Do what the action says; any failure names it."""
        try:
            if action.kind in _TIMED:
                with self._runtime.stopwatch.timing(action):
                    self._compute(action)
            else:
                self._move(action)
        except PlanError:
            raise
        except Exception as problem:
            raise ExecutionError(
                f"stage {action.stage}, micro-batch {action.micro_batch}, action {action}: "
                f"{type(problem).__name__}: {problem}"
            ) from problem

    def _move(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        names = self._runtime.names(action)
        if action.kind in _RECEIVES:
            self._incoming[place] = dict(zip(names, self._runtime.transport.receive(action), strict=True))
        else:
            outgoing = self._outgoing.pop(place)
            self._runtime.transport.send(action, [outgoing[name] for name in names])

    def _compute(self, action: Action) -> None:
        runner = self._runtime.runner(action.stage)
        batch = self._batches[action.micro_batch]
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
