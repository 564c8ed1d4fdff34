"""Random models within another that calls them as they are: they do what no trace can follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.random_models import FEATURES, Recipe, RecipeModel, loss_of, tensors_in

WAYS = ("looks", "copies", "forces", "replaces", "keeps")
"""It looks at a value and decides by it, works on a copy of what it takes, goes backward inside its forward pass, puts
others in the place of buffers, or keeps them in their own memory."""


def random_ways(chance: random.Random) -> str:
    """Some of them, in one word for each."""
    return " ".join(["looks", *(way for way in WAYS[1:] if chance.random() < 0.4)])


class Called(RecipeModel):
    """A recipe's model that looks at a value, and what else `ways` say.

    Args:
        recipe: of the model.
        ways: some of `WAYS`.
    """

    before: Tensor

    def __init__(self, recipe: Recipe, ways: str) -> None:
        super().__init__(recipe)
        self.ways = ways.split()
        self.energy = nn.Linear(FEATURES, 1, dtype=torch.float64)
        self.register_buffer("before", torch.ones(FEATURES, dtype=torch.float64))
        with torch.no_grad():
            self.energy.weight.copy_(torch.linspace(-1, 1, FEATURES))
            self.energy.bias.fill_(0.1)

    def forward(self, x: Tensor, ids: Tensor, make: bool = False) -> Any:
        if make:
            return super().forward(x, ids, make)
        assert float(x.detach().sum()) < 1e12
        added = torch.zeros_like(x)
        if "forces" in self.ways:
            with torch.enable_grad():
                at = x if x.requires_grad else x.detach().requires_grad_()
                added = torch.autograd.grad(torch.tanh(self.energy(at)).sum(), at, create_graph=True)[0]
        if "replaces" in self.ways:
            added = added + x * self.before
            self.before = self.before * 0.5 + x.detach().mean(0)
        elif "keeps" in self.ways:
            added = added + x * self.before.clone()
            self.before.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x.clone() if "copies" in self.ways else x, ids), added


class AroundCalled(nn.Module):
    """Layers around it; all that it returns is returned.

    Args:
        recipe: of the model inside.
        ways: in which that is one to call as it is.
    """

    def __init__(self, recipe: Recipe, ways: str) -> None:
        super().__init__()
        self.inner = Called(recipe, ways)
        self.first, self.second, self.third = (nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(3))
        with torch.no_grad():
            for number, parameter in enumerate((*self.first.parameters(), *self.second.parameters())):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) * (1.1 + number)).view_as(parameter) / 3)
            for parameter in self.third.parameters():
                parameter.copy_(torch.cos(torch.arange(parameter.numel()) * 0.7).view_as(parameter) / 3)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        value = torch.tanh(self.first(x))
        returned, added = self.inner(value, ids)
        some = next(tensor for tensor in tensors_in(returned) if tensor.is_floating_point())
        value = value + 0.1 * torch.tanh(some.flatten(1).sum(1, keepdim=True)) + 0.1 * added
        return returned, self.third(torch.tanh(self.second(value)))


def loss_around(recipe: Recipe) -> Callable[[Any, Tensor], Tensor]:
    """The recipe's loss, and one of what comes after it."""
    inside = loss_of(recipe)

    def loss_fn(returned: Any, target: Tensor) -> Tensor:
        inner, last = returned
        return inside(inner, target) + (last.mean(1) - target).pow(2).mean()

    return loss_fn
