"""Random uses of the executor under random schedules, ranks and chunks, against one stage under 1F1B: every bit.

    python -m pytest -m benchmark tests/benchmarks/test_schedule_features.py -s

Uses are clipping, evaluation, prediction, gradients of two steps, a scaled loss, a step that fails, and a restart
from a checkpoint by another plan. All in one process.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.executor import known_traces
from tests.executor.rich_training import sequence
from tests.executor.schedule_features import differing

RUNS = 400


@pytest.mark.benchmark
@pytest.mark.usefixtures("traced_once")
def test_uses_under_all_schedules(tmp_path: Path) -> None:
    known_traces.remember(sequence())
    found = Counter(text for seed in range(RUNS) for text in differing(1000 + seed, tmp_path / str(seed)))
    known_traces.forget()
    print(f"\n{RUNS} runs, {len(found)} wrong")
    assert not found
