"""Awkward models by random plans of every schedule: every bit of one stage, and the gradients of the plain model.

    python -m pytest -m benchmark tests/benchmarks/test_awkward_schedules.py -s

Each plan has 1 to 4 ranks with 1 to 3 chunks at random cuts, 1 to 7 micro-batches (mostly no multiple of the ranks,
some fewer than ranks), unequal ones, random recompute, skips, one or two replicas, and fp32, bf16-mixed or bf16-grads.
Training is three steps of AdamW with the gradients' common norm clipped. The oracle is one stage in one process, and
in float32 the plain model's sums over the same micro-batches.
"""

import copy
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from executor import Pipeline, launch
from planner import Plan
from planner.plan.schedules import SCHEDULES
from profiler import LayerSequence, trace
from tests.executor import known_traces
from tests.executor.conftest import _plan as plan_for
from tests.executor.conftest import inherited, traced_once  # noqa: F401 - fixtures
from tests.executor.random_orders import orders_for, random_chunks
from tests.executor.same_result import Trained, differing, random_segments
from tests.models.chunked import AWKWARD, BATCH_SIZE

pytestmark = pytest.mark.benchmark
PLANS = int(os.environ.get("PLANS", "60"))
STEPS, MOST_NORM = 3, 0.3
WITHIN = 1e-5
PRECISIONS = (None, None, "bf16-mixed", "bf16-grads")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def traced(name: str) -> LayerSequence:
    """`name` is a model's, a bar and the precision."""
    model, precision = name.split("|")
    torch.manual_seed(5)
    return trace(AWKWARD[model].make(), AWKWARD[model].x, precision=precision or None)


def train(plan: Plan, name: str) -> Trained:
    case = AWKWARD[name.split("|", maxsplit=1)[0]]
    torch.manual_seed(5)
    pipe = Pipeline(case.make(), plan, loss_fn=case.loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipe.step(case.x, target=case.target).item())
        losses.append(pipe.clip_grad_norm_(MOST_NORM).item())
        optimizer.step()
    gradients = {f"gradient of {key}": p.grad.clone() for key, p in pipe.named_parameters() if p.grad is not None}
    return Trained(losses, gradients | {key: value.clone() for key, value in pipe.state_dict().items()})


def random_plan(chance: random.Random, sequence: LayerSequence, schedule: str, ranks: int, **settings: Any) -> Plan:
    """With these ranks; the rest is drawn."""
    chunks = random_chunks(schedule, min(3, len(sequence) // ranks), chance)
    stages = min(ranks, len(sequence) // chunks) * chunks
    cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
    return plan_for(
        sequence,
        cuts,
        batch_size=BATCH_SIZE,
        schedule=schedule,
        chunks=chunks,
        orders=orders_for(schedule, stages, settings["micro_batches"], chance, chunks),
        recompute=[random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, len(sequence)])],
        skips=chunks == 1 and chance.random() < 0.5,
        **settings,
    )


def whole_plan(sequence: LayerSequence, schedule: str, **settings: Any) -> Plan:
    """One stage, with gradients summed in the same order."""
    alone = "gpipe" if schedule == "gpipe" else "1f1b"
    return plan_for(sequence, batch_size=BATCH_SIZE, schedule=alone, **settings)


def said(plan: Plan, name: str) -> str:
    return (
        f"{name}: {plan.schedule}, {plan.K // plan.chunks} ranks x {plan.chunks}, M = {plan.M}, {plan.replicas} "
        f"replicas, cuts {[stage.first_layer for stage in plan.stages[1:]]}, orders {plan.orders}"
    )


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("model", AWKWARD)
def test_awkward_models_train_alike_under_every_schedule(model: str) -> None:
    chance = random.Random(f"{model} {os.environ.get('FIRST', '')}")
    wholes: dict[tuple[Any, ...], Trained] = {}
    seen: Counter[str] = Counter()
    found: list[str] = []
    for number in range(PLANS):
        schedule = tuple(SCHEDULES)[number % len(SCHEDULES)]
        precision = chance.choice(PRECISIONS)
        name = f"{model}|{precision or ''}"
        sequence = traced(name)
        known_traces.remember(sequence)
        replicas = chance.choice((1, 1, 2))
        settings = {"micro_batches": chance.randint(1, 7 if replicas == 1 else 3), "replicas": replicas}
        if model in {"inseparable", "convolutions"}:  # batch normalization needs two samples
            settings["micro_batches"] = min(settings["micro_batches"], 6 // replicas)
        plan = random_plan(chance, sequence, schedule, chance.randint(1, min(4, len(sequence))), **settings)
        key = (precision, schedule == "gpipe", *settings.values())
        if key not in wholes:
            wholes[key] = train(whole_plan(sequence, schedule, **settings), name)
        wrong = differing(train(plan, name), wholes[key])
        seen[schedule] += 1
        if wrong:
            found.append(f"{said(plan, name)}: {wrong[:5]}")
            print(found[-1], flush=True)
    known_traces.forget()
    print(f"\n{model} ({len(traced(f'{model}|'))} layers): {dict(seen)}, {len(found)} wrong", flush=True)
    assert not found


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("model", AWKWARD)
def test_one_stage_has_the_gradients_of_the_plain_model(model: str) -> None:
    """Without dropout, in float32, for each schedule with as many chunks as there may be."""
    torch.manual_seed(5)
    case = AWKWARD[model]
    made = case.make()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(made)
    for rows in torch.arange(BATCH_SIZE).tensor_split(5):
        (case.loss_fn(plain(case.x[rows]), case.target[rows]) * len(rows) / BATCH_SIZE).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    sequence = trace(made, case.x)
    known_traces.remember(sequence)
    for schedule in SCHEDULES:
        plan = random_plan(random.Random(model), sequence, schedule, 2, micro_batches=5)
        made.zero_grad()
        pipe = Pipeline(made, plan, loss_fn=case.loss_fn)
        pipe.step(case.x, target=case.target)
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys(), schedule
        for name, gradient in gradients.items():
            assert float((gradient - expected[name]).abs().max()) <= WITHIN * largest, (schedule, name)
    known_traces.forget()


@pytest.mark.parametrize("model", AWKWARD)
def test_in_processes_too(model: str, inherited: Callable[..., LayerSequence]) -> None:  # noqa: F811
    """Each schedule, 2 or 3 ranks, or two replicas of two."""
    chance = random.Random(f"{model} in processes {os.environ.get('FIRST', '')}")
    for schedule in SCHEDULES:
        name = f"{model}|{chance.choice(PRECISIONS) or ''}"
        sequence = inherited(traced, name)
        known_traces.remember(sequence)
        replicas = chance.choice((1, 2))
        settings = {"micro_batches": chance.choice((2, 3) if replicas == 2 else (2, 3, 5)), "replicas": replicas}
        plan = random_plan(chance, sequence, schedule, 2 if replicas == 2 else chance.choice((2, 3)), **settings)
        whole = train(whole_plan(sequence, schedule, **settings), name)
        for part in launch(train, plan, (name,)):
            assert differing(part, whole) == [], said(plan, name)
    known_traces.forget()
