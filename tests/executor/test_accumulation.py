"""Gradients of several mini-batches for one step of the optimizer, without dividing them by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Pipeline, launch
from planner import ArgumentError, ExecutionError, Plan, PlanError
from profiler import trace

pytestmark = pytest.mark.usefixtures("traced_once")

loss_fn = nn.functional.mse_loss


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=draw), torch.randn(8, 2, generator=draw)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_gradients_are_those_of_dividing_the_losses(plan_for: Callable[..., Plan], count: int) -> None:
    model, plain = make_model(), make_model()
    pipe = Pipeline(model, plan_for(trace(model, data(0)[0]), [1], batch_size=8, micro_batches=4), loss_fn=loss_fn)
    for number in range(count):
        x, y = data(number)
        loss = loss_fn(plain(x), y)
        (loss / count).backward()
        found = pipe.step(x, target=y, accumulate=count)
        torch.testing.assert_close(found.float(), loss.detach())  # as it is
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_by_a_power_of_two_no_bit_changes(plan_for: Callable[..., Plan]) -> None:
    model = make_model()
    plan = plan_for(trace(model, data(0)[0]), [1], batch_size=8, micro_batches=4)
    whole, part = (Pipeline(copy.deepcopy(model), plan, loss_fn=loss_fn) for _ in range(2))
    x, y = data(0)
    assert torch.equal(whole.step(x, target=y), part.step(x, target=y, accumulate=4))
    for one, other in zip(whole.parameters(), part.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, 4 * other.grad)


def test_a_scaler_scales_on_top(plan_for: Callable[..., Plan]) -> None:
    model = make_model()
    pipe = Pipeline(model, plan_for(trace(model, data(0)[0]), batch_size=8, micro_batches=4), loss_fn=loss_fn)
    x, y = data(0)
    pipe.step(x, target=y)
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    pipe.step(x, target=y, accumulate=2, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, 4 * gradient)


def unlike(plan: Plan) -> Any:
    pipe = Pipeline(make_model(), plan, loss_fn=loss_fn)
    x, y = data(0)
    pipe.step(x, target=y, accumulate=2 + pipe.rank)


def test_processes_that_disagree_end(plan_for: Callable[..., Plan]) -> None:
    """Only the last stage's number would count, and nobody would know."""
    with pytest.raises((ArgumentError, ExecutionError), match="accumulate"):
        launch(unlike, plan_for(trace(make_model(), data(0)[0]), [1], batch_size=8, micro_batches=4))


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_calls(plan_for: Callable[..., Plan], count: Any) -> None:
    model = make_model()
    pipe = Pipeline(model, plan_for(trace(model, data(0)[0]), batch_size=8, micro_batches=4), loss_fn=loss_fn)
    with pytest.raises(ArgumentError, match="accumulate is"):
        pipe.step(data(0)[0], target=data(0)[1], accumulate=count)


def test_an_argument_of_the_model_by_that_name_is_refused(plan_for: Callable[..., Plan]) -> None:
    class Counting(nn.Linear):
        def forward(self, accumulate: Tensor) -> Tensor:
            return super().forward(accumulate)

    plan = plan_for(trace(Counting(4, 2), {"accumulate": data(0)[0]}), batch_size=8, micro_batches=4)
    with pytest.raises(PlanError, match="takes an argument 'accumulate' by keyword"):
        Pipeline(Counting(4, 2), plan)
