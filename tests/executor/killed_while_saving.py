"""Processes that are killed while they save, and what the newest checkpoint holds then.

    python killed_while_saving.py FOLDER KILLS

`FOLDER` holds plan.json; processes that each save one step more are killed at random moments, until KILLS of them did
not come to their end. They are forks of this one, which has all modules at hand: a kill takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from executor import Pipeline
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import Plan
from tests.executor.fault_trials import BATCH, WIDTH, Deep


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass
class Training:
    """A pipeline with an optimizer."""

    plan: Plan
    pipe: Pipeline = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.pipe = Pipeline(Deep(), self.plan, loss_fn=mean)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.01)

    def step(self) -> None:
        self.pipe.step(batch(self.pipe.steps), target=batch(self.pipe.steps))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, self.pipe, self.optimizer)

    def state(self) -> dict[str, Tensor]:
        """All that training goes on from, by name."""
        found = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            for entry, value in self.optimizer.state[parameter].items():
                found[f"{name}.{entry}"] = value.clone()
        return found


def goes_on(plan: Plan, folder: Path, expected: dict[int, dict[str, Tensor]]) -> int:
    """Load the newest checkpoint, compare it and the step after it with training that never stopped."""
    training = Training(plan)
    step = load_checkpoint(folder, training.pipe, training.optimizer)
    for number in (step, step + 1):
        if number > step:
            training.step()
        found = training.state()
        assert found.keys() == expected[number].keys()
        assert all(torch.equal(value, expected[number][name]) for name, value in found.items()), number
    return step


def never_stopped(plan: Plan, steps: int) -> dict[int, dict[str, Tensor]]:
    """The state after each step but the first none."""
    training = Training(plan)
    states = {}
    for number in range(1, steps + 1):
        training.step()
        states[number] = training.state()
    return states


def save_until_killed(plan: Plan, folder: Path, rank: int, after_s: float) -> None:
    """What each worker runs: save after every step, until one is killed some time after the first."""
    training = Training(plan)

    def strike() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(10_000):
        training.step()
        training.save(folder)
        if number == 0 and training.pipe.rank == rank:
            threading.Thread(target=strike, daemon=True).start()


def killed_saves(plan: Plan, folder: Path, kills: int) -> dict[str, int]:
    """How many forks were killed before they had saved, and how many had the new checkpoint in place already."""
    tries = 5 * kills
    expected = never_stopped(plan, tries + 3)
    training = Training(plan)
    training.step()
    training.save(folder)
    training.step()
    whole_s = _seconds_of_a_fork(training, folder, None)
    assert whole_s is not None
    latest, counts = training.pipe.steps, {"killed": 0, "new": 0, "old": 0}
    numbers = random.Random(0)
    while counts["killed"] < kills and training.pipe.steps <= tries:
        training.step()
        seconds = _seconds_of_a_fork(training, folder, numbers.uniform(0.0, whole_s))
        found = goes_on(plan, folder, expected)
        if seconds is not None:
            assert found == training.pipe.steps
            whole_s = min(whole_s, seconds)
        else:
            assert found in (latest, training.pipe.steps)
            counts["killed"] += 1
            counts["new" if found == training.pipe.steps else "old"] += 1
        latest = found
    return counts


def _seconds_of_a_fork(training: Training, folder: Path, killed_after_s: float | None) -> float | None:
    """Let a fork save; how long it took, None if it was killed before its end."""
    began = time.perf_counter()
    child = os.fork()
    if not child:
        training.save(folder)
        os._exit(0)
    timer = threading.Timer(killed_after_s or 60.0, os.kill, (child, signal.SIGKILL))
    timer.start()
    status = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its number stays taken until the timer is off
    seconds = time.perf_counter() - began
    timer.cancel()
    timer.join()
    os.waitpid(child, 0)
    assert status is not None
    if status.si_code == os.CLD_KILLED:
        return None
    assert status.si_status == 0
    return seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    home = Path(sys.argv[1])
    print(json.dumps(killed_saves(Plan.load(home / "plan.json"), home / "checkpoints", int(sys.argv[2]))))
