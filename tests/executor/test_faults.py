"""Whatever goes wrong in one rank, all end soon with the same error. The exhaustive trials are in tests/benchmarks."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import ExecutionError, Plan
from profiler import trace
from tests.executor import forked_trials
from tests.executor.fault_trials import FAULTS, expected, launch_trial, plan_of, random_fault

RANKS = 3


@pytest.mark.parametrize(("transport", "kinds"), [("auto", FAULTS), ("gloo", ("kill", "exception", "stop"))])
def test_every_rank_ends_with_one_error(
    plan_for: Callable[..., Plan],
    script: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    transport: str,
    kinds: tuple[str, ...],
) -> None:
    plan_of(plan_for, RANKS).save(tmp_path / "plan.json")
    done = script(Path(forked_trials.__file__).resolve(), str(tmp_path), ",".join(kinds), "1", "3", transport)
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert [trial["kind"] for trial in trials] == list(kinds), done.stderr
    busy = ("took", "several errors")  # on a busy machine ranks may be late, and miss their turns to tell
    wrong = [problem for trial in trials for problem in trial["wrong"]]
    assert [problem for problem in wrong if not any(words in problem for words in busy)] == []


def test_the_caller_gets_one_error_of_a_rank_that_is_stopped(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    fault = random_fault("stop", 2, tmp_path, random.Random(0))
    plan = plan_of(plan_for, 2)
    outcome = launch_trial(plan, fault, tmp_path, timeout_s=3)
    assert expected(fault, plan).match(outcome.error), outcome.error
    assert outcome.left == []


class StopsWhenTraced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        if self.stops and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.tanh(self.linear(x))


def measure_twice(plan: Plan, stops: str) -> None:
    model = StopsWhenTraced()
    model.stops = stops == "while it is constructed"
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    for again in (False, True):
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        if again and pipe.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        pipe.measured()


@pytest.mark.parametrize(
    ("stops", "replicas", "waits"),
    [("before it is measured", 1, "sharing what was measured"), ("while it is constructed", 2, "comparing what the")],
)
def test_a_rank_that_is_stopped_outside_of_steps(
    plan_for: Callable[..., Plan], stops: str, replicas: int, waits: str
) -> None:
    """Replicas that made process groups, and ranks that measured again, waited for torch's ten minutes."""
    sequence = trace(StopsWhenTraced(), torch.ones(4, 4))
    cuts = [1] if replicas == 1 else []
    plan = plan_for(sequence, cuts, batch_size=8, micro_batches=2, replicas=replicas)
    with pytest.raises(
        ExecutionError, match=f"rank 1 of 2 failed: it has not answered .* rank 0 has waited .* {waits}"
    ):
        launch(measure_twice, plan, (stops,), timeout_s=3)
