"""Random models by random plans, exported to `torch.distributed.pipelining`: its engine finds the model's gradients.

What an outsider found lay in models that no list had: a frozen front, weights tied in two chunks of one rank, gradients
that are no piece, each with a schedule that splits the backward pass.
"""

import os
from random import Random
from types import SimpleNamespace
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
    for settings in random.sample(SCHEDULES, len(SCHEDULES)):
        if tried == 3:
            break
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


class Tanhs(nn.Module):
    def __init__(self, frozen: int = 0, tied: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        for linear in self.linears[:frozen]:
            linear.requires_grad_(False)
        if tied is not None:
            self.linears[tied[1]].weight = self.linears[tied[0]].weight

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


def exported(model: nn.Module, **settings: Any) -> tuple[Any, list[str]]:
    """The export, and the passes of each rank."""
    known = priced(model, (torch.randn(BATCH, WIDTH),), torch.randn(BATCH, WIDTH), nn.functional.mse_loss)
    made = known.plan(recompute="never", **settings).export("torch.distributed.pipelining", model)
    return made, made.text.splitlines()


def test_a_backward_pass_that_torch_cannot_split_is_whole() -> None:
    """Of a frozen front no parameter behind it got a gradient, and weights tied in a stage ended the step."""
    settings = {"schedule": "zb-h1", "stages": 2, "cut_at": ["linears.3"]}
    made, ranks = exported(Tanhs(), **settings)
    assert "1I0" in ranks[1]
    assert "are not split" not in "".join(made.notes)
    for model in (Tanhs(frozen=3), Tanhs(tied=(3, 5))):
        made, ranks = exported(model, **settings)
        assert ("1B0" in ranks[1], "1I0" in ranks[1], "1W0" in ranks[1]) == (True, False, False)
        assert ("0B0" in ranks[0], "0W0" in ranks[0]) == (False, True)
        assert "Backward passes of 1 stage (1) are not split" in "".join(made.notes)


def test_a_parameter_is_once_in_the_list_for_the_optimizer() -> None:
    """Two chunks of one rank may share it; the optimizer stepped it twice."""
    model = Tanhs(tied=(0, 5))
    made, _ = exported(model, schedule="zb-v", stages=4, chunks=2)
    held = made.value.parameters([SimpleNamespace(submod=made.value.modules[index]) for index in (0, 3)])
    assert len({*held}) == len(held)
    assert sum(own is model.linears[0].weight for own in held) == 1
