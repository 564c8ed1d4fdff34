"""Modules whose backward pass runs them again, as reversible networks do: with which parameters, and whose gradients.

A custom function that is given a module (`Reversible.apply(x, self.blocks)`) runs it once more in its backward pass,
and there the module's own parameters get their gradients. A layer has others in their place, so these stand there then,
too. So is what the call has kept in attributes for its backward pass (the state of a random generator): calls of other
micro-batches come between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.observe.standing_in import standing_in

Run = Callable[[Sequence[Any]], tuple[tuple[Tensor, ...], Mapping[str, Any]]]
"""Of the values, what it returns, and the attributes that it has changed."""


class Module(Protocol):
    """A module with the names of its parameters and buffers."""

    module: nn.Module

    @property
    def names(self) -> Sequence[str]:
        """Of parameters and buffers, which are the first values."""

    def as_left(self, left: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Within, these attributes are as a call has left them."""


def takes_objects(args: Any, kwargs: Any) -> bool:
    """Whether a custom function is given what may run again in its backward pass: a module, or what holds one."""
    plain = (Tensor, torch.SymInt, torch.device, torch.dtype, bool, int, float, complex, str, bytes, slice)
    return any(leaf is not None and not isinstance(leaf, plain) for leaf in pytree.tree_leaves((args, kwargs)))


def _no_leaf(value: Any) -> Any:
    """The value as in the midst of a graph: what a backward pass puts into a leaf's `.grad` would be added to."""
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


class RunAgain(torch.autograd.Function):
    """A call of a module, whose gradients come of a graph of its own."""

    @staticmethod
    def forward(ctx: Any, run: Run, held: Module, *values: Any) -> tuple[Tensor, ...]:
        """Call it.

        Args:
            ctx: of the backward pass.
            run: takes the values.
            held: the module that it calls.
            values: tensors and numbers.
        """
        leaves = [
            value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value
            for value in values
        ]
        own = len(held.names)
        with torch.enable_grad():
            outputs, left = run([*leaves[:own], *(_no_leaf(leaf) for leaf in leaves[own:])])
        ctx.held, ctx.left, ctx.leaves, ctx.outputs = held, left, leaves, outputs
        ctx.mark_non_differentiable(*(output for output in outputs if not output.requires_grad))
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Its graph's own backward pass, in which the module has the parameters of the call."""
        pairs = [(o, g) for o, g in zip(ctx.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        own = dict(zip(ctx.held.names, ctx.leaves, strict=False))
        if pairs:
            with standing_in(ctx.held.module, own), ctx.held.as_left(ctx.left):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        found = [leaf.grad if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in ctx.leaves]
        return (None, None, *found)
