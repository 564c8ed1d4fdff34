"""Random models by random plans, exported to `torch.distributed.pipelining`: its engine finds the model's gradients.

What an outsider found lay in models that no list had: a frozen front, weights tied in two chunks of one rank, gradients
that are no piece, each with a schedule that splits the backward pass.
"""

import os
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.errors import InfeasibleError
from tests.planner.exported import BATCH, Case, priced
from tests.planner.test_export_engines import trains_alike

WIDTH = 6
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe", "stages": 2},
    {"schedule": "1f1b", "stages": 3},
    {"schedule": "interleaved", "chunks": 2, "stages": 4},
    {"schedule": "zb-h1", "stages": 2},
    {"schedule": "zb-h1", "stages": 3},
    {"schedule": "zb", "stages": 3},
    {"schedule": "zb-v", "chunks": 2, "stages": 4},
)


class Piece(nn.Module):
    """One of several operations on (B, T, WIDTH), most with a parameter."""

    KINDS = ("linear", "norm", "transposed", "summed", "in place", "saved", "bias alone")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if kind != "norm":
            self.norm.requires_grad_(False)
        if kind == "bias alone":
            self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "norm":
                return x + self.linear(self.norm(x))
            case "transposed":
                return self.linear(x.transpose(0, 1).contiguous()).transpose(0, 1)
            case "summed":
                return x + self.linear(x.sum(1, keepdim=True)).expand_as(x)
            case "in place":
                made = self.linear(x)
                made[:, 0].mul_(0.5)
                return torch.relu_(made)
            case "saved":
                return torch.sigmoid(self.linear(x))
            case _:
                return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Pieces, some frozen; perhaps tied ones, a skip, an embedding that comes late, and an output of its own."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        count = random.randint(4, 7)
        pieces = [Piece(random.choice(Piece.KINDS)) for _ in range(count)]
        for piece in pieces:
            if random.random() < 0.2:
                piece.requires_grad_(False)
        if random.random() < 0.25:
            for index in range(random.randint(1, count - 1)):
                pieces[index].requires_grad_(False)
        if random.random() < 0.4:
            first = random.randrange(count - 1)
            second = random.randint(first + 1, min(first + 2, count - 1))  # mostly in one stage
            pieces[second].linear = pieces[first].linear
        self.pieces = nn.ModuleList(pieces)
        self.late = nn.Embedding(5, WIDTH)
        self.late_at = random.randrange(count + 1)
        self.skip = sorted(random.sample(range(count), 2)) if random.random() < 0.4 else None
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.aside = random.random() < 0.5
        self.late.requires_grad_(random.random() < 0.8)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        kept, aside = x, None
        for index, piece in enumerate(self.pieces):
            if index == self.late_at:
                aside = self.late(ids) * self.token
                x = x if self.aside else x + aside
            x = piece(x)
            if self.skip is not None and index == self.skip[0]:
                kept = x
            if self.skip is not None and index == self.skip[1]:
                x = x + kept
        return {"hidden": x} if aside is None or not self.aside else {"hidden": x, "aside": aside}


def loss_of(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    losses = [(output.mean((1, 2)) - target).square().mean() for output in outputs.values()]
    return torch.stack(losses).sum()


def random_case(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Net(Random(seed)).double()
    inputs = torch.randn(BATCH, 3, WIDTH, dtype=torch.float64), torch.randint(0, 5, (BATCH, 3))
    return priced(model, inputs, torch.randn(BATCH, dtype=torch.float64), loss_of)


SEEDS = range(*(int(end) for end in os.environ.get("EXPORT_SEEDS", "0:8").split(":")))


@pytest.mark.parametrize("seed", SEEDS)
def test_torchs_engine_finds_the_gradients_of_random_models(seed: int) -> None:
    random, known, tried = Random(seed), random_case(seed), 0
    for settings in random.sample(SCHEDULES, 3):
        plan = known.plan(**settings, recompute=random.choice(("never", "always")))
        try:
            plan.export("torch.distributed.pipelining", known.model)
        except InfeasibleError as refused:
            assert "is one parameter" in str(refused), refused
            continue
        trains_alike(known, plan)
        tried += 1
    if not tried:
        pytest.skip("every plan has a weight on several ranks")
