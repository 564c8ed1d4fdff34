"""Four models with all that pipelines have to keep, and three steps of training of each."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import Plan
from profiler import LayerSequence, trace

BATCH_SIZE = 10  # with M = 4: micro-batches of 3, 3, 2, 2
M = 4


class ResidualCNN(nn.Module):
    """Batch normalization, an in-place activation, a skip connection and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(8)
        self.activation = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(x))
        x = self.activation(x + y)
        return self.head(self.dropout(x.mean((2, 3))))


class SharedValue(nn.Module):
    """One value with many readers, one weight used three times, a long skip, a written buffer and integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1
        self.embedding = nn.Embedding(20, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        start = self.embedding(ids) * mask.unsqueeze(-1)
        x = start
        for linear in self.linears:
            x = functional.dropout(torch.tanh(linear(x) @ self.weight), self.dropout, self.training) + start
            self.calls.add_(x.detach().mean((0, 1)))
        return (x @ self.embedding.weight.t()) * mask.unsqueeze(-1) + start.mean((1, 2), keepdim=True)


class Layouts(nn.Module):
    """Values that cross cuts transposed, sliced and expanded; reductions over them in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(12, 1))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.linear(x)).chunk(2, dim=-1)
        turned = self.norm((left * right.sigmoid()).transpose(1, 2)) * self.scale.expand(x.shape[0], 12, 7)
        return self.head(turned + right.transpose(1, 2)).mean(1)


@dataclass(frozen=True)
class Case:
    """A model with a batch to train it on."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Tensor]
    inputs: tuple[Tensor, ...]
    target: Tensor


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def demo_gpt() -> GPT:
    return GPT(Config(context=16, width=32, heads=4, blocks=2))


def case(name: str) -> Case:
    torch.manual_seed(1)
    if name == "gpt":
        ids = torch.randint(256, (BATCH_SIZE, 16))
        return Case(demo_gpt, next_token_loss, (ids,), torch.randint(256, (BATCH_SIZE, 16)))
    if name == "cnn":
        images = torch.randn(BATCH_SIZE, 3, 8, 8)
        return Case(ResidualCNN, functional.cross_entropy, (images,), torch.randint(10, (BATCH_SIZE,)))
    if name == "layouts":
        return Case(
            Layouts, functional.cross_entropy, (torch.randn(BATCH_SIZE, 7, 12),), torch.randint(5, (BATCH_SIZE,))
        )
    ids, mask = torch.randint(20, (BATCH_SIZE, 6)), torch.rand(BATCH_SIZE, 6) > 0.3
    return Case(SharedValue, token_loss, (ids, mask), torch.randint(20, (BATCH_SIZE, 6)))


CASES = ["gpt", "cnn", "shared", "layouts"]


@dataclass(frozen=True)
class Trained:
    """What three steps of training leave behind."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    evaluated: float | None


@cache
def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model.state_dict())


def model_of(case: Case) -> nn.Module:
    """The model as it was made; the same object each time, so that pipelines can share its trace."""
    model, state = made(case.make)
    model.load_state_dict(state)
    model.zero_grad()
    return model


@cache
def traced(name: str) -> LayerSequence:
    """The layers of a case's model."""
    current = case(name)
    return trace(model_of(current), current.inputs)


def train(plan: Plan, case: Case, steps: int = 3, *, evaluates: bool = True, **settings: Any) -> Trained:
    pipe = Pipeline(model_of(case), plan, loss_fn=case.loss_fn, **settings)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(*case.inputs, target=case.target).item())
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
    evaluated = pipe.evaluate(*case.inputs, target=case.target).item() if evaluates else None
    return Trained(losses, gradients, {name: value.clone() for name, value in pipe.state_dict().items()}, evaluated)


def assert_same(part: Trained, whole: Trained) -> None:
    """Losses equal, and every tensor of a (part of a) pipeline equal in every bit."""
    assert part.losses == whole.losses
    assert part.evaluated == whole.evaluated
    for name, gradient in part.gradients.items():
        assert torch.equal(gradient, whole.gradients[name]), name
    for name, value in part.state.items():
        assert torch.equal(value, whole.state[name]), name


def random_segments(chance: random.Random, first: int, stop: int) -> list[tuple[int, int]]:
    """Disjoint runs of layers of a stage, some with layers between them, some without."""
    borders = sorted(chance.sample(range(first, stop + 1), min(stop + 1 - first, chance.randint(2, 5))))
    return [bounds for bounds in pairwise(borders) if chance.random() < 0.7]
