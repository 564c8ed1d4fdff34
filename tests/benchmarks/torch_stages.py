"""Stages of any traced model for torch's own schedules: layers of a plan's stages as modules that torch pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from planner import Plan
from planner.export.stage_module import ContiguousGradient
from profiler import LayerSequence
from profiler.run.loss import LossFunction, loss_of, model_output
from profiler.run.stage_function import StageFunction

TARGET = "target_of_the_loss"


class StageModule(nn.Module):
    """Layers of a sequence; the last stage returns the loss.

    Args:
        sequence: the layers.
        first: index of the first.
        stop: index after the last.
        loss_fn: None if the model returns its loss.
    """

    def __init__(self, sequence: LayerSequence, first: int, stop: int, loss_fn: LossFunction | None) -> None:
        super().__init__()
        names = dict.fromkeys(name for layer in sequence.layers[first:stop] for name in layer.parameters)
        held = {name: sequence.parameters[name] for name in names}
        self.held = nn.ParameterList(held.values())
        copies = {(layer.index, name): held[name] for layer in sequence.layers[first:stop] for name in layer.parameters}
        self._function = StageFunction(sequence, first, stop, copies)
        self._sequence, self._loss_fn, self._is_last = sequence, loss_fn, stop == len(sequence)
        self._leaving = [value.name for value in sequence.boundaries[stop]]

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values_in = [ContiguousGradient.apply(value) if value.requires_grad else value for value in received]
        leaves = dict(zip((value.name for value in self._function.entering), values_in, strict=True))
        given = {name: inputs[name] for name in self._function.inputs}
        values = self._function.forward(leaves, given, self._sequence.buffers).values
        if self._is_last:
            return loss_of(model_output(self._sequence, values), inputs.get(TARGET), self._loss_fn)
        # Torch sends contiguous tensors, and its zero bubble detaches them in place, which is not allowed for a view or
        # for what a layer of the stage has saved.
        return tuple(values[name].clone(memory_format=torch.contiguous_format) for name in self._leaving)


def torch_step(
    kind: Any,
    sequence: LayerSequence,
    plan: Plan,
    inputs: Mapping[str, Tensor],
    target: Tensor | None,
    loss_fn: LossFunction | None,
) -> Callable[[], object]:
    """A training step of this rank by one of torch's schedules, through the stages of a plan with chunks."""
    rank, ranks = dist.get_rank(), plan.K // plan.chunks
    cuts = [*(stage.first_layer for stage in plan.stages), len(sequence)]
    stages = [
        PipelineStage(StageModule(sequence, *bounds, loss_fn), index, plan.K, torch.device("cpu"))
        for index, bounds in enumerate(pairwise(cuts))
        if index % ranks == rank
    ]
    schedule = kind(stages, plan.M, loss_fn=lambda loss, _: loss)
    given = {**inputs, **({} if target is None else {TARGET: target})}
    nothing = torch.zeros(plan.batch_size)  # torch wants a target

    def step() -> object:
        last = {"target": nothing, "losses": []} if stages[-1].is_last else {}
        return schedule.step(**given, **last, return_outputs=False)

    return step
