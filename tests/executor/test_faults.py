"""Whatever goes wrong in one rank, all end soon with the same error. The exhaustive trials are in tests/benchmarks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from planner import Plan
from tests.executor.fault_trials import FAULTS, expected, launch_trial, plan_of, random_fault


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind in ("stop", "fewer steps", "nan")])
def test_the_caller_gets_one_error(plan_for: Callable[..., Plan], tmp_path: Path, kind: str) -> None:
    fault = random_fault(kind, 2, tmp_path, random.Random(kind))
    outcome = launch_trial(plan_of(plan_for, 2), fault, tmp_path)
    assert expected(fault, 2).match(outcome.error), outcome.error
    assert outcome.left == []
