"""Optimizers with settings of their own."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, autoplan
from profiler import ArgumentError, Cluster, profile, trace
from profiler.timing.optimizers import named_optimizer, state_bytes

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Mine(torch.optim.SGD):
    pass


def _grouped(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters, "weight_decay": 0.5}], lr=0.2)


def test_names_tell_the_settings() -> None:
    assert named_optimizer("AdamW") == "AdamW"
    assert named_optimizer(torch.optim.AdamW) == "AdamW"
    assert named_optimizer(MOMENTUM) == "SGD(momentum=0.9)"
    assert named_optimizer(lambda parameters: MOMENTUM(parameters, nesterov=True)) == "SGD(momentum=0.9, nesterov=True)"
    assert named_optimizer(_grouped) == "AdamW(weight_decay=0.5)"
    assert named_optimizer(Mine).startswith("Mine-")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (5, "optimizer=5; choose one of torch.optim"),
        (torch.optim.LBFGS, "optimizer='LBFGS'; choose one of"),
        (lambda parameters: None, "builds a NoneType; return"),
        (lambda: None, "builds no optimizer of a list of tensors"),
        (lambda parameters: torch.optim.SGD([torch.zeros(1)]), "steps 0 of 1 tensor that it is given and 1 other;"),
    ],
)
def test_what_builds_no_optimizer_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        named_optimizer(optimizer)


@pytest.mark.parametrize(("kind", "copies"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0), (torch.optim.Adagrad, 1)])
def test_fused_optimizers_have_the_state_of_others(kind: Any, copies: int) -> None:
    """They want a device that computes: building one of tensors without data ended in a RuntimeError."""
    named = named_optimizer(functools.partial(kind, fused=True))
    assert state_bytes(named, [torch.zeros(8, 4), torch.zeros(5)]) == copies * 4 * 37


def test_an_optimizer_of_other_tensors_changes_none(tmp_path: Path) -> None:
    """It stepped the user's own model, by gradients of an earlier pass; and state of tensors that it left out was 0."""
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    model(sample).sum().backward()
    before = [parameter.clone() for parameter in model.parameters()]
    asked: Any = {"loss_fn": nn.functional.mse_loss, "target": sample, "progress": False, "cache": tmp_path}
    with pytest.raises(ArgumentError, match="steps 0 of 1 tensor that it is given and 4 others"):
        autoplan(model, sample, 1, optimizer=lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1), **asked)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(ArgumentError, match="steps 1 of 4 tensors that it is given and 0 others"):
        autoplan(model, sample, 1, optimizer=lambda parameters: torch.optim.SGD(parameters[:1]), **asked)


def test_momentum_is_a_whole_copy(tmp_path: Path) -> None:
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    assert state_bytes("SGD", list(model.parameters())) == 0
    cache = tmp_path / "cache"
    for _ in range(2):  # measured, remembered
        plan = autoplan(
            model, sample, 1, loss_fn=nn.functional.mse_loss, target=sample, optimizer=MOMENTUM, time_budget_s=0.0,
            progress=False, cache=cache,
        )  # fmt: skip
        assert plan.optimizer == "SGD(momentum=0.9)"
        assert plan.stages[0].memory.optimizer == 4 * 2 * 72
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    listed = profile(trace(model, sample), Cluster.of("T4"), optimizer=MOMENTUM, progress=False)
    assert [(cost.name, cost.state_bytes_per_byte) for cost in listed.optimizers] == [("SGD(momentum=0.9)", 1.0)]
