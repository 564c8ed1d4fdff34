"""Whatever goes wrong in one rank, all end soon with the same error. The exhaustive trials are in tests/benchmarks."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from planner import Plan
from tests.executor.fault_trials import FAULTS, expected, launch_trial, plan_of, random_fault

RANKS = 3


def test_every_rank_ends_with_one_error(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    plan_of(plan_for, RANKS).save(tmp_path / "plan.json")
    script = Path(__file__).with_name("forked_trials.py").resolve()
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), ",".join(FAULTS), "1", "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert [trial["kind"] for trial in trials] == list(FAULTS), done.stderr
    assert [wrong for trial in trials for wrong in trial["wrong"] if "took" not in wrong] == []


def test_the_caller_gets_one_error_of_a_rank_that_is_stopped(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    fault = random_fault("stop", 2, tmp_path, random.Random(0))
    outcome = launch_trial(plan_of(plan_for, 2), fault, tmp_path)
    assert expected(fault, 2).match(outcome.error), outcome.error
    assert outcome.left == []
