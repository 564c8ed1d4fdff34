"""Random schedules with random uses of the executor between and around steps: all must leave what one stage leaves.

That one never fails and never stops: a failed step must leave nothing behind, and a restart nothing out.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from planner import ExecutionError, Plan
from planner.plan.schedules import SCHEDULES, chunk_schedules
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import random_orders
from tests.executor.rich_training import Training, X, Y, same, sequence
from tests.executor.same_result import random_segments

STEPS = 5
USES = ("step", "step twice", "clip", "evaluate", "predict", "failed step", "scaled", "restart")


def random_plan(chance: random.Random, replicas: int) -> Plan:
    """1 to 3 ranks with 1 to 3 chunks of the small model, any schedule that sums gradients in order."""
    schedule = chance.choice([name for name in SCHEDULES if name != "gpipe"])
    layers = len(sequence())
    chunks = chance.randint(1, 3) if schedule in chunk_schedules() else 1
    stages = chance.randint(1, min(3, layers // chunks)) * chunks
    cuts = sorted(chance.sample(range(1, layers), stages - 1))
    plan = whole_plan(replicas)
    return plan_for(
        sequence(),
        cuts,
        batch_size=plan.batch_size,
        micro_batches=plan.M,
        replicas=replicas,
        schedule=schedule,
        chunks=chunks,
        orders=random_orders(stages, plan.M, chance) if SCHEDULES[schedule].made_for_plan else (),
        recompute=[random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, layers])],
    )


def whole_plan(replicas: int) -> Plan:
    """One stage under 1F1B."""
    micro_batches = 4 // replicas  # batch normalization needs two samples in each
    return plan_for(sequence(), batch_size=len(X), micro_batches=micro_batches, replicas=replicas, schedule="1f1b")


def used(plans: list[Plan], uses: list[str], folder: Path) -> tuple[list[float], dict[str, object]]:
    """Trains with these uses in a row, a restart taking the next plan; what is observed, and the state at the end."""
    following = iter(plans)
    training = Training(next(following))
    seen: list[float] = []
    for number, use in enumerate(uses):
        if use == "restart":
            training.save(folder / str(number))
            training = Training(next(following), seed=9)
            training.load(folder / str(number))
            continue
        training.optimizer.zero_grad()
        seen += _passes(training, use, at=(3 * number + 5) % len(X))
        training.optimizer.step()
        training.scheduler.step()
    return seen, training.state()


def _passes(training: Training, use: str, at: int) -> list[float]:
    """Gradients of a step, and what the use shows; `at` is the sample of which a failed step fails."""
    pipe = training.pipe
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if use == "scaled" else None
    seen = []
    if use == "failed step":
        foreign = Y.clone()
        foreign[at] = 100  # a class that is not there: the loss of its micro-batch fails, after passes of others
        with pytest.raises(
            ExecutionError, match=r"micro-batch \d+, action \d+F\d+: IndexError: Target 100 is out of bounds"
        ):
            pipe.step(X, target=foreign)
        assert all(parameter.grad is None for parameter in pipe.parameters())
    seen.append(pipe.step(X, target=Y, scaler=scaler).item())
    if use == "step twice":
        seen.append(pipe.step(X.flip(0), target=Y).item())
    if use == "clip":
        seen.append(pipe.clip_grad_norm_(0.1).item())
    if use == "evaluate":
        seen.append(pipe.evaluate(X, target=Y).item())
    if use == "predict":
        seen += pipe.predict(X).flatten().tolist()
    return seen


def differing(seed: int, folder: Path) -> list[str]:
    """What a random run shows that one stage does not; empty if nothing."""
    chance = random.Random(seed)
    uses = [chance.choice(USES) for _ in range(STEPS)]
    replicas = chance.choice((1, 1, 2))
    plans = [random_plan(chance, replicas) for _ in range(1 + uses.count("restart"))]
    found, state = used(plans, uses, folder / "plans")
    undisturbed = ["step" if use == "failed step" else use for use in uses if use != "restart"]
    expected, whole = used([whole_plan(replicas)], undisturbed, folder / "whole")
    names = [f"{plan.schedule}, {plan.K} stages, {plan.chunks} chunks, {replicas} replicas" for plan in plans]
    wrong = [] if found == expected else [f"{names} {uses}: saw {found}, expected {expected}"]
    return wrong if same(state, whole) else [*wrong, f"{names} {uses}: another state"]
