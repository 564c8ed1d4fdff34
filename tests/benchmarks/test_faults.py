"""Faults at random moments, each 20 times under `launch` and under torchrun: one error, soon, and nothing left.

    make bench

Three ranks. Seconds count from the fault to the error in the caller (`launch`) or in each rank that can still speak
(torchrun). A rank that is stopped costs the time-out, here 8 s, and under torchrun 30 s more, which its agent waits
before it kills a process that does not end.
"""

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from executor import launch
from planner import ExecutionError, Plan
from tests.executor.conftest import plan_for  # noqa: F401 - a fixture
from tests.executor.fault_trials import (
    FAULTS,
    allowed_s,
    expected,
    launch_trial,
    plan_of,
    random_fault,
    torchrun_trial,
)
from tests.executor.killed_while_saving import goes_on, never_stopped, save_until_killed

TRIALS = 20
RANKS = 3


@pytest.mark.benchmark
@pytest.mark.parametrize("how", ["launch", "torchrun"])
@pytest.mark.parametrize("kind", FAULTS)
def test_one_error_soon_and_nothing_left(
    plan_for: Callable[..., Plan],  # noqa: F811
    tmp_path: Path,
    kind: str,
    how: str,
) -> None:
    plan = plan_of(plan_for, RANKS)
    numbers = random.Random(f"{how} {kind}")
    seconds, wrong, errors = [], [], 0
    for _ in range(TRIALS):
        fault = random_fault(kind, RANKS, tmp_path, numbers)
        outcomes = [launch_trial(plan, fault, tmp_path)] if how == "launch" else torchrun_trial(plan, fault, tmp_path)
        silent = (
            1 if kind in ("kill", "stop", "endless action", "fewer steps") else 0
        )  # ranks that cannot speak, or have no error
        errors += len(outcomes)
        if how == "torchrun" and len(outcomes) != RANKS - silent:
            wrong.append(f"{fault}: {len(outcomes)} ranks reported")
        for outcome in outcomes:
            seconds.append(outcome.seconds)
            if not expected(fault, RANKS).match(outcome.error) or outcome.left or outcome.seconds > allowed_s(fault):
                wrong.append(f"{fault}: {outcome}")
    print(
        f"\n{how:8s} {kind:14s} {TRIALS} trials, {errors} errors, {len(wrong)} wrong; seconds until the error: median "
        f"{median(seconds):.2f}, worst {max(seconds):.2f} (allowed {allowed_s(fault):.0f})"
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.benchmark
def test_a_kill_while_saving_leaves_a_whole_checkpoint(plan_for: Callable[..., Plan], tmp_path: Path) -> None:  # noqa: F811
    """Of one of three ranks; what is left loads with 1 to 4 stages and goes on as if never stopped, in every bit."""
    expected = never_stopped(plan_of(plan_for, 1), 200)
    numbers = random.Random(0)
    steps = []
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        with pytest.raises(ExecutionError, match="killed by SIGKILL"):
            launch(save_until_killed, plan_of(plan_for, RANKS), (folder, trial % RANKS, numbers.uniform(0.0, 0.5)))
        steps.append(goes_on(plan_of(plan_for, 1 + trial % 4), folder, expected))
    print(f"\nkilled while saving: {TRIALS} of {TRIALS} whole, after {min(steps)} to {max(steps)} steps")
