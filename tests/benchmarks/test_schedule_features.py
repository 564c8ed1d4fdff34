"""Random uses of the executor under random schedules, ranks and chunks, against one stage under 1F1B: every bit.

    python -m pytest -m benchmark tests/benchmarks/test_schedule_features.py -s

Uses are clipping, evaluation, prediction, gradients of two steps, a scaled loss, a step that fails, and a restart
from a checkpoint by another plan of other ranks and chunks; in one process, and in one for each rank.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from profiler import LayerSequence
from tests.executor import known_traces
from tests.executor.conftest import inherited, traced_once  # noqa: F401 - fixtures
from tests.executor.rich_training import sequence
from tests.executor.schedule_features import differing

RUNS = 400
IN_PROCESSES = 40


@pytest.mark.benchmark
@pytest.mark.usefixtures("traced_once")
def test_uses_under_all_schedules(tmp_path: Path) -> None:
    known_traces.remember(sequence())
    found = Counter(text for seed in range(RUNS) for text in differing(1000 + seed, tmp_path / str(seed)))
    known_traces.forget()
    print(f"\n{RUNS} runs, {len(found)} wrong")
    assert not found


@pytest.mark.benchmark
def test_uses_in_processes(inherited: Callable[..., LayerSequence], tmp_path: Path) -> None:  # noqa: F811
    known_traces.remember(inherited(sequence))
    found = Counter(
        text for seed in range(IN_PROCESSES) for text in differing(2000 + seed, tmp_path / str(seed), processes=True)
    )
    known_traces.forget()
    print(f"\n{IN_PROCESSES} runs in processes, {len(found)} wrong")
    assert not found
