"""No gradient shares memory with another, or with what is sent or waits; and none is copied without need."""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Pipeline
from planner import Plan
from profiler import LayerSequence, trace

X = torch.linspace(-1, 1, 24).reshape(4, 6)
IDS = torch.tensor([[0, 1], [2, 1], [3, 3], [1, 0]])


class Position(nn.Module):
    """Both sides of an addition are views of equal shape when a micro-batch is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.position = nn.Parameter(torch.linspace(-1, 1, 12).reshape(2, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x).view(-1, 2, 6) + self.position.unsqueeze(0)))
        return out


class TwoViews(nn.Module):
    """Two parameters in one addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))
        self.second = nn.Parameter(torch.linspace(-1, 1, 6).reshape(3, 2))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + (self.first.view(6) + self.second.view(6)))


class Halves(nn.Module):
    """Parameters whose gradients are two halves of one tensor, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(1, 6))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ torch.cat([self.upper, self.lower]).t() + self.scale.view(()))


class Tied(nn.Module):
    """A parameter with an accumulator for each of its two users, which share memory with each other's addends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(2, 6))
        self.other = nn.Parameter(torch.linspace(1, 2, 12).reshape(12))
        self.linear = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.linear(x).view(-1, 2, 6) + self.weight.unsqueeze(0))
        return torch.tanh(early * 2 + self.weight.unsqueeze(0) + self.other.view(1, 2, 6))


class SparsePair(nn.Module):
    """Two embeddings whose sparse gradients hold the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 3, sparse=True)
        self.second = nn.Embedding(4, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.first(ids) + self.second(ids.flip(1)))


class Later(nn.Module):
    """Both parameters share their gradients' memory, and get none from the first micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.pair = TwoViews()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x))
        return h, self.pair(x)


KINDS = {kind.__name__: kind for kind in (Position, TwoViews, Halves, Tied, SparsePair)}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.flatten(1).sum(1) - target).pow(2).mean()


def loss_by_target(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Uses the second output only for samples whose target says so."""
    loss = output[0].pow(2).mean()
    return loss + output[1].pow(2).mean() if bool(target.min() >= 0) else loss


def sample_of(model: nn.Module) -> Tensor:
    return IDS if isinstance(model, SparsePair) else X


@cache
def traced(name: str) -> tuple[nn.Module, LayerSequence]:
    """A model that keeps its weights, and its layers."""
    torch.manual_seed(0)
    model = KINDS[name]()
    return model, trace(model, sample_of(model))


def by_hand(model: nn.Module, x: Tensor, target: Tensor, loss_fn: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients of one-sample micro-batches in float64, each found apart and then added."""
    total: list[Tensor | None] = [None for _ in model.parameters()]
    plain = copy.deepcopy(model).double()
    for sample, wanted in zip(x.split(1), target.split(1), strict=True):
        plain.zero_grad()
        inputs = sample.double() if sample.is_floating_point() else sample
        (loss_fn(plain(inputs), wanted.double()) / len(x)).backward()
        found = [p.grad.to_dense().clone() if p.grad is not None else None for p in plain.parameters()]
        total = [
            new if old is None else old if new is None else old + new for old, new in zip(total, found, strict=True)
        ]
    return [gradient for gradient in total if gradient is not None]


def assert_close(model: nn.Module, expected: Iterable[Tensor], scale: float = 1.0) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.to_dense(), (scale * gradient).float())


def memory(tensor: Tensor) -> int:
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("settings", [{}, {"schedule": "1f1b"}, {"recompute": True}, {"replicas": 2}])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_that_share_memory(plan_for: Callable[..., Plan], name: str, settings: dict[str, Any]) -> None:
    """Micro-batches of one sample, cut before the view, trained 12 of a model's parameters wrong without a word.

    A boundary's gradient, which waited to go back, lay in the memory of a parameter's `.grad`, to which the next
    micro-batch added: gradients were off by 75 % of their scale with K = 2, right with K = 1. And two parameters that
    shared it were wrong with any K, as with torch alone.
    """
    model, sequence = traced(name)
    target = torch.linspace(0, 1, 4)
    x = sample_of(model)
    expected = by_hand(model, x, target, loss_of)
    for stages in range(1, min(3, len(sequence)) + 1):
        for cuts in combinations(range(1, len(sequence)), stages - 1):
            plan = plan_for(sequence, cuts, batch_size=4, micro_batches=4 // settings.get("replicas", 1), **settings)
            model.zero_grad()
            pipe = Pipeline(model, plan, loss_fn=loss_of)
            for times in (1.0, 2.0):  # the second step adds to the gradients of the first
                pipe.step(x, target=target)
                assert_close(model, expected, times)
            held = [memory(p.grad) for p in model.parameters() if p.grad is not None]
            assert len(set(held)) == len(held), cuts
            for gradient in (p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse):
                assert gradient.untyped_storage().nbytes() == gradient.nbytes, cuts  # no part of a block that it keeps


def test_a_parameter_that_gets_its_gradient_late(plan_for: Callable[..., Plan]) -> None:
    """It is still taken over when a later micro-batch brings it."""
    torch.manual_seed(0)
    model = Later()
    target = torch.tensor([1.0, 1.0, 1.0, -1.0])  # the last one goes back first
    expected = by_hand(model, X, target, loss_by_target)
    Pipeline(model, plan_for(trace(model, X), batch_size=4, micro_batches=4), loss_fn=loss_by_target).step(
        X, target=target
    )
    assert_close(model, expected)


def test_clipping_scales_each_gradient_once(plan_for: Callable[..., Plan]) -> None:
    """Gradients in the same memory were scaled by the square of the factor, even those of a single micro-batch."""
    for kind in (TwoViews, SparsePair):
        torch.manual_seed(0)
        model = kind()
        x = sample_of(model)
        pipe = Pipeline(model, plan_for(trace(model, x), batch_size=4, micro_batches=1), loss_fn=loss_of)
        pipe.step(x, target=torch.linspace(0, 1, 4))
        norm = pipe.clip_grad_norm_(1e-3).item()
        after = torch.stack(
            [p.grad.to_dense().double().norm() for p in model.parameters() if p.grad is not None]
        ).norm()
        assert norm > 1e-3
        assert after.item() == pytest.approx(1e-3, rel=1e-4)


def test_nothing_is_copied_without_need(plan_for: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that nobody else holds stay where autograd put them, those of sparse embeddings too."""
    copied: list[torch.Size] = []
    clone = Tensor.clone

    def noted(tensor: Tensor) -> Tensor:
        copied.append(tensor.shape)
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", noted)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4, bias=False), nn.Tanh())
    lookup = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Tanh())
    for model, shared in ((alone, 0), (lookup, 0), (TwoViews(), 1)):
        x = IDS if model is lookup else X
        sequence = trace(model, x)
        copied.clear()
        plan = plan_for(sequence, batch_size=4, micro_batches=2)
        pipe = Pipeline(model, plan, loss_fn=loss_of, compare_first_step=False)
        pipe.step(x, target=torch.linspace(0, 1, 4))
        parameters = {parameter.shape for parameter in model.parameters()}  # micro-batches may be copied, too
        assert len([shape for shape in copied if shape in parameters]) == shared, model


def test_gradients_that_the_user_laid_out_stay_there(plan_for: Callable[..., Plan]) -> None:
    """As one flat buffer, which an optimizer of its own may read."""
    model = TwoViews()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    bounds = [0, *torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()]
    for parameter, (first, stop) in zip(parameters, pairwise(bounds), strict=True):
        parameter.grad = flat[first:stop].view_as(parameter)
    target = torch.linspace(0, 1, 4)
    Pipeline(model, plan_for(trace(model, X), batch_size=4, micro_batches=4), loss_fn=loss_of).step(X, target=target)
    expected = torch.cat([gradient.flatten() for gradient in by_hand(model, X, target, loss_of)])
    torch.testing.assert_close(flat, expected.float())
