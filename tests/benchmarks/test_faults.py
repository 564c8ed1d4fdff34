"""Faults at random moments in one of three ranks: one error, soon, and nothing left.

    make bench

Under `launch` seconds count from the fault to the error in the caller; under torchrun, and in forks that meet as under
torchrun but start in a moment, to the error in each rank that can still speak. A rank that is stuck costs the time-out,
here 8 s; a stopped one costs the trial 30 s more under torchrun, whose agent waits as long before it kills a process.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from executor import launch
from planner import ExecutionError, Plan
from planner.plan.schedules import ScheduleName
from tests.executor import forked_trials
from tests.executor.conftest import plan_for  # noqa: F401 - a fixture
from tests.executor.fault_trials import (
    FAULTS,
    TIMEOUT_S,
    launch_trial,
    plan_of,
    random_fault,
    torchrun_trial,
)
from tests.executor.killed_while_saving import goes_on, never_stopped, save_until_killed

TRIALS = {"launch": 20, "torchrun": 20}
FORKS = {
    ("gpipe", 1, "auto"): 50,
    ("gpipe", 1, "gloo"): 20,
    ("interleaved", 2, "auto"): 20,
    ("interleaved-lean", 2, "auto"): 20,
    ("zb-h1", 1, "auto"): 20,
    ("zb", 1, "auto"): 20,
    ("zb-v", 2, "auto"): 20,
}
"""Trials of each kind of fault, by schedule, chunks a rank and transport."""
KILLS = 200
RANKS = 3


@pytest.mark.benchmark
@pytest.mark.parametrize("how", TRIALS)
@pytest.mark.parametrize("kind", FAULTS)
def test_one_error_soon_and_nothing_left(
    plan_for: Callable[..., Plan],  # noqa: F811
    tmp_path: Path,
    kind: str,
    how: str,
) -> None:
    plan = plan_of(plan_for, RANKS)
    numbers = random.Random(f"{how} {kind}")
    seconds, wrong = [], []
    for _ in range(TRIALS[how]):
        fault = random_fault(kind, RANKS, tmp_path, numbers)
        outcomes = [launch_trial(plan, fault, tmp_path)] if how == "launch" else torchrun_trial(plan, fault, tmp_path)
        for outcome in outcomes:
            seconds.append(outcome.seconds)
            if outcome.wrong(fault, plan):
                wrong.append(f"{fault}: {outcome}")
    _report(how, kind, TRIALS[how], seconds, wrong)


@pytest.mark.benchmark
@pytest.mark.parametrize("way", FORKS, ids=str)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_rank_has_one_error_soon(
    plan_for: Callable[..., Plan],  # noqa: F811
    tmp_path: Path,
    kind: str,
    way: tuple[ScheduleName, int, str],
) -> None:
    _try_forks(plan_for, tmp_path, kind, way, FORKS[way])


@pytest.mark.benchmark
def test_kills_at_random_moments_leave_nothing(plan_for: Callable[..., Plan], tmp_path: Path) -> None:  # noqa: F811
    """With shared memory between the ranks: no hang, no name in /dev/shm, and the one error in the others."""
    _try_forks(plan_for, tmp_path, "kill", ("1f1b", 1, "auto"), KILLS)


def _try_forks(
    plan_for: Callable[..., Plan],  # noqa: F811
    folder: Path,
    kind: str,
    way: tuple[ScheduleName, int, str],
    trials: int,
) -> None:
    schedule, chunks, transport = way
    plan_of(plan_for, RANKS, schedule, chunks).save(folder / "plan.json")
    script = str(Path(forked_trials.__file__).resolve())
    done = subprocess.run(
        [sys.executable, script, str(folder), kind, str(trials), str(TIMEOUT_S), transport],
        env={**os.environ, **forked_trials.ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == trials, done.stderr
    wrong = [problem for trial in found for problem in trial["wrong"]]
    how = f"forks, {schedule}" + (f" with {chunks} chunks" if chunks > 1 else "")
    how += ", sockets" if transport == "gloo" else ""
    _report(how, kind, trials, [one for trial in found for one in trial["seconds"]], wrong)


def _report(how: str, kind: str, trials: int, seconds: list[float], wrong: list[str]) -> None:
    """What a cell of the table in faults.md says."""
    print(f"\n| {kind} | {how} | {trials} | {len(wrong)} | {median(seconds):.2f} | {max(seconds):.2f} |")
    assert not wrong, "\n".join(wrong)


@pytest.mark.benchmark
def test_a_kill_while_saving_leaves_a_whole_checkpoint(plan_for: Callable[..., Plan], tmp_path: Path) -> None:  # noqa: F811
    """Of one of three ranks; what is left loads with 1 to 4 stages and goes on as if never stopped, in every bit."""
    expected_states = never_stopped(plan_of(plan_for, 1), 200)
    numbers = random.Random(0)
    steps = []
    for trial in range(TRIALS["launch"]):
        folder = tmp_path / str(trial)
        with pytest.raises(ExecutionError, match="killed by SIGKILL"):
            launch(save_until_killed, plan_of(plan_for, RANKS), (folder, trial % RANKS, numbers.uniform(0.0, 0.5)))
        steps.append(goes_on(plan_of(plan_for, 1 + trial % 4), folder, expected_states))
    print(f"\nkilled while saving: {len(steps)} of {len(steps)} whole, after {min(steps)} to {max(steps)} steps")
