"""Random models of modules in modules: residual, in loops, called twice or by two names, cut off from gradients.

What a module reads itself it reads before it calls another, so that the order of calls is that of all parameters.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

WIDTH = 6


class Nested(nn.Module):
    """Calls its parts one after the other, in one of the ways that models do."""

    def __init__(self, kind: str, parts: list[nn.Module]) -> None:
        super().__init__()
        self.kind, self.first, self.items = kind, parts[0], nn.ModuleList(parts[1:])
        if kind == "own":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        if kind == "two names":
            self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight) if self.kind == "own" else x
        if self.kind == "no_grad":
            with torch.no_grad():
                y = self.first(y)
            y = x + y
        elif self.kind == "tuple":
            halves = self.first(y).chunk(2, -1)
            y = torch.cat([halves[1], halves[0]], -1)
        elif self.kind == "views":
            y = self.first(y) * 1.0
            written = y[:, :2]
            written.mul_(self.items[0](x)[:, :2])
        else:
            y = self.first(y)
        for item in self.items:
            y = item(y)
        if self.kind in ("twice", "two names"):
            y = self.first(y) if self.kind == "twice" else self.again(y)
        if self.kind == "in place":
            y = torch.sin(y)
            y += x
        return x + y if self.kind == "residual" else y


KINDS = ("plain", "residual", "in place", "views", "tuple", "no_grad", "own", "twice", "two names")


def random_nested(chance: random.Random, depth: int = 2) -> nn.Module:
    """A model that takes and gives `WIDTH` features.

    Args:
        chance: decides everything but values.
        depth: of modules in modules, at most.
    """
    if not depth or chance.random() < 0.2:
        return chance.choice((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LeakyReLU(0.1, True)))
    parts = [random_nested(chance, depth - 1) for _ in range(chance.randint(2, 3))]
    wide = nn.Sequential(nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH))
    return Nested(chance.choice(KINDS), [wide, *parts] if depth > 1 and chance.random() < 0.5 else parts)
