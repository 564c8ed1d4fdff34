"""Settings that ask for larger micro-batches than are measured by default have them measured."""

from typing import Any

import pytest
import torch
from torch import nn

from planner import autoplan
from profiler import Cluster
from profiler.errors import ArgumentError, InfeasibleError


def planned(samples: int, **settings: Any) -> tuple[list[int], tuple[int, ...]]:
    """Sizes that were profiled, and those of the plan."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = autoplan(model, torch.zeros(samples, 8), Cluster.of("2xA100-40GB"), progress=False, **settings)
    assert plan.profile is not None
    return sorted({cost.micro_batch_size for cost in plan.profile.costs}), plan.micro_batch_sizes


@pytest.mark.parametrize(
    ("settings", "profiled", "sizes"),
    [
        ({}, [1, 2, 4], None),
        ({"micro_batches": 2, "micro_batches_per_stage": 1}, [1, 2, 4, 8], (8, 8)),
        ({"micro_batches": 3, "micro_batches_per_stage": 1}, [1, 2, 4, 6], (6, 5, 5)),
        ({"micro_batch_sizes": [16], "micro_batches_per_stage": 1, "stages": 1}, [1, 2, 4, 16], (16,)),
        ({"micro_batches_per_stage": 2}, [1, 2, 4, 8], None),
        ({"micro_batches": 2, "micro_batches_per_stage": 1, "stages": 1, "replicas": 2}, [1, 2, 4], (4, 4)),
    ],
    ids=["default", "two", "unlike", "whole", "fewer a stage", "replicas"],
)
def test_what_is_asked_for_is_profiled(
    settings: dict[str, Any], profiled: list[int], sizes: tuple[int, ...] | None
) -> None:
    found, planned_sizes = planned(16, **settings)
    assert found == profiled
    assert sizes is None or planned_sizes == sizes


class Counted(nn.Module):
    """Branches on how many samples there are, so that its graph is for that many alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y * 2 if x.shape[0] > 3 else y)


@pytest.mark.parametrize(
    ("settings", "least", "size"),
    [({}, 4, 4), ({"stages": 2}, 8, 2), ({"micro_batches": 3, "micro_batches_per_stage": 1}, 3, 4)],
)
def test_a_sample_that_is_the_only_size_and_too_large_is_refused_before_anything_is_measured(
    settings: dict[str, Any], least: int, size: int
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        autoplan(Counted(), torch.zeros(16, 8), Cluster.of("2xA100-40GB"), progress=False, **settings)
    said = str(caught.value)
    assert "could be traced for micro-batches of 16 samples alone" in said
    assert f"a batch of 16 samples is cut into at least {least} of equal size" in said
    also = ", micro_batches=4" if "micro_batches" in settings else ""
    assert f"pass a sample (and a target) of {size}{also}, and batch_size=16. No other size, because" in said


def test_with_the_sample_that_it_asks_for_it_is_planned() -> None:
    plan = autoplan(Counted(), torch.zeros(4, 8), Cluster.of("2xA100-40GB"), batch_size=16, progress=False)
    assert set(plan.micro_batch_sizes) == {4}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"autocast": "bf16"}, "autocast is 'bf16'; give torch.bfloat16 or torch.float16, or leave it out"),
        ({"batch_dims": 5}, r"batch_dims is 5; give a dict of arguments"),
        ({"batch_dims": [0]}, r"batch_dims is \[0\]; give a dict of arguments"),
    ],
)
def test_arguments_of_wrong_types_are_said_to_be_wrong(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        autoplan(Counted(), torch.zeros(16, 8), Cluster.of("2xA100-40GB"), progress=False, **wrong)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="the sample holds a nested tensor; pass padded tensors"):
        autoplan(Counted(), nested, Cluster.of("2xA100-40GB"), progress=False)
