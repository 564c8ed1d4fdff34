"""A model that is called with a named tuple trains like any other, also where its class is not at hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import ArgumentError, ForeignPlanError, Plan
from profiler import trace


class Batch(NamedTuple):
    x: Tensor
    scale: Tensor


class Reader(nn.Module):
    """Takes whatever has the fields."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, batch: Any) -> Tensor:
        return self.second(torch.tanh(self.first(batch.x)) * batch.scale)


class Asking(Reader):
    """Computes otherwise with what is no `Batch`."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) if isinstance(batch, Batch) else self.second(self.first(batch[0]))


X, SCALE, Y = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(1, 2, 8).unsqueeze(1), torch.arange(8) % 5


def planned(plan_for: Callable[..., Plan], model: nn.Module) -> Plan:
    return plan_for(trace(model, Batch(X, SCALE)), [2], batch_size=8, micro_batches=4)


def gradients(model: nn.Module | Pipeline) -> dict[str, Tensor]:
    return {name: held.grad for name, held in model.named_parameters() if held.grad is not None}


def expected() -> dict[str, Tensor]:
    model = Reader()
    functional.cross_entropy(model(Batch(X, SCALE)), Y).backward()
    return gradients(model)


def test_it_trains_from_a_file(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    planned(plan_for, Asking()).save(tmp_path / "plan.json")
    pipe = Pipeline(Asking(), Plan.load(tmp_path / "plan.json"), loss_fn=functional.cross_entropy)
    pipe.step(Batch(X, SCALE), target=Y)
    torch.testing.assert_close(gradients(pipe), expected())
    with pytest.raises(ArgumentError, match=r"argument 0 holds a tuple of 2; .* with a named tuple of x, scale"):
        pipe.step((X, SCALE), target=Y)
    with pytest.raises(ArgumentError, match=r"2 arguments are given, and the model was traced with 1"):
        pipe.step(X, SCALE, target=Y)
    torch.testing.assert_close(pipe.predict(Batch(X[:3], SCALE[:3])), Reader()(Batch(X[:3], SCALE[:3])))


def test_it_trains_in_several_processes(plan_for: Callable[..., Plan]) -> None:
    def train(plan: Plan) -> dict[str, Tensor]:
        pipe = Pipeline(Asking(), plan, loss_fn=functional.cross_entropy)
        for batch, y in pipe.batches([(Batch(X, SCALE), Y)]):
            pipe.step(batch, target=y)
        return gradients(pipe)

    found = {name: grad for part in launch(train, planned(plan_for, Asking())) for name, grad in part.items()}
    torch.testing.assert_close(found, expected())


def test_a_class_that_has_come_by_value_serves(plan_for: Callable[..., Plan]) -> None:
    """Scripts and notebooks define it in `__main__`, which is another module in a process of `launch`."""
    pipe = Pipeline(Reader(), elsewhere(planned(plan_for, Reader())), loss_fn=functional.cross_entropy)
    pipe.step(Batch(X, SCALE), target=Y)
    torch.testing.assert_close(gradients(pipe), expected())
    with pytest.raises(ForeignPlanError, match="plan again for this model"):
        Pipeline(Asking(), elsewhere(planned(plan_for, Asking())))


def elsewhere(plan: Plan) -> Plan:
    """As if the class were in a module that is not here."""
    tree = plan.sample.tree.replace(f"{__name__}:Batch", "elsewhere:Batch")
    assert tree != plan.sample.tree
    return plan.model_copy(update={"sample": plan.sample.model_copy(update={"tree": tree})})
