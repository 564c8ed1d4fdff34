"""Settings that ask for larger micro-batches than are measured by default have them measured."""

from typing import Any

import pytest
import torch
from torch import nn

from planner import autoplan
from profiler import Cluster


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
