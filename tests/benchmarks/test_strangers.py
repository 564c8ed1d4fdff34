"""Strangers at every port at which ranks listen, while these start and train: how much later the training is done.

    make bench

Ranks are started by `launch`, and by hand with MASTER_ADDR=127.0.0.1. At each port that is seen there come, as soon as
it is, one that is silent, one that speaks HTTP, one that sends megabytes, one that sends a byte at a time and one that
nearly has the form of a greeting; all stay.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from planner import Plan
from tests.executor.conftest import plan_for  # noqa: F401 - a fixture
from tests.executor.test_listening import train_by_hand, train_by_launch

TRIALS = 20


@pytest.mark.benchmark
@pytest.mark.parametrize("run", [train_by_launch, train_by_hand])
def test_training_with_strangers(
    plan_for: Callable[..., Plan],  # noqa: F811
    tmp_path: Path,
    run: Callable[..., set[tuple[str, int]]],
) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(TRIALS):
        for strangers in (False, True):
            folder = tmp_path / f"{trial}-{strangers}"
            folder.mkdir()
            begun = time.perf_counter()
            assert {host for host, _ in run(plan_for, folder, strangers=strangers)} <= {"127.0.0.1"}
            seconds[strangers].append(time.perf_counter() - begun)
    without, beside = median(seconds[False]), median(seconds[True])
    print(f"\n| {run.__name__} | {TRIALS} | {without:.2f} | {beside:.2f} | {max(seconds[True]):.2f} |")
    assert beside < without + 2.0
