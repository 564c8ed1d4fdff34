"""Messages through shared memory are what they are over sockets."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.layout import Layout
from executor.run.distributed import Distributed
from executor.run.message import MessageForm, TensorSpec
from executor.run.shared_memory import SharedMemory
from executor.run.transport import Transfer
from planner import ArgumentError, Plan
from planner.plan.actions import Action, ActionKind, make_schedule
from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler import trace
from profiler.machine.backend import HOST, backend_of
from profiler.machine.cpu import Cpu
from profiler.machine.ring import MOST_SLOTS, Incoming, Outgoing
from profiler.machine.ring_meeting import Rings

CPU = torch.device("cpu")
AT_LEAST = 4
MANY = MOST_SLOTS + 8
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn]


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return TensorSpec(shape, tuple(draw(st.permutations(range(len(shape))))), draw(st.sampled_from(DTYPES)))


def tensor_of(spec: TensorSpec, number: int) -> Tensor:
    """In the memory order of the spec."""
    memory = (torch.arange(number, number + spec.size_bytes // spec.dtype.itemsize) % 120).to(spec.dtype)
    inverse = [spec.dim_order.index(dim) for dim in range(len(spec.shape))]
    return memory.view(spec.in_memory).permute(inverse)


@settings(max_examples=60)
@given(st.lists(st.lists(specs(), max_size=4), min_size=1, max_size=4), st.lists(st.booleans(), max_size=40))
def test_messages_of_all_forms_arrive_as_they_left(forms: list[list[TensorSpec]], moves: list[bool]) -> None:
    """In any order of sends and receives, of forms that take turns; nothing that has arrived changes later."""
    outgoing = Outgoing(AT_LEAST, 0, looks=False)
    rings = Rings({(0, 1): outgoing}, {(0, 1): Incoming(outgoing.address, looks=False)}, any=True)
    nobody = Layout(0, ((0,), (1,)), rank_of=(0, 1))
    transport = SharedMemory(rings, Distributed(nobody, (), backend_of(HOST)))
    made = [MessageForm(form, CPU) for form in forms]
    under_way: deque[tuple[Transfer, list[Tensor]]] = deque()
    arrived = []
    number = 0
    for sends in moves:
        if sends and len(under_way) < AT_LEAST:
            form = number % len(forms)
            tensors = [tensor_of(spec, number) for spec in forms[form]]
            transport.send(Transfer(Action(0, ActionKind.SEND_F, number), made[form], CPU, 2), tensors)
            receive = Transfer(Action(1, ActionKind.RECV_F, number), made[form], CPU, 2)
            transport.begin([receive])
            under_way.append((receive, tensors))
            number += 1
        elif under_way:
            receive, tensors = under_way.popleft()
            arrived.append((transport.receive(receive), tensors))
    for received, tensors in arrived:
        for one, other in zip(received, tensors, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))


class Net(nn.Module):
    """Values of several types and a skip over a stage cross its boundaries, some without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        largest = first.argmax(-1)
        second = self.norm(functional.dropout(self.second(first), 0.3, self.training))
        return self.third(second + first) * (1 + largest.unsqueeze(-1) % 2)


def trained(plan: Plan, transport: str) -> dict[str, Any]:
    """Of training with batches of several sizes, evaluation and prediction: all that comes out, and what carried it."""
    torch.manual_seed(0)
    pipe = Pipeline(Net(), plan, loss_fn=functional.mse_loss, transport=transport)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found: dict[str, Any] = {"carrier": type(pipe._runtime._remote).__name__}
    for step, size in enumerate((10, 7, 40)):
        x = torch.linspace(-2, 1, size * 6).sin().reshape(size, 6) * (step + 1)
        found[f"loss {step}"] = pipe.step(x, target=x)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
        found[f"evaluated {step}"] = pipe.evaluate(x.repeat(3, 1), target=x.repeat(3, 1))
        found[f"predicted {step}"] = pipe.predict(x[:5].repeat(9, 1))
    for name, parameter in pipe.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    return {**found, **{name: value.clone() for name, value in pipe.state_dict().items()}}


def both_ways(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(plan, "auto"), trained(plan, "gloo")


def test_both_transports_train_alike(plan_for: Callable[..., Plan]) -> None:
    """Bitwise, also as one process does: uneven micro-batches, other sizes, skips, and ranks with two stages."""
    sequence = trace(Net(), torch.ones(4, 6))
    cuts = [len(sequence) // 3, 2 * len(sequence) // 3]
    plans = [
        plan_for(sequence, cuts, batch_size=10, micro_batches=4, recompute=[True, False, True], skips=True),
        plan_for(sequence, cuts, batch_size=10, micro_batches=4, schedule="1f1b"),
    ]
    for plan in plans:
        whole = trained(plan, "auto")
        assert whole.pop("carrier") == "InProcess"
        parts = launch(both_ways, plan)
        carriers = {(shared.pop("carrier"), sockets.pop("carrier")) for shared, sockets in parts}
        assert carriers == {("SharedMemory", "Distributed")}
        for shared, sockets in parts:
            for name, value in shared.items():
                for other in (sockets[name], whole[name]):
                    assert value is None or torch.equal(value, other), name


class PassingBy(nn.Module):
    """The last stage returns what it receives, as it is and as a view, next to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, hidden.view(-1, 2, 3), self.second(hidden)


def predicted_twice(plan: Plan) -> list[list[Tensor]]:
    """By transport what the first of two calls returned, looked at after the second."""
    torch.manual_seed(0)
    model, x = PassingBy(), torch.arange(MANY * 6.0).reshape(-1, 6).sin()
    found = []
    for transport in ("auto", "gloo"):
        pipe = Pipeline(model, plan, transport=transport)
        first = pipe.predict(x)
        pipe.predict(x + 1)
        found.append([] if first is None else [*first, model(x)[0]])
    return found


def test_what_a_stage_returns_as_it_came_does_not_lie_in_a_slot(plan_for: Callable[..., Plan]) -> None:
    """Each stage reads what it receives where it lies, and there are more micro-batches than slots."""
    plan = plan_for(trace(PassingBy(), torch.ones(4, 6)), [1], batch_size=MANY, micro_batches=MANY)
    shared, sockets = launch(predicted_twice, plan)[1]
    for one, other in zip(shared, sockets, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(shared[0], shared[3])
    torch.testing.assert_close(shared[1].view(-1, 6), shared[3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_training_a_stage_is_through_with_a_message_before_it_waits_for_the_next(name: ScheduleName) -> None:
    """So it may read it where it lies until then."""
    chunks = min(2, SCHEDULES[name].most_chunks)
    for ranks, micro_batches in itertools.product((2, 3, 4), (4, 12)):
        recompute = (False,) * (ranks * chunks)
        lists = make_schedule(
            name, stages=len(recompute), micro_batches=micro_batches, recompute=recompute, chunks=chunks
        )
        for actions, stage in itertools.product(lists, range(len(recompute))):
            forward = (ActionKind.RECV_F, ActionKind.F, ActionKind.SEND_F)
            numbers = [action.micro_batch for action in actions if action.stage == stage and action.kind in forward]
            assert len(list(itertools.groupby(numbers))) == len(set(numbers))


def carrier(plan: Plan) -> tuple[str, bool]:
    return type(Pipeline(Net(), plan, loss_fn=functional.mse_loss)._runtime._remote).__name__, Cpu.keeps_order


def test_pipelines_of_tests_talk_as_their_run_says(plan_for: Callable[..., Plan], pytestconfig: pytest.Config) -> None:
    """Through shared memory, or over sockets with `--transport gloo`, and then as NCCL's with `--in-order`."""
    plan = plan_for(trace(Net(), torch.ones(4, 6)), [1], batch_size=8, micro_batches=2)
    expected = "SharedMemory" if pytestconfig.getoption("--transport") is None else "Distributed"
    assert launch(carrier, plan) == [(expected, pytestconfig.getoption("--in-order"))] * 2


def differs(plan: Plan) -> None:
    names = ["auto", "gloo", "auto"]
    Pipeline(Net(), plan, loss_fn=functional.mse_loss, transport=names[torch.distributed.get_rank()])


def test_ranks_that_ask_for_different_transports_are_told(plan_for: Callable[..., Plan]) -> None:
    plan = plan_for(trace(Net(), torch.ones(4, 6)), [1], batch_size=8, micro_batches=2)
    with pytest.raises(ArgumentError, match="differ in the transport: rank 0 has auto, rank 1 has gloo"):
        launch(differs, plan)
    with pytest.raises(ArgumentError, match=r"transport='tcp'; pass one of 'auto', 'gloo'"):
        Pipeline(Net(), plan, transport="tcp")
