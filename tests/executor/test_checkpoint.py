"""Checkpoints know nothing of stages."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ExecutionError, Plan
from profiler import trace

X = torch.linspace(-1, 1, 40).reshape(10, 4)
Y = torch.arange(10) % 4


class Tied(nn.Module):
    """One weight in two places, batch normalization between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def make_pipe(plan: Plan) -> tuple[Pipeline, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(3)
    model = Tied()
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.05), model


def steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(pipe.step(X, target=Y).item())
        optimizer.step()
    return losses


def save_after_two(plan: Plan, path: Path) -> list[float]:
    pipe, optimizer, _ = make_pipe(plan)
    steps(pipe, optimizer, 2)
    save_checkpoint(path, pipe, optimizer)
    return steps(pipe, optimizer, 2)


def load_and_go_on(plan: Plan, path: Path) -> list[float]:
    pipe, optimizer, _ = make_pipe(plan)
    load_checkpoint(path, pipe, optimizer)
    return steps(pipe, optimizer, 2)


def test_saved_with_two_stages_goes_on_with_any_number(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    sequence = trace(Tied(), X)
    plans = [
        plan_for(sequence, cuts, batch_size=10, micro_batches=4)
        for cuts in ([], [len(sequence) // 2], list(range(1, len(sequence))))
    ]
    expected = save_after_two(plans[0], tmp_path / "one")
    assert launch(save_after_two, plans[1], (tmp_path / "two",)) == [expected, expected]
    for path in ("one", "two"):
        for plan in plans:
            assert load_and_go_on(plan, tmp_path / path) == expected
    assert launch(load_and_go_on, plans[1], (tmp_path / "one",)) == [expected, expected]


def test_the_plain_model_loads_it_under_all_its_names(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    plan = plan_for(trace(Tied(), X), [1], batch_size=10, micro_batches=4)
    pipe, optimizer, model = make_pipe(plan)
    steps(pipe, optimizer, 1)
    save_checkpoint(tmp_path / "c", pipe, optimizer)
    save_checkpoint(tmp_path / "c", pipe, optimizer)  # an older one is replaced
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    plain = Tied()
    state = {"model": copy.deepcopy(plain.state_dict())}
    with warnings.catch_warnings(action="ignore"):  # torch warns of how it uses itself
        dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)  # type: ignore[attr-defined]
    plain.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name


def test_a_missing_or_cut_off_checkpoint_is_refused(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    pipe, optimizer, _ = make_pipe(plan_for(trace(Tied(), X), batch_size=10, micro_batches=4))
    with pytest.raises(ExecutionError, match="holds no complete checkpoint"):
        load_checkpoint(tmp_path / "none", pipe, optimizer)
    save_checkpoint(tmp_path / "c", pipe)
    with pytest.raises(ExecutionError, match="cannot load"):
        load_checkpoint(tmp_path / "c", pipe, optimizer)  # it holds no optimizer state
