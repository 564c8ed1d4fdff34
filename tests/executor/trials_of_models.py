"""A model by random plans, against itself alone and against the same micro-batches in one stage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import Plan
from planner.plan.schedules import SCHEDULES
from profiler import LayerSequence, trace
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import orders_for, random_chunks

M = 2


@dataclass(frozen=True)
class Stepped:
    """Loss and gradients of a step, and the state after it."""

    loss: float
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Stepped:
    """The plain model."""
    total = 0.0
    for part, aims in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
        loss = functional.mse_loss(model(part), aims) * (len(part) / len(x))
        loss.backward()
        total += loss.item()
    gradients = {name: held.grad for name, held in model.named_parameters() if held.grad is not None}
    return Stepped(total, gradients, dict(model.state_dict()))


def by_plan(model: nn.Module, plan: Plan, x: Tensor, y: Tensor) -> Stepped:
    """By a plan, which leaves no hook."""
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    loss = pipe.step(x, target=y).item()
    assert [name for name, held in pipe.named_parameters() if held._backward_hooks] == []
    gradients = {name: held.grad for name, held in pipe.named_parameters() if held.grad is not None}
    return Stepped(loss, gradients, pipe.state_dict())


def random_plan(sequence: LayerSequence, batch_size: int, chance: random.Random, stages: int) -> Plan:
    """At random cuts, of any schedule."""
    schedule = chance.choice(tuple(SCHEDULES))
    chunks = random_chunks(schedule, 1, chance)
    stages = max(1, min(stages, len(sequence)) // chunks) * chunks
    return plan_for(
        sequence,
        sorted(chance.sample(range(1, len(sequence)), stages - 1)),
        batch_size=batch_size,
        micro_batches=M,
        schedule=schedule,
        chunks=chunks,
        orders=orders_for(schedule, stages, M, chance, chunks),
        recompute=chance.random() < 0.5,
    )


def check(
    make: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    chance: random.Random,
    *,
    within: float,
    plain: Callable[[], nn.Module] | None = None,
) -> None:
    """A step by a plan of several stages is that of one stage in every bit, and the plain model's but for rounding.

    Args:
        make: the model, always alike.
        x: what it is called with.
        y: what the loss compares with.
        chance: decides on plans.
        within: of the largest gradient, what may be rounding.
        plain: the plain model, where `make` makes one without values.
    """
    sequence = trace(make(), x, progress=False)
    whole = by_plan(make(), plan_for(sequence, [], batch_size=len(x), micro_batches=M, schedule="1f1b"), x, y)
    expected = by_hand(make() if plain is None else plain(), x, y)
    for stages in (2, 4):
        found = by_plan(make(), random_plan(sequence, len(x), chance, stages), x, y)
        assert found.loss == whole.loss
        for mine, theirs in ((found.gradients, whole.gradients), (found.state, whole.state)):
            assert mine.keys() == theirs.keys()
            assert [name for name, value in mine.items() if not torch.equal(value, theirs[name])] == []
    assert abs(whole.loss - expected.loss) <= within * max(1.0, abs(expected.loss))
    assert whole.gradients.keys() == expected.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert float((whole.gradients[name] - gradient).abs().max()) <= within * largest, name
