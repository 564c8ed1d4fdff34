"""Draws of random numbers by their position in the whole graph, however it is cut into layers.

A layer's code says before each of its drawing operations which of its draws comes now, and whoever runs the layer may
seed the generators by that. Code of somebody's (a function with a backward pass of its own, a hook) may draw in the
backward pass, too; what it returns passes a node of ours, which seeds the generators before it:

    forward pass     before_draw(3)  --->  function  --->  node
    backward pass                          function  <---  node: seeds by 3, in the backward pass

Torch's engine takes the latest node first, so after ours come all that the function has made, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.observe.drawn_from import of_operation
from profiler.observe.random_states import Generator
from profiler.torch_private import OpOverload


class Seeder(Protocol):
    """Seeds the random generators by the number of a draw in the whole graph, from 0, before it takes place."""

    def __call__(self, draw: int) -> None:
        """In the forward pass."""

    def in_backward(self, draw: int, part: int, others: Sequence[Generator]) -> None:
        """In the backward pass of a part of that draw, other generators than torch's too."""


_OF_TORCH = frozenset({"aten", "prims", "prim", "gpipe_autoplan", "quantized", "higher_order", "inductor"})


@dataclass(slots=True)
class _Now:
    """Who seeds, and what draws now; `parts` of it have passed."""

    seed: Seeder
    earlier: int
    number: int = 0
    parts: int = 0


_NOW: ContextVar[_Now | None] = ContextVar("who seeds, and draws of earlier layers", default=None)


def before_draw(number: int) -> None:
    """Stands in the code of layers.

    Args:
        number: of the layer's own draws that came before.
    """
    now = _NOW.get()
    if now is not None:
        now.number, now.parts = now.earlier + number, 0
        now.seed(now.number)


def draws_seeded_by(seed: Seeder | None, earlier: int) -> None:
    """From now on, in this thread, have draws seeded.

    Args:
        seed: None for nobody.
        earlier: draws in the layers before the one that runs next.
    """
    _NOW.set(None if seed is None else _Now(seed, earlier))


def keyed_backward(values: tuple[Tensor, ...], others: Sequence[Generator] = ()) -> tuple[Tensor, ...]:
    """What somebody's code returns; the random numbers of its backward pass are keyed, if those of draws are.

    Args:
        values: all that it returns. Those with a gradient are others then, in the same memory.
        others: generators other than torch's that it may draw from.
    """
    now = _NOW.get()
    trained = torch.is_grad_enabled() and any(value.requires_grad for value in values)
    if now is None or not trained:
        return values
    # A node for each: behind one for all, what leads to a value that the loss does not read would be run through.
    passed = [
        _Node.apply(now.seed, now.number, now.parts, others, value)  # type: ignore[no-untyped-call]
        if value.requires_grad
        else value
        for value in values
    ]
    now.parts += 1
    return tuple(passed)


def keyed_operation(operation: Any, value: Any) -> Any:
    """Stands in the code of layers, after an operation of somebody's: `keyed_backward` of what it returns."""
    found, tree = pytree.tree_flatten(value)
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    keyed = iter(keyed_backward(tuple(tensors), of_operation(operation).generators))
    return pytree.tree_unflatten([next(keyed) if isinstance(leaf, Tensor) else leaf for leaf in found], tree)


def has_foreign_backward(operation: Any) -> bool:
    """Whether it is an operation of somebody's, whose backward pass may run code of Python's."""
    return isinstance(operation, OpOverload) and operation.namespace not in _OF_TORCH


class _Node(torch.autograd.Function):
    """The identity, which seeds the generators in the backward pass."""

    @staticmethod
    def forward(ctx: Any, seed: Seeder, draw: int, part: int, others: Sequence[Generator], value: Tensor) -> Any:
        ctx.set_materialize_grads(False)  # none is not zero
        ctx.seed = lambda: seed.in_backward(draw, part, others)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.seed()
        return (None, None, None, None, gradient)
