"""Tied parameters: one accumulator per using layer, summed in layer order at the end of a step.

A parameter that several layers read (an embedding and the output head) would otherwise add up its gradients in an
order that depends on the cut: per micro-batch where its users share a stage, per stage where they do not. With one
accumulator per layer the sum is always ((g of its 1st layer + g of its 2nd layer) + ...), each summed over
micro-batches before. Where its users lie in several processes, the partial sum travels along them and the total back:

    process 0   layer 0 -----> + layer 9 -----+----> total
    process 1          + layer 5 ----^        +----> total

Beside it goes whether there is one: what no sample reached has no gradient, as in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from profiler.machine.channel import finish, start_receive, start_send

_FIRST_TAG = 1023 * 2**21  # after all tags of messages between stages, see executor.run.transport
_TAGS_PER_PARAMETER = 1024  # two for each link of its chain


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """One tied parameter as this process sees it.

    Attributes:
        name: original name.
        number: among all tied parameters of the model.
        copies: this process's tensors that hold the parameter, or its gradient, one per device.
        accumulators: what this process's layers read, in layer order; they share memory with a copy and collect the
            gradient.
        users: the process of each using layer, in layer order.
    """

    name: str
    number: int
    copies: tuple[Tensor, ...]
    accumulators: tuple[Tensor, ...]
    users: tuple[int, ...]


def accumulator_of(parameter: Tensor) -> Tensor:
    """A leaf that shares the parameter's memory but has a gradient of its own."""
    return parameter.detach().requires_grad_(parameter.requires_grad)


def sum_gradients(tied: Sequence[TiedParameter], process: int) -> None:
    """Add each tied parameter's gradient of this step to `.grad` of its copies, and empty the accumulators."""
    for parameter in tied:
        total = _total(parameter, process)
        for copy in parameter.copies:
            if copy.requires_grad and total is not None:
                share = total.to(copy.device)  # one of them, with one copy a device, is the total itself
                copy.grad = share if copy.grad is None else copy.grad.add_(share)


def dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that can be sent and added to any other; those of `nn.Embedding(sparse=True)` are sparse."""
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def forget_gradients(tied: Sequence[TiedParameter]) -> None:
    """Drop what a step that failed has left."""
    for parameter in tied:
        for accumulator in parameter.accumulators:
            accumulator.grad = None


def _total(parameter: TiedParameter, process: int) -> Tensor | None:
    """The sum over all using layers, in every process that has one."""
    processes = set(parameter.users)
    gradients = [dense(accumulator.grad) for accumulator in parameter.accumulators]
    for accumulator in parameter.accumulators:
        accumulator.grad = None
    if len(processes) == 1:
        return _fold(None, gradients)
    like = parameter.accumulators[0]
    if not like.requires_grad:
        return None
    tag = _FIRST_TAG + parameter.number * _TAGS_PER_PARAMETER
    chain = [(user, len(list(layers))) for user, layers in groupby(parameter.users)]
    total: Tensor | None = None
    for link, (user, layers) in enumerate(chain):
        if user == process:
            if link > 0:
                total = _received(like, chain[link - 1][0], tag + 2 * link)
            total = _fold(total, [gradients.pop(0) for _ in range(layers)])
            if link + 1 < len(chain):
                _send(total, like, [chain[link + 1][0]], tag + 2 * (link + 1))
    last = chain[-1][0]
    if process != last:
        return _received(like, last, tag)
    _send(total, like, sorted(processes - {last}), tag)
    return total


def _send(total: Tensor | None, like: Tensor, to: Sequence[int], tag: int) -> None:
    """Send a gradient of that parameter, or that there is none."""
    said = torch.tensor([total is not None], device=like.device, dtype=torch.uint8)
    message = [torch.zeros_like(like, requires_grad=False) if total is None else total, said]
    for other in to:
        finish(start_send(message, to=other, tag=tag))


def _received(like: Tensor, source: int, tag: int) -> Tensor | None:
    """What `_send` sends."""
    message = [torch.empty_like(like, requires_grad=False), torch.empty(1, device=like.device, dtype=torch.uint8)]
    finish(start_receive(message, source=source, tag=tag))
    total, said = message
    return total if said.item() else None


def _fold(first: Tensor | None, gradients: list[Tensor | None]) -> Tensor | None:
    """Their sum in order; the first one takes it up, and each is let go once it is added."""
    total = first
    while gradients:
        gradient = gradients.pop(0)
        if gradient is not None:
            total = gradient if total is None else total.add_(gradient.to(total.device))
    return total


def users_of(layers: Sequence[int], process_of_layer: Mapping[int, int]) -> tuple[int, ...]:
    """Processes of the given layers, in layer order."""
    return tuple(process_of_layer[layer] for layer in sorted(layers))
