"""Modules whose backward pass runs them again, as reversible networks do: with which parameters, and whose gradients.

A custom function that is given a module (`Reversible.apply(x, self.blocks)`) runs it once more in its backward pass,
and there the module's own parameters get their gradients. A layer has others in their place, so these stand there then,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.observe.standing_in import standing_in

Run = Callable[[Sequence[Any]], tuple[Tensor, ...]]


def takes_objects(args: Any, kwargs: Any) -> bool:
    """Whether a custom function is given what may run again in its backward pass: a module, or what holds one."""
    plain = (Tensor, torch.SymInt, torch.device, torch.dtype, bool, int, float, complex, str, bytes, slice)
    return any(leaf is not None and not isinstance(leaf, plain) for leaf in pytree.tree_leaves((args, kwargs)))


class RunAgain(torch.autograd.Function):
    """A call of a module, whose gradients come of a graph of its own."""

    @staticmethod
    def forward(ctx: Any, run: Run, module: nn.Module, names: Sequence[str], *values: Any) -> tuple[Tensor, ...]:
        """Call it.

        Args:
            ctx: of the backward pass.
            run: takes the values.
            module: that it calls.
            names: of its parameters and buffers, which are the first values.
            values: tensors and numbers.
        """
        leaves = [
            value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value
            for value in values
        ]
        with torch.enable_grad():
            outputs = run(leaves)
        ctx.module, ctx.names, ctx.leaves, ctx.outputs = module, names, leaves, outputs
        ctx.mark_non_differentiable(*(output for output in outputs if not output.requires_grad))
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Its graph's own backward pass, in which the module has the parameters of the call."""
        pairs = [(o, g) for o, g in zip(ctx.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        own = dict(zip(ctx.names, ctx.leaves, strict=False))
        if pairs:
            with standing_in(ctx.module, own):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        found = [leaf.grad if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in ctx.leaves]
        return (None, None, None, *found)
