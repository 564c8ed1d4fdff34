"""One stage on its device: forward, recompute and backward passes of the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor.randomness import generator_of, key
from profiler.batch_norm import combined
from profiler.errors import ArgumentError
from profiler.loss import LossFunction, loss_of, model_output
from profiler.sequence import LayerSequence
from profiler.stage_function import Pass, Results, StageFunction, keeping_nothing, leaves_of, roots_of, run_backward

LOSS = "loss"  # the one value that the last stage leaves while training


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a stage needs of one micro-batch beside what the stage before sends.

    Attributes:
        index: position in the mini-batch.
        size: samples.
        weight: share of the mini-batch, samples / all samples.
        inputs: the model's inputs by name.
        target: what the loss is computed with.
    """

    index: int
    size: int
    weight: float
    inputs: Mapping[str, Tensor]
    target: Any


@dataclass(slots=True)
class _StepState:
    """What a stage holds during one step, by micro-batch index."""

    number: int
    entering: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    kept: dict[int, Pass] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    results: dict[int, Results] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs the layers of one stage.

    Args:
        sequence: the model's layers.
        first: index of the stage's first layer.
        stop: index behind its last layer.
        device: where it runs.
        parameters: by (layer, name), see `StageFunction`.
        buffers: the stage's buffers by name, on its device; moved at the end of each step.
        loss_fn: of the last stage.
        seed: of all random numbers.
    """

    def __init__(
        self,
        sequence: LayerSequence,
        first: int,
        stop: int,
        device: torch.device,
        parameters: Mapping[tuple[int, str], Tensor],
        buffers: dict[str, Tensor],
        loss_fn: LossFunction | None,
        seed: int,
    ) -> None:
        self.function = StageFunction(sequence, first, stop, parameters)
        self.is_last = stop == len(sequence)
        self.device = device
        self.buffers = buffers
        self._sequence = sequence
        self._loss_fn = loss_fn
        self._seed = seed
        self._state = _StepState(0)

    def begin(self, step: int) -> None:
        """Forget the step before; `step` keys the random numbers."""
        self._state = _StepState(step)

    def forward(self, batch: MicroBatch, received: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
        """The forward pass of one micro-batch.

        Args:
            batch: the micro-batch.
            received: the entering values.
            keep: whether to keep what the backward pass needs; otherwise `recompute` must come first.

        Returns:
            The leaving values, detached; empty behind the last stage.
        """
        state = self._state
        state.entering[batch.index] = leaves_of(received, self.function.entering)
        current = {**self.buffers, **(state.buffers[batch.index - 1] if batch.index else {})}
        if keep:
            values, results = self._run(batch, current)
            state.kept[batch.index] = Pass(state.entering[batch.index], roots_of(values))
        else:
            with keeping_nothing():
                values, results = self._run(batch, current)
        before = state.buffers[batch.index - 1] if batch.index else {}
        state.buffers[batch.index] = {**before, **results.buffers}
        results.values.clear()
        state.results[batch.index] = results
        if self.is_last:
            state.losses[batch.index] = values[LOSS].detach()
            return {}
        return {name: value.detach() for name, value in values.items()}

    def loss_of(self, batch: MicroBatch) -> Tensor:
        """The weighted loss of a micro-batch that the last stage has run, a scalar."""
        return self._state.losses[batch.index]

    def recompute(self, batch: MicroBatch) -> None:
        """Run the forward pass again and keep what the backward pass needs."""
        before = self._state.buffers[batch.index - 1] if batch.index else {}
        values, _ = self._run(batch, {**self.buffers, **before})
        self._state.kept[batch.index] = Pass(self._state.entering[batch.index], roots_of(values))

    def backward(self, batch: MicroBatch, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The backward pass of one micro-batch.

        Args:
            batch: the micro-batch.
            gradients: of the leaving values; of the last stage's loss when empty.

        Returns:
            Gradients of the entering values that have one.
        """
        if self.is_last:
            gradients = {LOSS: torch.ones((), device=self.device, dtype=self._state.losses[batch.index].dtype)}
        self._state.entering.pop(batch.index)
        entering = run_backward(self._state.kept.pop(batch.index), gradients)
        return {name: gradient for name, gradient in entering.items() if gradient is not None}

    def evaluate(
        self, sequence: LayerSequence, function: StageFunction, batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The forward pass without gradient through another function of the same layers (evaluation mode)."""
        with torch.no_grad():
            values = function.forward(dict(received), self._inputs(batch, function), self.buffers).values
            if self.is_last:
                with function.autocasting():
                    loss = loss_of(model_output(sequence, values), self._target(batch), self._loss_fn)
                self._state.losses[batch.index] = loss * batch.weight
                return {}
        return values

    def loss(self) -> Tensor:
        """The mini-batch's loss in float64: the weighted sum over its micro-batches, in their order."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index in sorted(self._state.losses):
            total = total + self._state.losses[index]
        return total

    def move_buffers(self) -> None:
        """Write buffers and running statistics as the step leaves them: once per mini-batch."""
        state = self._state
        indices = sorted(state.results)
        for name, value in (state.buffers[indices[-1]] if indices else {}).items():
            self.buffers[name].copy_(value)
        columns = zip(*(state.results[index].statistics for index in indices), strict=True)
        for column in columns:
            self._move_statistics(column)
        state.results.clear()
        state.buffers.clear()

    def _move_statistics(self, column: Sequence[tuple[Any, Tensor, Tensor, Tensor]]) -> None:
        entry = column[0][0]
        mean, variance = combined([c[1] for c in column], [c[2] for c in column], [c[3] for c in column])
        with torch.no_grad():
            self.buffers[entry.running_mean].lerp_(mean, entry.momentum)
            self.buffers[entry.running_var].lerp_(variance, entry.momentum)
            if entry.num_batches_tracked is not None:
                self.buffers[entry.num_batches_tracked].add_(1)

    def _run(self, batch: MicroBatch, buffers: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Results]:
        leaves = self._state.entering[batch.index]
        seed = partial(self._seed_layer, batch.index)
        results = self.function.forward(leaves, self._inputs(batch, self.function), buffers, seed=seed)
        if not self.is_last:
            return dict(results.values), results
        self._seed_layer(batch.index, len(self._sequence))  # the loss may draw random numbers too
        with self.function.autocasting():
            loss = loss_of(model_output(self._sequence, results.values), self._target(batch), self._loss_fn)
        if not loss.requires_grad:
            raise ArgumentError(
                "the loss depends on no trainable parameter, so there is nothing to train; check loss_fn for detach() "
                "or integers, and the model for requires_grad"
            )
        return {LOSS: loss * batch.weight}, results

    def _inputs(self, batch: MicroBatch, function: StageFunction) -> dict[str, Tensor]:
        """The model's inputs that the stage reads, on its device."""
        return {name: batch.inputs[name].to(self.device, non_blocking=True) for name in function.inputs}

    def _target(self, batch: MicroBatch) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch.target)

    def _seed_layer(self, micro_batch: int, layer: int) -> None:
        generator_of(self.device).manual_seed(key(self._seed, self._state.number, micro_batch, layer))
