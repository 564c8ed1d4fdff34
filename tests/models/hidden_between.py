"""Bodies for `hidden_state`: what a call keeps in attributes for its own backward pass, or for the next call.

Reversible networks keep the state of the random generator so. Between a forward and its backward pass there are calls
of other micro-batches, which keep something else in the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.hidden_state import OFTEN, hides


class Scaled(torch.autograd.Function):
    """Its backward pass asks the module that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Any) -> Tensor:
        """The same."""
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Scaled by what the module has kept."""
        return gradients[0] * ctx.part.kept.mean().tanh(), None


class Again(torch.autograd.Function):
    """Runs a linear layer with noise, and once more, with the same noise, in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Any) -> Tensor:
        """Without a graph."""
        ctx.part = part
        ctx.save_for_backward(x)
        part.chance = torch.get_rng_state()
        with torch.no_grad():
            return noisy(part, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Of the same noise."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.part.chance)
            y = noisy(ctx.part, x)
        torch.autograd.backward(y, gradients[0])
        return x.grad, None


def noisy(part: Any, x: Tensor) -> Tensor:
    """A linear layer of what is dropped in part."""
    y: Tensor = part.linear(torch.nn.functional.dropout(x, 0.5))
    return y


@hides("kept for the backward pass")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    part.kept = y.detach()
    scaled: Tensor = Scaled.apply(y, part)
    return scaled


@hides("the state of a generator, kept for the backward pass", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    again: Tensor = Again.apply(x, part)
    return again


@hides("kept for a hook")
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.linear(x)
    part.kept = x.detach()
    y.register_hook(lambda gradient: gradient * part.kept.mean().tanh())
    return y


@hides("kept for the backward pass of another call")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    earlier = getattr(part, "kept", y.detach())
    part.kept = (y.detach() + earlier) / 2
    scaled: Tensor = Scaled.apply(y, part)
    return scaled


@hides("kept for the next call")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    z = y + 0.1 * getattr(part, "last", y.detach() * 0).mean()
    part.kept = part.last = y.detach()
    scaled: Tensor = Scaled.apply(z, part)
    return scaled


@hides("kept by the first call alone")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    part.first = getattr(part, "first", part.linear.weight.detach().clone())
    part.kept = y.detach()
    scaled: Tensor = Scaled.apply(y * part.first.mean(), part)
    return scaled


@hides("kept for the backward pass, and counted")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    part.kept = y.detach()
    part.count = getattr(part, "count", 0) + 1
    scaled: Tensor = Scaled.apply(y * (2.0 if part.count > OFTEN else 1.0), part)
    return scaled


@hides("kept in a list for the backward pass")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    part.held = getattr(part, "held", [None])
    part.held[0] = y.detach()
    part.kept = part.held[0]
    scaled: Tensor = Scaled.apply(y, part)
    return scaled


# What a call leaves in a buffer.


def _has_last(part: Any) -> None:
    part.register_buffer("last", torch.zeros(0, dtype=torch.float64), persistent=False)


@hides("a buffer of the last call that nothing reads", _has_last)
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.linear(x)
    part.last = y.detach()
    part.kept = y.detach()
    return y


@hides("a buffer of the last call, read in evaluation", _has_last)
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.linear(x)
    if not part.training:
        return y + part.last.mean()
    part.last = y.detach()
    part.kept = y.detach()
    return y


@hides("a buffer of the last call, read in the next", _has_last)
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.linear(x)
    z = y + part.last.sum().tanh()
    part.last = y.detach()
    part.kept = y.detach()
    return z
