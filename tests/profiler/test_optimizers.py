"""Optimizers with settings of their own."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, autoplan
from profiler import ArgumentError, Cluster, profile, trace
from profiler.timing.optimizers import cost_with_state, named_optimizer, optimizer_names, state_bytes

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
    assert state_bytes(named, [torch.zeros(8, 4), torch.zeros(5)]) == [copies * 4 * 32, copies * 4 * 5]


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
    assert sum(state_bytes("SGD", list(model.parameters()))) == 0
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


def held_by(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    tensors = [one for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor) and one.dim()]
    return sum(one.untyped_storage().nbytes() for one in tensors)


class Unlike(torch.optim.SGD):
    """Keeps what it likes: twice a matrix, of others nothing, and something of its own."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() > 1:
                self.state[parameter]["twice"] = torch.zeros(2, *parameter.shape, device=parameter.device)
        self.state["own"] = {"seen": torch.zeros(10)}  # type: ignore[index]
        return super().step(closure)


@pytest.mark.parametrize("name", optimizer_names())
def test_the_state_of_each_parameter_is_known(name: str) -> None:
    """One mean of the whole model was planned: 140,895 bytes where a stage of convolutions held 694,272."""
    shapes = [(8, 4, 3, 3), (64, 32), (32,), (1, 200), (3, 5, 7)]
    parameters = [torch.randn(shape, requires_grad=True) for shape in shapes if name != "Muon" or len(shape) == 2]
    if name == "Muon":
        parameters.append(torch.randn(16, 16, requires_grad=True))
    optimizer = getattr(torch.optim, name)(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = [held_by(optimizer, parameter) for parameter in parameters]
    assert state_bytes(name, parameters) == held
    cost = cost_with_state(name, "a", 0.0, parameters, held)
    assert bool(cost.state_bytes) == (name == "Adafactor")


def test_state_that_is_no_parameters_own_is_spread() -> None:
    named = named_optimizer(Unlike)
    assert state_bytes(named, [torch.zeros(4, 5), torch.zeros(20)]) == [2 * 80 + 20, 20]


class Flat(torch.optim.SGD):
    """Keeps what it has of all parameters in one tensor, of which each looks at its part."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        whole = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
        parts = whole.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            self.state[parameter]["mean"] = part.view_as(parameter)
        return super().step(closure)


def test_memory_that_parameters_share_is_that_of_each_part() -> None:
    """All of it was the first one's, and other stages were planned to keep nothing."""
    parameters = [torch.zeros(10, 48), torch.zeros(144), torch.zeros(480)]
    states = state_bytes(named_optimizer(Flat), parameters)
    assert states == [1920, 576, 1920]
    assert cost_with_state("Flat", "a", 0.0, parameters, states).state_bytes == ()


def of_matrices(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in parameters if one.dim() == rank], "momentum": 0.9 * (rank - 1)} for rank in (1, 2)
    ]
    return torch.optim.SGD(groups, lr=0.1)


def test_an_optimizer_of_groups_is_not_taken_for_one_without(tmp_path: Path) -> None:
    """Both are called SGD, and what was measured of the one was planned for the other: no state for 32,768 bytes."""
    model, sample = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    asked: Any = {"loss_fn": nn.functional.mse_loss, "target": sample, "progress": False, "cache": tmp_path}
    kept = [
        autoplan(model, sample, 1, optimizer=optimizer, time_budget_s=0.0, **asked).stages[0].memory.optimizer
        for optimizer in ("SGD", of_matrices, "SGD")
    ]
    assert kept == [0, 2 * 4 * 64 * 64, 0]


@pytest.mark.parametrize("optimizer", ["Adafactor", Unlike])
@pytest.mark.parametrize("devices", [2, "2xA100-40GB"])
def test_each_stage_has_room_for_the_state_that_it_keeps(tmp_path: Path, devices: Any, optimizer: Any) -> None:
    torch.manual_seed(0)
    wide, sample = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.Linear(64, 64)), torch.randn(8, 4, 8, 8)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 2, 1), nn.AdaptiveAvgPool2d(8), wide)
    plan = autoplan(
        model, sample, devices, loss_fn=nn.functional.mse_loss, target=torch.randn(8, 64), optimizer=optimizer,
        stages=2, cut_at=["4"], micro_batches_per_stage=1, time_budget_s=0.0, progress=False, cache=tmp_path,
    )  # fmt: skip
    kind = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    for stage, part in zip(plan.stages, (model[:4], model[4:]), strict=True):
        parameters = list(part.parameters())
        stepped = kind(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        stepped.step()
        held = sum(held_by(stepped, parameter) for parameter in parameters)
        assert held <= stage.memory.optimizer <= held + 64  # its share of what is no parameter's own
