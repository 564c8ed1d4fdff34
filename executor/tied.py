"""Tied parameters: one accumulator per using layer, summed in layer order at the end of a step.

A parameter that several layers read (an embedding and the output head) would otherwise add up its gradients in an
order that depends on the cut: per micro-batch where its users share a stage, per stage where they do not. With one
accumulator per layer the sum is always ((g of its 1st layer + g of its 2nd layer) + ...), each summed over
micro-batches before. Where its users lie on several ranks, the partial sum travels along them and the total back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profiler.channel import finish, start_receive, start_send


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """One tied parameter as this process sees it.

    Attributes:
        name: original name.
        copies: this process's tensors that hold the parameter, one per device.
        accumulators: what this process's layers read, in layer order; they share memory with a copy and collect the
            gradient.
        ranks: ranks with a using layer, ascending, which is layer order too.
    """

    name: str
    copies: tuple[torch.nn.Parameter, ...]
    accumulators: tuple[Tensor, ...]
    ranks: tuple[int, ...]


def accumulator_of(parameter: torch.nn.Parameter) -> Tensor:
    """A leaf that shares the parameter's memory but has a gradient of its own."""
    return parameter.detach().requires_grad_(parameter.requires_grad)


def sum_gradients(tied: Sequence[TiedParameter], rank: int) -> None:
    """Add each tied parameter's gradient of this step to `.grad` of its copies, and empty the accumulators."""
    for position, parameter in enumerate(tied):
        total = _total(parameter, rank, tag=position)
        for copy in parameter.copies:
            if copy.requires_grad and total is not None:
                share = total.to(copy.device)
                copy.grad = share.clone() if copy.grad is None else copy.grad + share
        for accumulator in parameter.accumulators:
            accumulator.grad = None


def _total(parameter: TiedParameter, rank: int, tag: int) -> Tensor | None:
    """The sum over all using layers, on every rank that has one."""
    gradients = [accumulator.grad for accumulator in parameter.accumulators if accumulator.grad is not None]
    if len(parameter.ranks) == 1:
        return _fold(None, gradients)
    like = parameter.accumulators[0]
    if not like.requires_grad:
        return None
    place = parameter.ranks.index(rank)
    partial = None
    if place > 0:
        partial = torch.empty_like(like, requires_grad=False)
        finish(start_receive([partial], source=parameter.ranks[place - 1], tag=tag))
    total = _fold(partial, gradients)
    if total is None:
        total = torch.zeros_like(like, requires_grad=False)
    if rank != parameter.ranks[-1]:
        finish(start_send([total], to=parameter.ranks[place + 1], tag=tag))
        total = torch.empty_like(total)
        finish(start_receive([total], source=parameter.ranks[-1], tag=tag))
    else:
        for other in parameter.ranks[:-1]:
            finish(start_send([total], to=other, tag=tag))
    return total


def _fold(first: Tensor | None, gradients: Sequence[Tensor]) -> Tensor | None:
    total = first
    for gradient in gradients:
        total = gradient if total is None else total + gradient.to(total.device)
    return total


def ranks_of(layers: Sequence[int], rank_of_layer: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks of the given layers, ascending, each once."""
    return tuple(sorted({rank_of_layer[layer] for layer in layers}))
