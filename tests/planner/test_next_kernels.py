"""Room between two measured sizes for kernels that take over on the way."""

from typing import Any

import pytest
import torch
from torch import nn

from planner.cost.layer_costs import CostModel
from planner.cost.next_kernels import with_next_kernels
from profiler import profile, trace
from profiler.record import InStage, LayerCost
from profiler.run.inputs import micro_batch
from tests.models.tracked import CPU, Allocator, run_stages

KIND = "cpu/1 thread"


def _cost(size: int, workspace_bytes: int) -> LayerCost:
    nothing: dict[str, Any] = {"forward_s": 0.0, "recompute_s": 0.0, "backward_s": 0.0, "spread": 0.0}
    in_stage = InStage(forward_bytes=0, backward_bytes=0, last_backward_bytes=0, workspace_bytes=workspace_bytes)
    return LayerCost(
        layer=0,
        micro_batch_size=size,
        device_kind=KIND,
        **nothing,
        kept_bytes=0,
        transient_bytes=workspace_bytes,
        in_stage=in_stage,
        output_bytes=0,
        output_gradient_bytes=0,
    )


@pytest.mark.parametrize(("small", "large", "below"), [(0, 9, 9), (2, 9, 9), (3, 9, 3), (8, 9, 8), (9, 9, 9)])
def test_what_grows_faster_than_the_samples_is_of_another_kernel(small: int, large: int, below: int) -> None:
    rows = {(KIND, 4): [_cost(4, small)], (KIND, 12): [_cost(12, large)]}
    found = with_next_kernels(rows)
    assert found[KIND, 12] is rows[KIND, 12]
    (cost,) = found[KIND, 4]
    assert cost.in_stage is not None
    assert (cost.in_stage.workspace_bytes, cost.transient_bytes) == (below, below)
    assert (found[KIND, 4] is rows[KIND, 4]) == (small == below)


def test_a_kernel_that_takes_over_between_two_sizes_is_allowed_for() -> None:
    """From 16 samples on, convolutions with 1 x 1 weights are oneDNN's on one thread too, and copy all they touch."""
    images = torch.randn(64, 16, 12, 12)
    sequence = trace(nn.Conv2d(16, 24, 1), images)
    settings: dict[str, Any] = {"batch_size": 64, "time_budget_s": 0.0, "progress": False, "cache": False}
    measured = profile(sequence, 1, sample=images, micro_batch_sizes=[8, 64], **settings)
    costs, stop = CostModel(measured), len(sequence)
    ((_, most),) = run_stages(
        sequence, [0, stop], micro_batch(sequence, images, 16, CPU), None, None, has_loss=False, meter=Allocator
    )
    assert costs.stage(KIND, 16, 0, stop)[1] >= most
    at = {cost.micro_batch_size: cost.in_stage.workspace_bytes for cost in measured.costs if cost.in_stage}
    assert costs.layers(KIND, 8).workspace_bytes[0] == at[8]
