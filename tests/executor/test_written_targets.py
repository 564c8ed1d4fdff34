"""A loss function may write its target: labels that it shifts or masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Pipeline
from planner import autoplan

CLASSES = 5


def _from_one(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels.sub_(1))


def _masked(output: Tensor, labels: dict[str, Tensor]) -> Tensor:
    labels["of"][labels["of"] == CLASSES] = 0
    return nn.functional.cross_entropy(output, labels["of"])


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("loss_fn", [_from_one, _masked])
def test_each_call_finds_the_target_as_it_was_given(loss_fn: Callable[..., Tensor], recompute: Any) -> None:
    """Planning wrote the user's target, call after call; a first step was refused for what its model does not do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    x, labels = torch.randn(16, 8), torch.arange(16) % CLASSES + 1

    def target() -> Any:
        return labels.clone() if loss_fn is _from_one else {"of": labels.clone()}

    planned_with = target()
    plan = autoplan(
        model, x, 1, loss_fn=loss_fn, target=planned_with, recompute=recompute, time_budget_s=0.5, cache=False
    )
    assert str(planned_with) == str(target())
    Pipeline(model, plan, loss_fn=loss_fn).step(x, target=target())
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss_fn(model(x), target()).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
