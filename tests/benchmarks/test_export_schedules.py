"""Plans of every schedule, exported to `torch.distributed.pipelining` and trained by it: equal gradients."""

from typing import Any

import pytest

from tests.planner.test_export_engines import compared_with_torch


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["decoder", "skipping"])
@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize(
    "settings",
    [
        {"stages": 2, "schedule": "gpipe"},
        {"stages": 3, "schedule": "1f1b"},
        {"stages": 4, "schedule": "interleaved", "chunks": 2},
        {"stages": 2, "schedule": "zb-h1"},
        {"stages": 2, "schedule": "zb"},
        {"stages": 3, "schedule": "zb-h1"},
        {"stages": 4, "schedule": "zb-v", "chunks": 2},
        {"stages": 6, "schedule": "zb-v", "chunks": 2},
    ],
    ids=str,
)
def test_torchs_engine_and_every_schedule(name: str, recompute: str, settings: dict[str, Any]) -> None:
    compared_with_torch(name, recompute=recompute, **settings)
