"""Random numbers are those of the operation, however finely the model is cut."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from profiler import LayerSequence, trace
from profiler.run.against_eager import Trial
from tests.coverage.fidelity import run, some_cuts
from tests.coverage.model_list import Case


class Noisy(nn.Module):
    """Draws in layers of every size, several times in one, and by chance not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.2))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = x + block(x) + torch.randn_like(x) * 0.1
        return x


def test_finer_layers_draw_the_same() -> None:
    """Masks were keyed by the layer's index, so a plan for 16 devices trained on other masks than one for 4."""
    torch.manual_seed(0)
    model, x, target = Noisy(), torch.randn(6, 8), torch.randn(6, 8)
    of = Case(model, x, functional.mse_loss, target)
    coarse, fine = trace(model, x, stages=2), trace(model, x, stages=16)
    assert len(fine) > len(coarse)
    assert any(layer.draws > 1 for layer in coarse.layers)
    assert sum(layer.draws for layer in coarse.layers) == sum(layer.draws for layer in fine.layers)
    expected = run(coarse, of)
    for sequence in (coarse, fine):
        for cuts in ([], *some_cuts(sequence)):
            found = run(sequence, of, cuts)
            assert torch.equal(found.loss, expected.loss)
            assert found.gradients.keys() == expected.gradients.keys()
            assert all(torch.equal(found.gradients[name], expected.gradients[name]) for name in found.gradients)
    assert torch.equal(expected.loss, run(fine, of).loss)


class InVain(nn.Module):
    """It draws what nothing comes of, before a dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.other, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        if self.kind == "head":
            self.other(functional.dropout(x, 0.2))
        elif self.kind == "like":
            torch.rand_like(x)
        elif self.kind == "shape":
            torch.randn(3)
        return self.last(functional.dropout(x, 0.2))


@pytest.mark.parametrize("kind", ["none", "head", "like", "shape"])
def test_what_is_drawn_in_vain_is_drawn(kind: str) -> None:
    """Dead operations were left out, so that later ones drew other numbers than the model's."""
    torch.manual_seed(0)
    model = InVain(kind)
    sequence = trace(model, torch.randn(4, 8))
    assert sum(layer.draws for layer in sequence.layers) == (1 if kind == "none" else 2)
    assert _off_the_model(model, sequence) <= 1e-6


def _off_the_model(model: nn.Module, sequence: LayerSequence) -> float:
    """How far layers are from the model, which draws the same random numbers."""
    modes = [module.training for module in model.modules()]
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    return Trial(model, modes, sequence, {"x": x}, target, functional.mse_loss).compare().relative


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "features": lambda x: functional.dropout2d(x.view(-1, 8, 1, 1), 0.3).view(-1, 8),
    "alpha": lambda x: functional.alpha_dropout(x, 0.2),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "like": lambda x: x + 0.1 * torch.rand_like(x),
    "shape": lambda x: x * torch.randn(8),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    "written": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "uniform_": lambda x: x * x.new_zeros(8).uniform_(0.5, 1.5),
    "order": lambda x: x[:, torch.randperm(8)],
    "whole": lambda x: x + torch.randint(0, 3, (8,)),
    "numbers": lambda x: x * (1 + torch.multinomial(torch.ones(4), 2).sum()),
    "gumbel": lambda x: functional.gumbel_softmax(x, dim=-1),
    "exponential": lambda x: x * torch.empty(8).exponential_(2.0),
}


class Drawing(nn.Module):
    """Linear layers with draws between them, some of which nothing comes of.

    Args:
        kinds: keys of `DRAWS`, or "" for none, and whether their result is used.
    """

    def __init__(self, kinds: Sequence[tuple[str, bool]]) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer, (kind, used) in zip(self.layers, self.kinds, strict=True):
            x = torch.tanh(layer(x))
            drawn = DRAWS[kind](x) if kind else x
            x = drawn if used else x
        return x


@settings(derandomize=True, deadline=None, max_examples=10)
@given(st.integers(0, 2**32))
def test_random_draws_are_those_of_the_model(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [(chance.choice(["", *DRAWS]), chance.random() < 0.6) for _ in range(chance.randint(2, 6))]
    torch.manual_seed(seed)
    model, x = Drawing(kinds), torch.randn(4, 8)
    sequence = trace(model, x)
    assert _off_the_model(model, sequence) <= 1e-6, kinds
    of = Case(model, x, functional.mse_loss, torch.randn(4, 8))
    expected = run(sequence, of)
    for cuts in some_cuts(sequence):
        found = run(sequence, of, cuts)
        assert torch.equal(found.loss, expected.loss), (kinds, cuts)
        assert all(torch.equal(found.gradients[name], expected.gradients[name]) for name in expected.gradients), kinds
