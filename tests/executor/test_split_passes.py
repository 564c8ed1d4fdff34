"""A split backward pass makes the same gradients, in every bit, and keeps what the profile says until W."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from profiler import profile, trace
from profiler.run import split_backward
from profiler.run.separable import deferrable
from profiler.run.split_backward import DeferredWeights
from tests.executor.adversary import Subject, random_case, wrong
from tests.executor.conftest import _plan as plan_for
from tests.models.random_models import random_recipe


class Several(nn.Module):
    """Weights as they are, tied, normalized, used twice, added to a value, and in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.position = nn.Parameter(torch.randn(1, 6, 16))
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.position
        h = self.convolution(h.transpose(1, 2)).transpose(1, 2)
        for _ in range(2):
            h = h + functional.dropout(functional.gelu(self.twice(self.norm(h))), 0.1, self.training)
        return self.head(self.normalized(h) @ self.twice.weight.t())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def trained(**settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, x, y = Several(), torch.randint(0, 30, (10, 6)), torch.randint(0, 30, (10, 6))
    sequence = trace(model, x)
    cuts = settings.pop("cuts", ())
    pipe = Pipeline(
        model, plan_for(sequence, cuts, batch_size=10, micro_batches=4, **settings), loss_fn=loss_fn, seed=3
    )
    pipe.step(x, target=y)
    return {name: gradient_of(parameter) for name, parameter in model.named_parameters()}


def test_split_gradients_are_those_of_a_whole_pass() -> None:
    whole = trained(schedule="1f1b")
    for settings in ({}, {"cuts": (4,)}, {"cuts": (3, 7), "recompute": True}):
        split = trained(schedule="zb-h1", **settings)
        assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


def test_each_store_is_filled_by_i_and_emptied_by_w(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = []
    run = DeferredWeights.run

    def watched(store: DeferredWeights) -> None:
        waiting.append(len(store.entries))
        run(store)
        assert store.entries == []

    monkeypatch.setattr(split_backward.DeferredWeights, "run", watched)
    trained(schedule="zb-h1", cuts=(4,))
    assert len(waiting) == 4 * 2
    assert all(waiting)
    waiting.clear()
    trained(schedule="1f1b", cuts=(4,))
    assert waiting == []


@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (nn.Linear(8, 8), torch.randn(4, 8), (True, True)),
        (nn.Conv2d(3, 4, 3), torch.randn(4, 3, 8, 8), (True, True)),
        (nn.LSTM(8, 8), torch.randn(4, 5, 8), (False,) * 4),  # one kernel makes all its gradients
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            torch.randn(4, 8),
            (False, False, True),
        ),  # a layer of its own
        (nn.PReLU(), torch.randn(4, 8), (False,)),
    ],
)
def test_what_is_separable(layer: nn.Module, x: Tensor, expected: tuple[bool, ...]) -> None:
    sequence = trace(layer, x)
    found = [flag for part in sequence.layers for flag in deferrable(part.function, len(part.parameters))]
    assert tuple(found) == expected


def test_the_profile_says_what_waits() -> None:
    """Of linear layers the output's gradient and the input, but for that of the model, for each sample."""
    model, x = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), torch.randn(8, 64)
    sequence = trace(model, x)
    found = profile(
        sequence, 1, sample=x, loss_fn=functional.mse_loss, target=x, progress=False, cache=False, time_budget_s=0
    )
    for cost in found.costs:
        layer = sequence.layers[cost.layer]
        if layer.parameters:
            assert cost.weight_kept_bytes == cost.micro_batch_size * (128 if cost.layer == 0 else 64 + 128) * 4
            assert 0 <= cost.weight_s <= cost.backward_s
        else:
            assert (cost.weight_s, cost.weight_kept_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_random_models(seed: int) -> None:
    chance = random.Random(seed)
    recipe = random_recipe(chance, 8)
    subject = Subject(str(recipe))
    case = random_case(recipe, len(subject.sequence), chance)
    assert wrong(case.with_schedule("zb-h1"), subject) == {}


def test_what_waits_lies_in_memory_of_its_own() -> None:
    """A gradient that waits is not changed by those that are added to a parameter which shared its memory."""
    model = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Linear(4, 4))
    x = torch.randn(1, 4)
    sequence = trace(model, torch.randn(2, 4))
    grads = {}
    for schedule in ("1f1b", "zb-h1"):
        model.zero_grad()
        plan = plan_for(sequence, [1], batch_size=4, micro_batches=4, schedule=schedule)
        Pipeline(model, plan, loss_fn=functional.mse_loss).step(x.expand(4, 4), target=torch.ones(4, 4))
        grads[schedule] = [*map(gradient_of, model.parameters())]
    assert all(map(torch.equal, grads["1f1b"], grads["zb-h1"]))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(1, 4))

    def forward(self, h: Tensor) -> Tensor:
        return (h.view(-1, 1, 4) + self.by.unsqueeze(0)).view(-1, 4)


def test_a_weight_that_is_computed_waits_too() -> None:
    """It is no parameter that is there anyway: a cast, or a norm, of each micro-batch."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(32))
            self.weight = nn.Parameter(torch.randn(64, 32))

        def forward(self, h: Tensor) -> Tensor:
            return functional.linear(torch.tanh(h * self.scale), self.weight.abs())

    model, x = nn.Sequential(Scaled()), torch.randn(8, 32)
    sequence = trace(model, x, keep_together=["0"])
    found = profile(
        sequence, 1, sample=x, loss_fn=functional.mse_loss, target=torch.zeros(8, 64), progress=False, cache=False,
        time_budget_s=0,
    )  # fmt: skip
    for cost in found.costs:
        if any(sequence.layers[cost.layer].parameters):
            assert cost.weight_kept_bytes >= cost.micro_batch_size * 64 * 4 + 64 * 32 * 4
