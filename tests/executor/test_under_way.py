"""Orders of a plan's own with messages so long that no more are under way than must be: to the limit, and beyond."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan
from planner.plan.actions import AHEAD_BYTES, room_between
from planner.plan.schedules import ScheduleName
from profiler import LayerSequence, trace

M = 10
UNDER_WAY = room_between(0, 1)
WIDTH = AHEAD_BYTES // UNDER_WAY // 4 + 1000  # more bytes of a sample than would let one more message go ahead
AT_ONCE = "FI" * M + "W" * M
BACK = "".join(letter * M for letter in "iIwW")
AHEAD = 2 * UNDER_WAY + 1
"""Forward passes before the first gradient is read: of the second rank one is at work and as many gradients are under
way as may be, and outputs likewise."""


class Scaled(nn.Module):
    """Each stage hands on what the first one makes."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(x * self.scales[0])
        for scale in self.scales[1:]:
            x = torch.tanh(x * scale)
        return x + first  # which goes through all stages between


def batch(rows: int) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)


def traced(layers: str = "") -> LayerSequence:
    return trace(Scaled(int(layers or 4)), batch(2), progress=False)


def train(plan: Plan, transport: str = "auto", layers: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    pipe = Pipeline(Scaled(layers), plan, loss_fn=functional.mse_loss, transport=transport)
    x = batch(plan.batch_size)
    losses = [call(x, target=x.flip(0)).item() for call in (pipe.step, pipe.step, pipe.evaluate)]
    return losses, {name: held.grad.clone() for name, held in pipe.named_parameters() if held.grad is not None}


def ahead(most: int) -> str:
    """The first rank's order, with so many forward passes first."""
    return "F" * most + "IF" * (M - most) + "I" * most + "W" * M


@pytest.fixture
def build(plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]) -> Callable[..., Plan]:
    """Makes a plan of two ranks."""
    sequence = inherited(traced)

    def make(schedule: ScheduleName, orders: tuple[str, ...], chunks: int = 1) -> Plan:
        stages = (len(orders) or 1) * chunks
        cuts = [1 + 2 * part for part in range(1, stages)]  # before a scale
        given: dict[str, Any] = {"batch_size": M, "micro_batches": M, "schedule": schedule, "chunks": chunks}
        return plan_for(sequence, cuts, **given, orders=orders)

    return make


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "orders"),
    [
        ("zb", 1, (ahead(AHEAD), AT_ONCE)),
        # all outputs, and later all gradients, wait at the turn, where nothing limits them
        ("zb-v", 2, ("F" * M + "f" * M + BACK,) * 2),
        ("zb-v", 2, (f"{'F' * AHEAD}fffffFfffff{BACK}", f"FFFFFfffffFFFFFfffff{BACK}")),
    ],
)
def test_as_many_long_messages_as_may_be_are_under_way(
    build: Callable[..., Plan], transport: str, schedule: ScheduleName, chunks: int, orders: tuple[str, ...]
) -> None:
    """Two ranks with one more would wait for each other: the first to send an output, the second a gradient.

    Or an output of its next chunk: in an evaluation, in which stages read messages where they lay until the next one
    came, they did. There the second rank read what lay at the turn, and the first had written over it. And one
    process that runs both found no order of all actions with so many at the turn.
    """
    losses, gradients = train(build("1f1b", ()))
    plan = build(schedule, orders, chunks)
    parts = [train(plan), *launch(train, plan, (transport,), timeout_s=20.0)]
    assert {name for _, own in parts for name in own} == gradients.keys()
    for found, own in parts:
        assert found == losses
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())


def test_one_more_is_refused(build: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match=r"cannot finish: stage 0 waits in pass 9, F, .* with 4 messages under way"):
        build("zb", (ahead(AHEAD + 1), AT_ONCE))


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-lean"])
def test_chunks_that_go_round_many_ranks_finish(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], schedule: ScheduleName
) -> None:
    """With 4 messages under way 8 ranks waited for each other for ever, and with this M."""
    ranks, layers, count = 8, 16, 23
    given: dict[str, Any] = {"batch_size": count, "micro_batches": count, "chunks": 2, "schedule": schedule}
    plan = plan_for(inherited(traced, str(layers)), [1 + 2 * part for part in range(1, 2 * ranks)], **given)
    losses, gradients = train(plan, layers=layers)
    found: list[tuple[list[float], dict[str, Tensor]]] = launch(train, plan, ("auto", layers), timeout_s=60.0)
    assert {name for _, own in found for name in own} == gradients.keys()
    for own_losses, own in found:
        assert own_losses == losses
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())
