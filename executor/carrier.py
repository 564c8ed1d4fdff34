"""Carries out the calls of one process: each a list of actions, a loss or outputs, and in training gradients, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.batch.calls import Call, Calls
from executor.batch.modes import loss_scale
from executor.layout import Layout
from executor.run.outputs import check_joinable, whole_output
from executor.run.randomness import key
from executor.run.runtime import Runtime
from executor.run.stage_runner import StageRunner
from executor.state.buffers import BufferMover
from executor.state.placement import Placement
from executor.state.replicas import GradientSum
from executor.state.shared_loss import SharedLoss
from executor.state.tied import forget_gradients, sum_gradients
from profiler.observe.ambient import as_in_training
from profiler.observe.random_states import preserved


class Carrier:
    """Carries out calls, together with those of the other processes.

    Args:
        layout: which stages and replicas this process runs.
        devices: of each of its stages.
        calls: give the actions of a call.
        runners: of its stages.
        runtime: takes the actions in order.
        placement: its parameters and buffers.
        gradients: adds them up over replicas.
        shared: the loss that all processes have.
        mover: moves running statistics.
    """

    def __init__(
        self,
        layout: Layout,
        devices: Mapping[int, torch.device],
        calls: Calls,
        runners: Mapping[int, StageRunner],
        runtime: Runtime,
        placement: Placement,
        gradients: GradientSum,
        shared: SharedLoss,
        mover: BufferMover,
    ) -> None:
        self._layout, self._devices = layout, devices
        self._calls, self._runners, self._runtime = calls, runners, runtime
        self._placement, self._gradients, self._loss, self._mover = placement, gradients, shared, mover
        self._asides = -1, 0  # calls that did not train, since that step

    def train(self, call: Call, step: int, scaler: torch.amp.GradScaler | None, accumulate: int) -> Tensor:
        """The loss of a training step, whose gradients and statistics are then where they belong.

        Args:
            call: the step.
            step: its number, for random numbers.
            scaler: scales the loss before it goes back, if there is one.
            accumulate: calls that make up one step of the optimizer.
        """
        device = self._devices[self._layout.stages[0]]
        scale = None if scaler is None else loss_scale(scaler, self._layout, device)
        if accumulate > 1:
            scale = (torch.ones((), device=device) if scale is None else scale) / accumulate
        self._begin(step, scale)
        forget_gradients(self._placement.tied)
        with self._placement.adding_up(), self._gradients.of_a_step():
            with as_in_training(), preserved(self._devices.values()):
                for batches in call.own:
                    self._runtime.run(self._calls.program(call, batches), batches)
                    sum_gradients(self._placement.tied, self._layout.process)
                    self._gradients.add_replica()
            loss = self._loss.of(self._own_losses(call))  # first, since others may wait for it
            self._gradients.end()
            for runner in self._runners.values():
                self._mover.move(runner, call.own)
        return loss

    def evaluate(self, call: Call, step: int) -> Tensor:
        """The loss of a call in evaluation mode."""
        self._begin(self._aside(step))
        self._run(call)
        return self._loss.of(self._own_losses(call))

    def predict(self, call: Call, step: int) -> Any:
        """What the model returns, in the process of the last stage; None in others.

        Raises:
            ArgumentError: an output has no one batch dimension to join micro-batches along.
        """
        check_joinable(call.sequence, sum(call.counts))
        self._begin(self._aside(step), keep_outputs=True)
        self._run(call)
        own = [batch for batches in call.own for batch in batches]
        runner, output = self._last, None
        if runner is not None:
            parts = [runner.take_output(batch) for batch in own]
            output = whole_output(call.sequence, parts, [batch.size for batch in own])
        self._loss.of([])  # there is none, but all wait for it, and end together if the last stage fails
        return output

    def _run(self, call: Call) -> None:
        with preserved(self._devices.values()):
            for batches in call.own:
                self._runtime.run(self._calls.program(call, batches), batches)

    def _aside(self, step: int) -> int:
        """What keys the random numbers of one more call that does not train: no step's number, and no other call's."""
        self._asides = step, self._asides[1] + 1 if self._asides[0] == step else 0
        return -1 - key(*self._asides)

    def _begin(self, step: int, scale: Tensor | None = None, *, keep_outputs: bool = False) -> None:
        self._loss.begin()
        for runner in self._runners.values():
            runner.begin(step, scale, keep_outputs=keep_outputs)

    def _own_losses(self, call: Call) -> list[Tensor]:
        """By replica of this process, if it runs the last stage."""
        return [] if self._last is None else [self._last.loss(batches) for batches in call.own]

    @property
    def _last(self) -> StageRunner | None:
        """The runner of the last stage, if it is here."""
        return self._runners.get(len(self._layout.process_of) - 1)
