"""A step that fails, and whose caller goes on, leaves the gradients of earlier steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import ExecutionError, Plan
from profiler import trace

X = torch.linspace(-1, 1, 48).reshape(8, 6)


class TwoHeads(nn.Module):
    """With a tied weight, and a head of which not every loss makes use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 2)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), self.other(h)


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Fails for a target above 9, and uses the second output for one below 0 only."""
    if bool((target > 9).any()):
        raise ValueError("no such class")
    loss = functional.mse_loss(output[0].mean(1), target)
    return loss + output[1].pow(2).mean() if bool((target < 0).all()) else loss


def pipeline(plan_for: Callable[..., Plan], model: nn.Module, replicas: int) -> Pipeline:
    plan = plan_for(trace(model, X), [1], batch_size=8, micro_batches=2, replicas=replicas)
    return Pipeline(model, plan, loss_fn=loss_fn)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)


@pytest.mark.parametrize("failing", [0, 3, 5, 7])
def test_gradients_of_earlier_steps_survive_with_replicas(plan_for: Callable[..., Plan], failing: int) -> None:
    """They were set aside for the step and never put back; the next `optimizer.step` did nothing, without a word."""
    model = TwoHeads()
    pipe = pipeline(plan_for, model, replicas=2)
    pipe.step(X, target=torch.full((8,), -1.0))
    before = gradients_of(model)
    assert all(gradient is not None for gradient in before)
    target = torch.full((8,), -1.0)
    target[failing] = 10.0
    with pytest.raises(ExecutionError, match="no such class"):
        pipe.step(X, target=target)
    assert_same(gradients_of(model), before)
    pipe.step(X, target=torch.full((8,), -1.0))  # of the same data: they double
    assert_same(gradients_of(model), [None if gradient is None else gradient + gradient for gradient in before])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failed_first_step_leaves_none(plan_for: Callable[..., Plan], replicas: int) -> None:
    model = TwoHeads()
    target = torch.zeros(8)
    target[0] = 10.0
    pipe = pipeline(plan_for, model, replicas)
    with pytest.raises(ExecutionError, match="no such class"):
        pipe.step(X, target=target)
    assert all(gradient is None for gradient in gradients_of(model))


def test_what_cannot_be_taken_back_is_said(plan_for: Callable[..., Plan]) -> None:
    """Without replicas micro-batches are added in place to what earlier steps left."""
    model = TwoHeads()
    pipe = pipeline(plan_for, model, replicas=1)
    pipe.step(X, target=torch.zeros(8))
    target = torch.zeros(8)
    target[7] = 10.0
    with pytest.raises(ExecutionError, match="no such class") as caught:
        pipe.step(X, target=target)
    assert "2 of 4 parameters had a gradient before" in caught.value.__cause__.__notes__[0]  # type: ignore[union-attr]


def test_a_step_without_a_gradient_keeps_that_of_earlier_steps(plan_for: Callable[..., Plan]) -> None:
    """With replicas a parameter that the step did not reach lost what earlier steps had left."""
    model = TwoHeads()
    pipe = pipeline(plan_for, model, replicas=2)
    pipe.step(X, target=torch.full((8,), -1.0))
    before = model.other.weight.grad
    assert before is not None
    pipe.step(X, target=torch.zeros(8))
    assert model.other.weight.grad is not None
    assert torch.equal(model.other.weight.grad, before)


@pytest.mark.usefixtures("traced_once")
def test_a_gradient_in_one_replica_only_is_the_sum(plan_for: Callable[..., Plan]) -> None:
    """It was refused, though one replica trains with gradients that some micro-batches lack."""
    model, target = TwoHeads(), torch.tensor([-1.0] * 4 + [0.0] * 4)
    sequence, found = trace(model, X), []
    for replicas in (1, 2):
        plan = plan_for(sequence, [1], batch_size=8, micro_batches=2 // replicas, replicas=replicas)
        Pipeline(model, plan, loss_fn=loss_fn, compare_first_step=False).step(X, target=target)
        found.append(gradients_of(model))
        model.zero_grad()
    assert all(gradient is not None for gradient in found[1])
    torch.testing.assert_close(found[1], found[0])
