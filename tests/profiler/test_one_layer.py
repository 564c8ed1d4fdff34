"""A model that stays one layer: the sequence, its profile and a plan say what keeps it from being cut."""

from typing import Any

import pytest
import torch
from torch import nn

from planner import Cluster, plan_from_profile
from profiler import Profile, profile, trace
from profiler.errors import ProfileError


class Written(nn.Module):
    """Counts in a buffer which the first and the last operation touch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = nn.Buffer(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write before, read after."""
        hidden = self.last(torch.relu(self.first(x + self.seen)))
        self.seen.copy_(hidden.detach().mean(0))
        return hidden * self.seen


GRU = nn.GRU(8, 8, num_layers=2, batch_first=True)
BLOCK = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("model", "sample", "keep_together", "expected"),
    [
        (nn.Linear(8, 8), torch.zeros(4, 8), [], "operation aten.linear.default does 100% of its work"),
        (nn.Sequential(GRU), torch.zeros(4, 3, 8), [], "operation aten.gru.input of module 0 does 100% of its work"),
        (nn.Sequential(BLOCK), torch.zeros(4, 8), ["0"], "keep_together holds 0 together"),
        (Written(), torch.zeros(4, 8), [], "touch a buffer or an input that it writes"),
    ],
    ids=["linear", "recurrent", "kept together", "written"],
)
def test_one_layer_says_why(model: nn.Module, sample: Any, keep_together: list[str], expected: str) -> None:
    sequence = trace(model, sample, keep_together=keep_together)
    assert len(sequence) == 1
    assert expected in sequence.whole
    assert expected in repr(sequence)


def test_its_plan_says_so_too() -> None:
    sequence, cluster = trace(GRU, torch.zeros(8, 3, 8)), Cluster.of("2xA100-40GB")
    measured = profile(sequence, cluster, loss_fn=lambda output, _: output[0].mean(), target=torch.zeros(8))
    loaded = Profile.parse_json(measured.to_json(), source="here", error=ProfileError)
    assert loaded == measured
    plan = plan_from_profile(loaded, cluster, batch_size=8)
    assert plan.unused is not None
    assert "a stage holds at least 1: operation aten.gru.input does 100% of its work" in plan.unused.reason


def test_other_models_have_nothing_to_say() -> None:
    sequence = trace(BLOCK, torch.zeros(4, 8))
    assert len(sequence) > 1
    assert sequence.whole == ""
    measured = profile(sequence, Cluster.of("2xA100-40GB"), loss_fn=nn.functional.mse_loss, target=torch.zeros(4, 8))
    assert '"whole"' not in measured.to_json()
