"""Small models that plans are exported for, traced and priced once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import profiler
from planner import Plan, plan_from_profile
from profiler.device import Cluster
from profiler.record import Profile
from profiler.tracing.sequence import LayerSequence

BATCH = 8
CLUSTER = Cluster.of("4xA100-40GB")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.relu(self.inner(x)))


class Decoder(nn.Module):
    """Goes on without the modules that it lacks, as models of torchtitan do."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.embed, *self.layers, self.norm, self.head):
            x = module(x) if module is not None else x
        return x


class Skipping(nn.Module):
    """A skip past all blocks, an input that the end reads, an output in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.decoder.norm = nn.Identity()  # type: ignore[assignment]  # which is not called

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        first = self.decoder.embed(x)
        y = first
        for block in self.decoder.layers:
            y = block(y)
        return {"logits": self.decoder.head(y + first) * scale}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class Counting(nn.Module):
    """Writes a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.relu(self.first(x)))


def norms() -> nn.Sequential:
    """Batch normalization in blocks of different size, and a child without operations of its own."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 3)
    )


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3))


def logits_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"], target)


def build_plain() -> tuple[nn.Module, Tensor]:
    """For the command: the model of the case `plain`, whose values do not matter."""
    return plain(), torch.zeros(BATCH, 6)


def build_decoder() -> tuple[nn.Module, Tensor]:
    """The same of the case `decoder`."""
    return Decoder(), torch.zeros(BATCH, 6)


@dataclass(frozen=True)
class Case:
    """A model with what it is trained on."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    sequence: LayerSequence
    profile: Profile

    def plan(self, **settings: Any) -> Plan:
        settings = {"micro_batches": 4, "micro_batches_per_stage": 1, **settings}
        return plan_from_profile(self.profile, CLUSTER, batch_size=BATCH, **settings)

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the model itself, for the mini-batch as a whole."""
        self.model.zero_grad()
        loss = self.loss_fn(self.model(*self.inputs), self.target)
        loss.backward()
        found = {
            name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
        }
        self.model.zero_grad()
        return float(loss.detach()), found


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "decoder": (Decoder, 6),
    "skipping": (Skipping, 6),
    "tied": (Tied, 8),
    "counting": (Counting, 6),
    "norms": (norms, 6),
    "plain": (plain, 6),
}
"""By name, with the features of their input."""


@cache
def case(name: str) -> Case:
    """The model of that name, traced and priced from data sheets."""
    make, features = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(BATCH, features)
    inputs = (x, torch.rand(BATCH, 1)) if name == "skipping" else (x,)
    target = torch.randint(0, 3, (BATCH,))
    loss_fn = logits_loss if name == "skipping" else nn.functional.cross_entropy
    return priced(model, inputs, target, loss_fn)


def priced(
    model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, loss_fn: Callable[[Any, Tensor], Tensor]
) -> Case:
    """The model traced, and priced from data sheets."""
    sample = inputs if len(inputs) > 1 else inputs[0]
    sequence = profiler.trace(model, sample)
    profile = profiler.profile(
        sequence, CLUSTER, sample=sample, loss_fn=loss_fn, target=target, micro_batch_sizes=(2, BATCH)
    )
    return Case(model, inputs, target, loss_fn, sequence, profile)
