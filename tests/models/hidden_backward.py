"""Bodies for `hidden_state`: random numbers that are drawn in the backward pass."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint

from tests.models.hidden_state import OUTSIDE, helper, hides

# As functions with a backward pass of their own.


class Shaken(torch.autograd.Function):
    """A branch with another random weight in the backward pass, as shake-shake has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """A random mean of both."""
        share = torch.rand(())
        return share * x + (1 - share) * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Another one."""
        share = torch.rand_like(gradients[0])
        return share * gradients[0], (1 - share) * gradients[0]


class Rounded(torch.autograd.Function):
    """The gradient rounded at random; in the forward pass nothing is random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Up or down."""
        return torch.floor(gradients[0] * 8 + torch.rand_like(gradients[0])) / 8


class ByPython(torch.autograd.Function):
    """A factor of Python's generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times a factor."""
        return gradients[0] * random.uniform(0.5, 1.5)


class ByNumpy(torch.autograd.Function):
    """A factor of numpy's generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times factors."""
        return gradients[0] * torch.from_numpy(np.random.uniform(0.5, 1.5, gradients[0].shape))


class ByItsOwn(torch.autograd.Function):
    """Factors of generators that the file holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times factors."""
        factor = OUTSIDE.chance.random() + OUTSIDE.numpy.random() + OUTSIDE.legacy.rand()
        return gradients[0] * (factor + torch.rand(1, generator=OUTSIDE.torch, dtype=torch.float64))


class AtTimes(torch.autograd.Function):
    """Draws for some gradients alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times factors, if it is of this sign."""
        return gradients[0] * (torch.rand_like(gradients[0]) if gradients[0].sum() > 0 else 1)


class Unseeded(torch.autograd.Function):
    """A factor that nobody can draw again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Times a factor."""
        return gradients[0] * random.SystemRandom().random()


_FUNCTIONS = {
    "rounded at random": Rounded,
    "of Python's numbers": ByPython,
    "of numpy's numbers": ByNumpy,
    "of numbers of its own": ByItsOwn,
    "of numbers drawn at times": AtTimes,
    "of numbers of the system": Unseeded,
}


def _sort_in(name: str, function: Any) -> None:
    @hides(f"a gradient {name}", draws=True)
    def _(part: Any, x: Tensor) -> Tensor:
        result: Tensor = function.apply(part.linear(x))
        return result

    @hides(f"a gradient {name}, in a module called as it is", draws=True)
    def _(part: Any, x: Tensor) -> Tensor:
        result: Tensor = function.apply(part.linear(x))
        return result + torch.from_numpy(np.tanh(x.detach().numpy()))


for _name, _function in _FUNCTIONS.items():
    _sort_in(_name, _function)


@hides("a shaken mean", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Shaken.apply(part.linear(x), x)
    return result


@hides("a shaken mean of dropped values", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Shaken.apply(torch.dropout(part.linear(x), 0.3, True), torch.dropout(x, 0.3, True))
    return torch.dropout(result, 0.2, True)


@hides("a shaken mean, in a module called as it is", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Shaken.apply(part.linear(x), x)
    return result + torch.from_numpy(np.tanh(x.detach().numpy()))


# As hooks, which only what is called as it is may have.


def noise(gradient: Tensor) -> Tensor:
    """Added to a gradient."""
    return gradient + 0.1 * torch.randn_like(gradient)


@hides("noise by a hook", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    y.register_hook(noise)
    return y


@hides("noise by a hook of what it takes", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    x.register_hook(noise)
    return part.linear(x)


@hides("noise by a hook of a weight", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    if not getattr(part, "hooked", False):
        part.linear.weight.register_hook(noise)
        part.hooked = True
    return part.linear(x)


@hides("noise by a hook of a weight in each call", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    part.linear.weight.register_hook(noise)
    return part.linear(x)


@hides("noise by a hook of a node", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    y.grad_fn.register_prehook(lambda gradients: tuple(map(noise, gradients)))
    return y


def _draw(_: Any) -> None:
    torch.rand(3)


@hides("noise by a hook of many", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    z = torch.tanh(y)
    torch.autograd.graph.register_multi_grad_hook((y, z), _draw)
    y.register_hook(noise)
    return z


def _full_hook(part: Any) -> None:
    part.linear.register_full_backward_hook(lambda _, entering, __: tuple(map(noise, entering)))


@hides("noise by a module's hook", _full_hook, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _full_pre_hook(part: Any) -> None:
    part.linear.register_full_backward_pre_hook(lambda _, leaving: tuple(map(noise, leaving)))


@hides("noise before a module's backward pass", _full_pre_hook, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _parameter_hook(part: Any) -> None:
    part.linear.weight.register_hook(noise)


@hides("noise by a parameter's hook", _parameter_hook, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


@hides("noise in what is unpacked", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.clone(), noise):
        return torch.tanh(part.linear(x))


@hides("noise in what is packed", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(noise, lambda kept: kept):
        return torch.tanh(part.linear(x))


# By torch's own recompute.


def _dropped(part: Any, x: Tensor) -> Tensor:
    return torch.dropout(part.linear(x), 0.4, True)


@hides("recomputed with other numbers", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint.checkpoint(_dropped, part, x, use_reentrant=False, preserve_rng_state=False)
    return result


@hides("recomputed with other numbers, called as it is", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint.checkpoint(_dropped, part, x, use_reentrant=False, preserve_rng_state=False)
    return result + torch.from_numpy(np.tanh(x.detach().numpy()))


@hides("recomputed with the same numbers, called as it is", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint.checkpoint(_dropped, part, x, use_reentrant=False)
    return result + torch.from_numpy(np.tanh(x.detach().numpy()))


@hides("recomputed by the old way", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint.checkpoint(_dropped, part, x, use_reentrant=True, preserve_rng_state=False)
    return result


# As an operation that somebody has defined, with a backward pass of its own.


@torch.library.custom_op("hidden_backward::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """The same."""
    return x.clone()


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, gradient: noise(gradient), setup_context=lambda ctx, inputs, output: None)


@hides("noise of somebody's operation", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = noisy(part.linear(x))
    return result


@hides("noise of somebody's operation, called as it is", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = noisy(part.linear(x))
    return result + torch.from_numpy(np.tanh(x.detach().numpy()))


@hides("a hook that counts", helper)
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    y.register_hook(lambda gradient: gradient * (1 + part.helper.calls))
    part.helper.calls = 0 if part.helper.calls else 1
    return y
