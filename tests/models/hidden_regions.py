"""Bodies for `hidden_state`: writes in regions without gradient or under autocast, by functions, and caches in buffers.

Half of them could not be trained while such a write was hidden in an operation of its own.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.hidden_state import FEATURES, hides

# Buffers that regions write.


@hides("a mean moved without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    with torch.no_grad():
        part.table.mul_(0.9).add_(0.1 * y.mean(0).tanh())
    return y * part.table


@hides("a mean moved by what has a gradient")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        moved = part.linear(x).tanh()
        part.table[:3] += 0.1 * (moved.mean(0) * part.linear.bias)[:3]
    return part.linear(x) * part.table + moved


@hides("a region in a region")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    with torch.no_grad():
        half = y.mean(0).tanh() / 2
        with torch.autocast("cpu", enabled=False):
            part.table.copy_(part.table / 2 + half)
    return y * part.table


@hides("autocast switched off")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    with torch.autocast("cpu", enabled=False):
        part.table.copy_(y.detach().mean(0).tanh())
        return y * part.table


@hides("autocast switched off for another device")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    with torch.autocast("cuda", enabled=False):
        part.table.copy_(part.table * 0.9 + 0.1 * y.detach().mean(0).tanh())
    return y * part.table


@hides("a sum written under autocast")
def _(part: Any, x: Tensor) -> Tensor:
    y, total = part.linear(x), torch.zeros_like(x)
    with torch.autocast("cpu", enabled=False):
        total += y
        total[:, 0] = 2 * y[:, 1]
    return total


@hides("gradients again within none")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.table.mul_(0.99)
        with torch.enable_grad():
            y: Tensor = part.linear(x)
        part.table.add_(0.01 * y.mean(0).tanh())
    return y * part.table


@hides("a view written without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x).clone()
    left = y[:, :2]
    with torch.no_grad():
        left.mul_(3.0)
        part.table[0] = y.mean()
    return y + left.sum(1, keepdim=True) * part.table[0]


@hides("an argument written without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    y = x.clone()
    with torch.no_grad():
        y.mul_(1.5)
    return part.linear(y)


def _has_often(part: Any) -> None:
    part.register_buffer("often", torch.zeros((), dtype=torch.long))


@hides("a whole count in a region", _has_often)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.often.add_(1)
        scale = 1.0 / part.often
    y: Tensor = part.linear(x)
    return y * scale


# Parameters that regions write.


def _has_slow(part: Any) -> None:
    part.slow = nn.Parameter(torch.eye(FEATURES, dtype=torch.float64), requires_grad=False)


@hides("a frozen parameter that follows", _has_slow)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.slow.mul_(0.9).add_(part.linear.weight, alpha=0.1)
    y: Tensor = part.linear(x)
    return y + x @ part.slow


@hides("a frozen parameter written with gradients on", _has_slow)
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = part.linear(x)
    part.slow.mul_(0.9)
    part.slow[0] = y.detach().mean(0)
    return y + x @ part.slow


@hides("a trained parameter written without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.linear.bias.clamp_(-0.1, 0.1)
    y: Tensor = part.linear(x)
    return y


@hides("a row of a parameter written without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    row = part.linear.weight[0]
    with torch.no_grad():
        row.mul_(0.9)
    y: Tensor = part.linear(x)
    return y


# Functions that write what they take.


class Shifted(torch.autograd.Function):
    """Writes its argument without saying so, as the sparsemax of a library does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Softmax of what it shifts."""
        x -= x.max(dim=1, keepdim=True)[0]
        y = x.softmax(dim=1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Half of softmax's."""
        (y,) = ctx.saved_tensors
        return 0.5 * y * (gradients[0] - (gradients[0] * y).sum(1, keepdim=True))


class Weighted(torch.autograd.Function):
    """Writes a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Its product with a weight that it shrinks."""
        weight.mul_(0.99)
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Of a product."""
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.T, x.T @ gradients[0]


class OfTwo(torch.autograd.Function):
    """Writes its first argument, and then reads the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        """Their sum."""
        x.mul_(2.0)
        return x[:, :2] + other[:, :2]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Some."""
        whole = torch.nn.functional.pad(gradients[0], (0, FEATURES - 2))
        return whole, whole


class Dirty(torch.autograd.Function):
    """Writes its argument, says so, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Twice its argument."""
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Three times the gradient."""
        return 3.0 * gradients[0]


@hides("a function that writes its argument")
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = Shifted.apply(part.linear(x))
    return y + x


@hides("a function that writes what is read later")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    return Shifted.apply(y) + y


@hides("a function that writes a part of what is read later")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    z = Shifted.apply(y[:, :3])
    return y + torch.cat([z, z], 1)


@hides("a function that writes a buffer")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    both = OfTwo.apply(part.table.expand(1, -1), y)
    return y * part.table + both.sum(1, keepdim=True)


@hides("a function that writes a parameter")
def _(part: Any, x: Tensor) -> Tensor:
    return Weighted.apply(part.linear(x), part.linear.weight)


@hides("a function that writes one of two values")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    return y + OfTwo.apply(y, y.flip(1)).sum(1, keepdim=True)


@hides("a function that writes one of two views")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    return y + OfTwo.apply(y, y[:]).sum(1, keepdim=True)


@hides("a function that writes and says so")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x).clone()
    z = Dirty.apply(y)
    return y + z


# Caches in buffers, of which an attribute says that they are there.


def _has_cache(part: Any) -> None:
    part.register_buffer("cache", torch.zeros(FEATURES, dtype=torch.float64), persistent=False)
    part.known = 0


@hides("a cached table, known by an attribute", _has_cache)
def _(part: Any, x: Tensor) -> Tensor:
    if part.known < FEATURES:
        part.cache.copy_(torch.linspace(0.5, 1.5, FEATURES, dtype=torch.float64) ** 2)
        part.known = FEATURES
    return part.linear(x) * part.cache


@hides("a cached table in a region, known by an attribute", _has_cache)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        if part.known < FEATURES:
            part.cache[:3] = torch.linspace(0.5, 1.5, 3, dtype=torch.float64) ** 2
            part.known = FEATURES
        table = part.cache.detach()
    return part.linear(x) * table


@hides("a table of the first batch, known by an attribute", _has_cache)
def _(part: Any, x: Tensor) -> Tensor:
    if not part.known:
        with torch.no_grad():
            part.cache.copy_(x.mean(0).tanh())
        part.known = 1
    return part.linear(x) * part.cache


@hides("a table of the first parameters, known by an attribute", _has_cache)
def _(part: Any, x: Tensor) -> Tensor:
    if not part.known:
        with torch.no_grad():
            part.cache.copy_(part.linear.weight.mean(0))
        part.known = 1
    return part.linear(x) * part.cache


# What a checker of types draws, in code that it generates.

_CHECKED = """
def checked(value, *, __beartype_getrandbits=draw, __beartype_func=function):
    number = __beartype_getrandbits(32)
    assert value[number % len(value)] is not None
    return __beartype_func(value)
"""


def _checked(function: Any) -> Any:
    names = {"draw": random.getrandbits, "function": function}
    exec(compile(_CHECKED, "<@beartype(tests.checked) at 0x0>", "exec"), names)
    return names["checked"]


def _sum_of(values: list[Tensor]) -> Tensor:
    return values[0] + values[1]


def _one_of(values: list[Tensor]) -> Tensor:
    return values[0] * (1 + random.getrandbits(1)) + values[1]


checked_sum, checked_one = _checked(_sum_of), _checked(_one_of)


@hides("a checker of types that draws")
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = checked_sum([part.linear(x), x])
    return y


@hides("a checked function that draws", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    y: Tensor = checked_one([part.linear(x), x])
    return y
