"""Values that go past stages: the same training as when they are relayed, and stages between know nothing of them."""

import math
from collections.abc import Callable
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.measure.action_times import TimedAction, TimedStep
from executor.measure.measured import Recorded, measured_frame
from planner import Plan
from planner.plan.actions import Action
from planner.plan.schedules import SCHEDULES, Objective, ScheduleName, ScheduleRecord
from profiler import ForeignPlanError, LayerSequence, trace

pytestmark = pytest.mark.usefixtures("traced_once")

M = 4
BATCH = 10  # micro-batches of 3, 3, 2, 2


class Ladder(nn.Module):
    """Each step down is read by one step up; the first value by every step, and by the output."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for layer in self.down:
            x = functional.dropout(torch.tanh(layer(x)), 0.2, self.training)
            steps.append(x)
        for layer, step in zip(self.up, reversed(steps), strict=True):
            x = torch.tanh(layer(torch.cat((x, step), 1))) * steps[0]
        return x + steps[0]


X = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(2))


def ladder(depth: int = 3) -> Ladder:
    torch.manual_seed(3)
    return Ladder(depth)


def train(plan: Plan, depth: int = 3) -> dict[str, Tensor]:
    """Losses and parameters of some steps, of this process's stages."""
    pipe = Pipeline(ladder(depth), plan, loss_fn=nn.functional.mse_loss, seed=7)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(pipe.step(X, target=Y))
        optimizer.step()
    losses.append(pipe.evaluate(X, target=Y))
    return {"losses": torch.stack(losses), **{name: value.clone() for name, value in pipe.state_dict().items()}}


@cache
def traced(depth: str = "3") -> LayerSequence:
    return trace(ladder(int(depth)), X)


def cuts_of(sequence: LayerSequence) -> list[int]:
    """Between the steps."""
    layers = sequence.layers
    down = [layer.index for layer in layers if any(name.startswith("down") for name in layer.parameters)]
    return [*down[1:], *(layer.index for layer in layers if "aten.cat.default" in layer.operations)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
def test_skipping_stages_changes_no_bit(plan_for: Callable[..., Plan], schedule: ScheduleName, recompute: bool) -> None:
    depth = 4
    sequence = traced(str(depth))
    settings = {"batch_size": BATCH, "micro_batches": M, "schedule": schedule}
    whole = train(plan_for(sequence, **settings), depth)
    plan = plan_for(sequence, cuts_of(sequence), **settings, recompute=recompute, skips=True)
    assert [skip.ends for skip in plan.skips] == [(1, 4), (2, 6), (3, 5)]
    found = train(plan, depth)
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_an_order_that_nobody_has_heard_of_trains_the_same(
    plan_for: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor knows nothing of a schedule but its record."""

    def two_each(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
        """Two forward passes, then their backward passes, on all stages alike."""
        pairs = [range(first, min(first + 2, micro_batches)) for first in range(0, micro_batches, 2)]
        return tuple(number for pair in pairs for number in (*pair, *(micro_batches + batch for batch in pair)))

    record = ScheduleRecord(two_each, lambda number, count: min(2, count), Objective.WORK, "made up")
    monkeypatch.setitem(cast(dict[str, ScheduleRecord], SCHEDULES), "two each", record)
    sequence = traced()
    settings = {"batch_size": BATCH, "micro_batches": M, "schedule": "two each", "recompute": True}
    whole = train(plan_for(sequence, **settings))
    found = train(plan_for(sequence, cuts_of(sequence), **settings, skips=True))
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_stages_between_neither_receive_nor_send_it(plan_for: Callable[..., Plan]) -> None:
    sequence = traced()
    plan = plan_for(sequence, cuts_of(sequence), batch_size=BATCH, micro_batches=M, skips=True)
    pipe = Pipeline(ladder(), plan, loss_fn=nn.functional.mse_loss)
    call = pipe._feed.call("step", (X,), {}, Y, training=True)
    program = pipe._calls.program(call, call.own[0])
    moved = {(str(i.action), i.move.names) for i in program.instructions if i.move and i.action.micro_batch == 0}
    for skip in plan.skips:
        ends = skip.ends
        assert (f"{ends[0]}SEND_F0@{ends[1]}", skip.values) in moved
        assert (f"{ends[0]}RECV_B0@{ends[1]}", skip.values) in moved
        for text, names in moved:
            if skip.passes_by(int(text[0])):
                assert not set(skip.values) & set(names)


def test_skips_between_processes(plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence]) -> None:
    """Also where the neighbour and the stage before it are one process."""
    sequence = inherited(traced, "3")
    settings = {"batch_size": BATCH, "micro_batches": M, "schedule": "1f1b", "recompute": True}
    whole = train(plan_for(sequence, **settings))
    plan = plan_for(sequence, cuts_of(sequence), **settings, skips=True, ranks=(0, 1, 1, 2, 0, 2))
    parts = launch(train, plan)
    assert {name for part in parts for name in part} == whole.keys()
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


def test_transfers_are_measured_where_somebody_waited(plan_for: Callable[..., Plan]) -> None:
    """What skips stages is there long before it is received: how long it took nobody knows."""
    plan = plan_for(traced(), cuts_of(traced()), batch_size=BATCH, micro_batches=M, skips=True)
    spans = {
        "1F0": (0.0, 0.1),
        "1SEND_F0": (0.1, 0.1),
        "1SEND_F0@3": (0.1, 0.1),
        "2RECV_F0": (0.0, 0.13),  # in 30 ms
        "3RECV_F0@1": (0.5, 0.5008),  # interrupted, for the message was there
    }
    actions = tuple(TimedAction(Action.parse(text), *span) for text, span in spans.items())
    found = measured_frame(plan, [Recorded((TimedStep(0, 0.0, actions),), 0.0, 0, ())])
    measured = found[found["stage"] == 1].set_index("what")["measured"]
    assert measured["send_forward_s"] == pytest.approx(0.03)
    assert math.isnan(measured["skip_to_3_send_forward_s"])


def test_a_plan_that_skips_a_reader_is_refused(plan_for: Callable[..., Plan]) -> None:
    sequence = traced()
    plan = plan_for(sequence, cuts_of(sequence), batch_size=BATCH, micro_batches=M, skips=True)
    first, second = plan.skips
    wrong = plan.model_copy(update={"skips": (first.model_copy(update={"values": second.values}), second)})
    with pytest.raises(ForeignPlanError, match=f"sends {second.values[0]} from stage 1 to stage 3; this model uses"):
        Pipeline(ladder(), wrong, loss_fn=nn.functional.mse_loss)
