"""Training a model of the tracer's list by random plans, and what differs between two of them."""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from executor import Pipeline
from planner import Plan
from planner.plan.schedules import ScheduleName
from profiler import LayerSequence
from profiler.tracing.sample import call_arguments
from tests.coverage.model_list import BATCH_SIZE, BY_NAME
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import orders_for
from tests.snapshot import differences, snapshot

M = 4
DROPOUT = 0.1


@dataclass(frozen=True)
class Trained:
    """What training leaves behind."""

    losses: list[float]
    tensors: dict[str, Tensor]  # gradients of the last step and the state


def train(plan: Plan, name: str, steps: int) -> Trained:
    case = BY_NAME[name].build(dropout=DROPOUT)
    before = snapshot(case.model)
    pipe = Pipeline(case.model, plan, loss_fn=case.loss_fn)
    assert differences(before, snapshot(case.model)) == [], "constructing the pipeline changed the model"
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    args, kwargs = call_arguments(case.sample)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(*args, target=case.target, **kwargs).item())
        optimizer.step()
    tensors = {f"gradient of {name}": p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    return Trained(losses, {**tensors, **{name: value.clone() for name, value in pipe.state_dict().items()}})


def differing(part: Trained, whole: Trained) -> list[str]:
    """What is not equal in every bit (NaN equals NaN)."""
    names = [
        name
        for name, value in part.tensors.items()
        if not torch.equal(value.nan_to_num(1234.5), whole.tensors[name].nan_to_num(1234.5))
    ]
    return names if part.losses == whole.losses else ["loss", *names]


def random_plan(
    sequence: LayerSequence, chance: random.Random, stages: int, schedule: ScheduleName, **settings: Any
) -> Plan:
    """At random cuts, with random segments; in a schedule with orders of each plan's own, random ones."""
    stages = min(stages, len(sequence))
    cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
    segments = [random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, len(sequence)])]
    chunks = settings.get("chunks", 1)
    past = chunks == 1 and chance.random() < 0.5  # chunks relay their values
    return plan_for(
        sequence,
        cuts,
        batch_size=BATCH_SIZE,
        micro_batches=M,
        schedule=schedule,
        orders=orders_for(schedule, stages, M, chance, chunks),
        recompute=segments,
        skips=past,
        **settings,
    )


def random_segments(chance: random.Random, first: int, stop: int) -> list[tuple[int, int]]:
    """The whole stage, or disjoint runs of its layers, or nothing."""
    borders = sorted({first, stop, *chance.sample(range(first, stop + 1), min(2, stop + 1 - first))})
    return chance.choice([[(first, stop)], [pair for pair in pairwise(borders) if chance.random() < 0.7], []])
