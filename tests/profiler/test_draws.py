"""Random numbers are those of the operation, however finely the model is cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import trace
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
    sequence = trace(InVain(kind), torch.randn(4, 8))
    assert sum(layer.draws for layer in sequence.layers) == (1 if kind == "none" else 2)
    of = Case(InVain(kind), torch.randn(4, 8), functional.mse_loss, torch.randn(4, 8))
    model = of.model
    trial = Trial(
        model, [module.training for module in model.modules()], trace(model, of.sample), {"x": of.sample}, of.target,
        functional.mse_loss,
    )  # fmt: skip
    assert trial.compare().relative <= 1e-6
