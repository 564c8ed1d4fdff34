"""The README's ten lines run as they are written, with a loader that shuffles, and train as one process does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import executor
import planner
from executor import Pipeline, launch
from planner import Plan
from profiler import trace
from tests.executor.conftest import _plan as plan_for

README = Path(__file__).parent.parent / "README.md"

AROUND = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make_model():
    embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), head)

loss_fn = nn.functional.cross_entropy
model, x, y = make_model(), torch.arange(8), torch.arange(8)
loader = DataLoader(TensorDataset(torch.arange(44) % 12, torch.arange(44) % 11), batch_size=8, shuffle=True)
"""


def recorded(train: Callable[[Plan], None], plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a training function that returns nothing."""
    pipes: list[Pipeline] = []
    losses: list[float] = []

    class Recorded(Pipeline):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            pipes.append(self)

        def step(self, *args: Any, **kwargs: Any) -> Tensor:
            losses.append(super().step(*args, **kwargs).item())
            return torch.tensor(losses[-1])

    train.__globals__["Pipeline"] = Recorded
    train(plan)
    return losses, pipes[0].state_dict()


@pytest.mark.parametrize(
    ("seed", "batches"), [(7, "pipe.batches(loader)"), (None, "pipe.batches(loader)"), (7, "loader")]
)
def test_the_ten_lines_train_as_one_process(
    seed: int | None, batches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process shuffled with a seed of its own: stage 0 had inputs, the last stage targets of other samples."""
    lines = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    assert "in pipe.batches(loader):" in lines[1]
    parts: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "autoplan", lambda model, x, **_: planned(model, x))  # two stages, without measuring
    monkeypatch.setattr(
        executor,
        "launch",
        lambda train, plan: parts.extend(launch(lambda plan, train: recorded(train, plan), plan, (train,))),
    )
    torch.set_num_threads(1)
    space: dict[str, Any] = {"__name__": "ten_lines"}
    exec(AROUND, space)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    exec(lines[1].replace("pipe.batches(loader)", batches), space)
    torch.manual_seed(torch.initial_seed())
    losses, weights = recorded(space["train"], Plan.load(tmp_path / "plan.json"))
    assert len(losses) == 6
    for part_losses, part_weights in parts:
        assert part_losses == losses
        assert all(torch.equal(value, weights[name]) for name, value in part_weights.items())
    assert {name for _, part in parts for name in part} == weights.keys()


def planned(model: torch.nn.Module, x: Tensor) -> Plan:
    return plan_for(trace(model, x), [3], batch_size=8, micro_batches=4)
