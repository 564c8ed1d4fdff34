"""Six to twelve ranks, messages long or short, values that go past stages, any M: all finish, with equal results."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan
from planner.plan.actions import AHEAD_BYTES, room_between
from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler import LayerSequence, trace
from tests.executor.random_orders import orders_for, random_chunks

LAYERS, READ = 24, 5
"""Scales of the model, and every how many of them what came before the last ones is read again."""
LONG, SHORT = AHEAD_BYTES // room_between(0, 1) // 4 + 1000, 100
"""Elements of a sample: with the first no more messages are under way than must be."""


class Scaled(nn.Module):
    """Each layer reads what the one before makes, and some of them what earlier ones made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.linspace(0.5, 1.5, width)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        earlier: list[Tensor] = []
        for number, scale in enumerate(self.scales):
            x = torch.tanh(x * scale)
            earlier.append(x)
            if number % READ == READ - 1:
                x = x + earlier[number // 2]
        return x


def batch(rows: int, width: int) -> Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


def traced(width: str) -> LayerSequence:
    return trace(Scaled(int(width)), batch(2, int(width)), progress=False)


def train(plan: Plan, width: int, transport: str = "auto") -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    pipe = Pipeline(Scaled(width), plan, loss_fn=functional.mse_loss, transport=transport)
    x = batch(plan.batch_size, width)
    losses = [call(x, target=x.flip(0)).item() for call in (pipe.step, pipe.evaluate, pipe.step)]
    return losses, {name: held.grad.clone() for name, held in pipe.named_parameters() if held.grad is not None}


@pytest.mark.parametrize("seed", range(8))
def test_many_ranks_finish_with_the_results_of_one(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], seed: int
) -> None:
    chance = random.Random(seed)
    width = chance.choice([LONG, SHORT])
    sequence = inherited(traced, str(width))
    schedule: ScheduleName = chance.choice([*SCHEDULES])
    chunks = random_chunks(schedule, 3, chance)
    layers = len(sequence.layers)
    ranks = chance.randint(6, min(12, layers // chunks))
    stages = ranks * chunks
    count = chance.choice([1, ranks - 1, ranks, ranks + 1, 2 * ranks + 1, 3 * ranks - 1])
    cuts = sorted(chance.sample(range(1, layers), stages - 1))
    given: dict[str, Any] = {"batch_size": count, "micro_batches": count, "schedule": schedule, "chunks": chunks}
    plan = plan_for(
        sequence,
        cuts,
        **given,
        recompute=[chance.random() < 0.3 for _ in range(stages)],
        orders=orders_for(schedule, stages, count, chance, chunks),
        skips=chunks == 1 and not SCHEDULES[schedule].splits_backward and chance.random() < 0.5,
    )
    whole = "gpipe" if SCHEDULES[schedule].keeps_all else "1f1b"
    losses, gradients = train(plan_for(sequence, batch_size=count, micro_batches=count, schedule=whole), width)
    transport = chance.choice(["auto", "gloo"])
    found: list[tuple[list[float], dict[str, Tensor]]] = launch(train, plan, (width, transport), timeout_s=60.0)
    assert {name for _, own in found for name in own} == gradients.keys()
    for own_losses, own in found:
        assert own_losses == losses
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())
