"""Random schedules with random uses of the executor between and around steps: all must leave what one stage leaves.

That one never fails and never stops: a failed step must leave nothing behind, and a restart nothing out.
"""

from __future__ import annotations

import random
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from executor import launch
from planner import ExecutionError, Plan
from planner.plan.schedules import SCHEDULES
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import orders_for, random_chunks
from tests.executor.rich_training import Training, X, Y, same, sequence
from tests.executor.same_result import random_segments

STEPS = 5
USES = ("step", "step twice", "clip", "evaluate", "predict", "failed step", "scaled", "restart")


def random_plan(chance: random.Random, replicas: int) -> Plan:
    """1 to 3 ranks with 1 to 3 chunks of the small model, any schedule that sums gradients in order."""
    schedule = chance.choice([name for name in SCHEDULES if name != "gpipe"])
    layers = len(sequence())
    chunks = random_chunks(schedule, 3, chance)
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
        orders=orders_for(schedule, stages, plan.M, chance, chunks),
        recompute=[random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, layers])],
    )


def whole_plan(replicas: int) -> Plan:
    """One stage under 1F1B."""
    micro_batches = 4 // replicas  # batch normalization needs two samples in each
    return plan_for(sequence(), batch_size=len(X), micro_batches=micro_batches, replicas=replicas, schedule="1f1b")


Seen = list[Any]
"""What each use shows; of a prediction None in ranks without the last stage."""


def used(plans: list[Plan], uses: list[str], folder: Path) -> tuple[Seen, dict[str, object]]:
    """Trains with these uses in a row, a restart taking the next plan; what is observed, and the state at the end."""
    following = iter(plans)
    training = Training(next(following))
    seen: Seen = []
    for number, use in enumerate(uses):
        if use == "restart":
            training.save(folder / str(number))
            training = Training(next(following), seed=9)
            training.load(folder / str(number))
        else:
            seen += _passes(training, use, at=(3 * number + 5) % len(X))
    return seen, training.state()


def used_in_processes(plans: list[Plan], uses: list[str], folder: Path) -> tuple[Seen, dict[str, object]]:
    """The same in one process for each rank, other ones after each restart."""
    seen: Seen = []
    parts: list[tuple[Seen, dict[str, object]]] = []
    lives = [list(life) for is_restart, life in groupby(uses, lambda use: use == "restart") if not is_restart]
    for number, (plan, life) in enumerate(zip(plans, lives, strict=True)):
        parts = launch(_live, plan, (life, folder / str(number), folder / str(number + 1)))
        for shown in zip(*(found for found, _ in parts), strict=True):
            said = [one for one in shown if one is not None]
            assert all(one == said[0] for one in said), f"ranks see unlike things: {said}"
            seen.append(said[0])
    state: dict[str, object] = {}
    for _, part in parts:
        both = part.keys() & state.keys()
        assert same({name: part[name] for name in both}, {name: state[name] for name in both}), (
            "ranks hold unlike states"
        )
        state |= part
    return seen, state


def _live(plan: Plan, uses: list[str], before: Path, after: Path) -> tuple[Seen, dict[str, object]]:
    """A rank from one restart to the next."""
    training = Training(plan, seed=9 if before.exists() else 0)
    if before.exists():
        training.load(before)
    seen = [one for use in uses for one in _passes(training, use, at=0)]
    training.save(after)
    return seen, training.state()


def _passes(training: Training, use: str, at: int) -> Seen:
    """A step of the optimizer, and what the use shows; `at` is the sample of which a failed step fails."""
    pipe = training.pipe
    scaler = ShardedGradScaler("cpu", init_scale=8.0) if use == "scaled" else None
    seen: Seen = []
    training.optimizer.zero_grad()
    if use == "failed step":
        foreign = Y.clone()
        foreign[at] = 100  # a class that is not there: the loss of its micro-batch fails, after passes of others
        with pytest.raises(ExecutionError, match=r"action \d+F\d+: IndexError: Target 100 is out of bounds"):
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
        predicted = pipe.predict(X)
        seen.append(None if predicted is None else predicted.tolist())
    training.optimizer.step()
    training.scheduler.step()
    return seen


def differing(seed: int, folder: Path, *, processes: bool = False) -> list[str]:
    """What a random run shows that one stage does not; empty if nothing.

    In processes no step fails, since that ends them, and there are no replicas, of which each predicts its own part.
    """
    chance = random.Random(seed)
    uses = [chance.choice(USES) for _ in range(STEPS)]
    if processes:
        uses = ["step", *("clip" if use == "failed step" else use for use in uses[:-1]), "step"]
        uses = [use for use, before in zip(uses, ["", *uses], strict=False) if (use, before) != ("restart", "restart")]
    replicas = 1 if processes else chance.choice((1, 1, 2))
    plans = [random_plan(chance, replicas) for _ in range(1 + uses.count("restart"))]
    found, state = (used_in_processes if processes else used)(plans, uses, folder / "plans")
    undisturbed = ["step" if use == "failed step" else use for use in uses if use != "restart"]
    expected, whole = used([whole_plan(replicas)], undisturbed, folder / "whole")
    names = [f"{plan.schedule}, {plan.K} stages, {plan.chunks} chunks, {replicas} replicas" for plan in plans]
    wrong = [] if found == expected else [f"{names} {uses}: saw {found}, expected {expected}"]
    return wrong if same(state, whole) else [*wrong, f"{names} {uses}: another state"]
