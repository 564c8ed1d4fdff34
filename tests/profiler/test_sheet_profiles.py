"""A profile from a data sheet neither warns of nor refuses a model that runs: random ones, and with idle parts."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import plan_from_profile
from profiler import Cluster, profile, trace
from profiler.run.loss import LossFunction
from tests.models.random_models import RecipeModel, loss_of, random_recipe, sample

BATCH = 8
CLUSTER = Cluster.of("2xA100-40GB")


def check(model: nn.Module, inputs: object, loss_fn: LossFunction | None, target: Tensor | None) -> None:
    """No warning, a cost for every layer that is no less than nothing, and a plan where two stages can be."""
    sequence = trace(model, inputs, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = profile(sequence, CLUSTER, batch_size=BATCH, loss_fn=loss_fn, target=target, progress=False)
        plan = plan_from_profile(found, CLUSTER, batch_size=BATCH, micro_batches_per_stage=1)
    assert {cost.layer for cost in found.costs} == {*range(len(sequence))}
    assert all(cost.forward_s >= 0 and cost.backward_s >= 0 and cost.kept_bytes >= 0 for cost in found.costs)
    assert plan.prediction.step_s > 0


@pytest.mark.parametrize("seed", range(8))
def test_random_models(seed: int) -> None:
    recipe = random_recipe(random.Random(seed), 4 + seed)
    model, inputs = RecipeModel(recipe), sample(BATCH)
    assert model(*inputs) is not None
    check(model, inputs, loss_of(recipe), torch.zeros(BATCH, dtype=torch.float64))


class Aside(nn.Module):
    """Holds modules that are never called, and returns what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.none, self.named = nn.Linear(3, 3), nn.ModuleList(), nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return x


IDLE: dict[str, Callable[[], nn.Module]] = {
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "dropout of everything": lambda: nn.Dropout(1.0),
    "dropout": lambda: nn.Dropout(0.5),
    "identity": nn.Identity,
    "empty": nn.Sequential,
    "aside": Aside,
    "flat already": lambda: nn.Flatten(1),
    "frozen": lambda: nn.Linear(16, 16).requires_grad_(False),
    "no bias": lambda: nn.Linear(16, 16, bias=False),
    "no affine": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "in place": lambda: nn.Dropout(0.0, inplace=True),
    "average of one": lambda: nn.AvgPool1d(1),
}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("place", ["last", "everywhere"])
def test_parts_that_do_little_or_nothing(name: str, place: str) -> None:
    made, one = IDLE[name], lambda: nn.Linear(16, 16)
    parts = [one(), one(), made()] if place == "last" else [made(), one(), made(), made(), one(), made()]
    check(nn.Sequential(*parts), torch.ones(BATCH, 16), nn.functional.mse_loss, torch.zeros(BATCH, 16))


def test_no_parameter_is_trained_but_one() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16).requires_grad_(index == 1) for index in range(4)))
    check(model, torch.ones(BATCH, 16), nn.functional.mse_loss, torch.zeros(BATCH, 16))


@pytest.mark.parametrize("rows", [20, 20_000])
def test_a_sparse_gradient_is_its_indices_and_values(rows: int) -> None:
    """It had no storage to ask, and no size could be estimated; it takes nothing for rows that nobody looked up."""
    model = nn.Sequential(nn.Embedding(rows, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))
    sequence = trace(model, torch.ones(4, 3).long(), progress=False)
    about: dict[str, Any] = {"micro_batch_sizes": [2, 4], "progress": False}
    sheet = profile(sequence, CLUSTER, **about)
    measured = profile(sequence, 1, time_budget_s=0.0, cache=False, **about)
    kept, really_kept = (
        {(cost.layer, cost.micro_batch_size): (cost.kept_bytes, cost.output_bytes) for cost in found.costs}
        for found in (sheet, measured)
    )
    assert kept == really_kept
    assert max(cost.transient_bytes for cost in sheet.costs) < 20 * 1024  # a whole gradient of 20,000 rows: 640 kB
