"""Batch normalizations in a module that is called as it is: they yield a micro-batch's statistics, and move nothing.

As in a graph (`profiler.tracing.batch_norm`), who runs the layers moves the buffers, once per mini-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from profiler.moments import WHOLE_MOMENTUM, elements_per_channel
from profiler.torch_private import BatchNormBase, NormBase


@dataclass(frozen=True, slots=True)
class Measured:
    """What one batch normalization found in one micro-batch.

    Attributes:
        path: of it, in the module that is called; "" for that module itself.
        mean: per channel.
        variance: per channel, unbiased.
        count: elements per channel, a tensor with one number.
    """

    path: str
    mean: Tensor
    variance: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class MovedBy:
    """What moves the running statistics of one batch normalization.

    Attributes:
        buffers: positions of its running mean and variance and of its counter among the arguments of the call.
        momentum: weight of the new mini-batch.
        first: position of the mean among what the call returns; variance and count follow.
    """

    buffers: tuple[int, int, int]
    momentum: float
    first: int


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def buffer_of(path: str, name: str) -> str:
    """The name of a normalization's buffer in the module that is called."""
    return f"{path}.{name}" if path else name


def moving(module: nn.Module) -> dict[str, nn.Module]:
    """The normalizations that move running statistics in training, by path."""
    return {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, NormBase) and part.training and part.track_running_stats
    }


def is_measurable(part: nn.Module) -> bool:
    """Whether it is torch's own batch normalization, all of whose effect on its buffers is known."""
    own = type(part).forward is BatchNormBase.forward and "forward" not in part.__dict__
    return own and part.momentum is not None and part.num_batches_tracked is not None


@contextlib.contextmanager
def measuring(parts: Mapping[str, nn.Module]) -> Iterator[list[Measured]]:
    """Within, these normalizations leave their buffers alone; yields what they find, in the order of their calls."""
    found: list[Measured] = []
    before = [(part, part.__dict__.get("forward")) for part in parts.values()]  # of one that is called as it is itself
    for path, part in parts.items():
        part.__dict__["forward"] = partial(_measured, path, part, found)
    try:
        yield found
    finally:
        for part, forward in before:
            del part.__dict__["forward"]
            if forward is not None:
                part.__dict__["forward"] = forward


def _measured(path: str, part: Any, found: list[Measured], values: Tensor) -> Tensor:
    buffers, momentum = dict(part._buffers), part.momentum
    with torch.no_grad():
        part._buffers.update({name: torch.zeros_like(buffer) for name, buffer in buffers.items()})
    part.momentum = WHOLE_MOMENTUM
    try:
        result: Tensor = type(part).forward(part, values)
        found.append(Measured(path, part.running_mean, part.running_var, elements_per_channel(values)))
    finally:
        part.momentum = momentum
        part._buffers.update(buffers)
    return result
