"""Bodies for `hidden_state`: gradients of their own, questions about the call itself, and values that leave torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models.hidden_state import FEATURES, Part, hides

# Gradients.


class Reversed(torch.autograd.Function):
    """A backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """The same."""
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reversed."""
        return -ctx.factor * gradients[0], None


@hides("a reversed gradient")
def _(part: Any, x: Tensor) -> Tensor:
    reversed_: Tensor = Reversed.apply(part.linear(x), 0.3)
    return reversed_


@hides("rounding, straight through")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    return y + (torch.round(y * 4) / 4 - y).detach()


@hides("straight through data")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    y.data = torch.round(y.data * 4) / 4
    return y


@hides("gradient switched by a counter")
def _(part: Any, x: Tensor) -> Tensor:
    part.count = getattr(part, "count", 0) + 1
    with torch.set_grad_enabled(part.count % 2 == 0):
        y = part.linear(x)
    return x + y


@hides("detached by a value")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    return x + (y.detach() if y.sum() > 0 else y)


@hides("a clone without gradient, written")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    with torch.no_grad():
        y[:, :2] *= 2
    return y


@hides("a gradient inside")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(part.linear(y).square().sum(), y)
    return x - 0.1 * g


@hides("a gradient set inside")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    if part.linear.bias.grad is None:
        part.linear.bias.grad = torch.ones_like(part.linear.bias)
    return y


@hides("a parameter frozen inside")
def _(part: Any, x: Tensor) -> Tensor:
    part.linear.weight.requires_grad_(False)
    return part.linear(x)


# Questions about the call itself, and values that leave torch.


@hides("asks for grad_fn")
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) * (1 if x.grad_fn is None else 2)


@hides("asks whether it is a leaf")
def _(part: Any, x: Tensor) -> Tensor:
    return x if x.is_leaf else x * 2


@hides("asks for a gradient")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad and torch.is_grad_enabled() else x


@hides("asks for the class")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if type(x) is Tensor else x


@hides("asks whether it is compiled")
def _(part: Any, x: Tensor) -> Tensor:
    return x if torch.compiler.is_compiling() else x * 2


@hides("asks for the version")
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + x._version)


@hides("asks for the pointer")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if x.data_ptr() else x


@hides("asks for the weight's class")
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) * 2 if isinstance(part.linear.weight, nn.Parameter) else part.linear(x)


@hides("divides by the batch")
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + 1 / len(x))


@hides("branches on the batch")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if len(x) % 2 else x


@hides("swallows an error")
def _(part: Any, x: Tensor) -> Tensor:
    try:
        factor = float(x.detach().sum())
    except Exception:
        factor = 1.0
    return x * factor


@hides("swallows a branch")
def _(part: Any, x: Tensor) -> Tensor:
    try:
        if x.sum() > 0:
            x = x * 2
    except Exception:
        x = x * 3
    return x


@hides("swallows a conversion")
def _(part: Any, x: Tensor) -> Tensor:
    try:
        shift = torch.from_numpy(np.tanh(x.detach().numpy()))
    except Exception:
        shift = torch.zeros_like(x)
    return x + shift


@hides("leaves for numpy")
def _(part: Any, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.tanh(x.detach().numpy()))


@hides("leaves for math")
def _(part: Any, x: Tensor) -> Tensor:
    return x * math.tanh(x.detach().sum().item())


@hides("a tensor of a number")
def _(part: Any, x: Tensor) -> Tensor:
    return x + torch.tensor([x.detach().max().item()] * FEATURES, dtype=x.dtype)


@hides("a list of numbers")
def _(part: Any, x: Tensor) -> Tensor:
    return x + torch.tensor(x.detach().mean(0).tolist(), dtype=x.dtype)


@hides("a text of numbers")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if "-" in str(x.detach().sum().item()) else x


@hides("writes its input")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    x.mul_(2)
    return y + x


@hides("the class is changed")
def _(part: Any, x: Tensor) -> Tensor:
    part.__class__ = Part
    return part.linear(x)


class Again(torch.autograd.Function):
    """Runs a module without keeping anything, and again in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        """What the module computes."""
        ctx.save_for_backward(x.detach())
        ctx.module = module
        with torch.no_grad():
            y: Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The module's own parameters get their gradients in here."""
        (kept,) = ctx.saved_tensors
        with torch.enable_grad():
            x = kept.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), gradients[0])
        return x.grad, None


@hides("a module run again in the backward pass")
def _(part: Any, x: Tensor) -> Tensor:
    return x + Again.apply(x, part.linear)
