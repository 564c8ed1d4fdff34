"""A few random uses of the executor under random schedules; hundreds in tests/benchmarks/test_schedule_features.py."""

from pathlib import Path

import pytest

from tests.executor import known_traces
from tests.executor.rich_training import sequence
from tests.executor.schedule_features import differing


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("seed", range(2))
def test_uses_leave_what_one_stage_leaves(seed: int, tmp_path: Path) -> None:
    known_traces.remember(sequence())
    assert differing(seed, tmp_path) == []
    known_traces.forget()
