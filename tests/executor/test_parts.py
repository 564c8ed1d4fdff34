"""The executor's small parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.layout import Layout
from executor.run import transports
from executor.run.distributed import Distributed
from executor.run.in_process import InProcess
from executor.run.message import SMALL_BYTES, MessageForm, TensorSpec
from executor.run.micro_batch import sizes_for, split_target
from executor.run.randomness import key
from executor.run.transport import MakeTransport, Transfer
from executor.state.tied import TiedParameter, accumulator_of, sum_gradients
from executor.watch.agreement import Agreement
from planner.plan.actions import AHEAD_BYTES, Action
from profiler import ArgumentError
from profiler.observe.random_states import generators_of, preserved

CPU = torch.device("cpu")


@given(batch_size=st.integers(1, 200), planned=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_micro_batches_make_up_the_batch(batch_size: int, planned: list[int]) -> None:
    sizes = sizes_for(batch_size, planned)
    assert sum(sizes) == batch_size
    assert min(sizes) >= 1
    assert len(sizes) <= len(planned)
    if batch_size == sum(planned):
        assert sizes == tuple(planned)
    else:
        assert max(sizes) - min(sizes) <= 1


def test_targets_are_cut_along_dimension_0_in_any_structure() -> None:
    target = {"label": torch.arange(5), "weights": [torch.ones(5, 2), torch.tensor(3.0)], "name": "x"}
    first, second = split_target(target, (3, 2))
    assert first["label"].tolist() == [0, 1, 2]
    assert second["weights"][0].shape == (2, 2)
    assert second["weights"][1].item() == 3.0
    assert second["name"] == "x"
    assert split_target(None, (3, 2)) == [None, None]
    with pytest.raises(ArgumentError, match="the target holds 5 samples, the inputs 6"):
        split_target(target, (3, 3))


def test_keys_differ_in_every_argument() -> None:
    keys = {
        key(*place) for place in [(s, t, m, n) for s in range(4) for t in range(4) for m in range(4) for n in range(4)]
    }
    assert len(keys) == 4**4
    assert all(0 <= value < 2**63 for value in keys)


def test_preserved_restores_the_generator_after_an_error() -> None:
    (generator,) = generators_of(torch.device("cpu"))
    before = generator.get_state()
    with pytest.raises(ValueError, match="x"), preserved([CPU]):
        torch.rand(2)
        raise ValueError("x")
    assert torch.equal(generator.get_state(), before)


def test_tied_gradients_are_added_in_layer_order() -> None:
    """In float32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    for values, expected in (((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)):
        accumulators = tuple(accumulator_of(parameter) for _ in values)
        for accumulator, value in zip(accumulators, values, strict=True):
            accumulator.grad = torch.tensor([value])
        parameter.grad = None
        sum_gradients([TiedParameter("w", 0, (parameter,), accumulators, (0, 0, 0))], process=0)
        assert parameter.grad is not None
        assert parameter.grad.item() == expected
        assert all(accumulator.grad is None for accumulator in accumulators)


def test_a_message_in_one_process_reaches_its_other_end_once() -> None:
    transport = InProcess()
    form = MessageForm([TensorSpec((2,), (0,), torch.float32)], CPU)
    send, receive = (Transfer(Action.parse(text), form, CPU, channel=2) for text in ("0SEND_F3", "1RECV_F3"))
    transport.send(send, [torch.ones(2)])
    assert transport.receive(receive)[0].tolist() == [1.0, 1.0]
    with pytest.raises(KeyError):
        transport.receive(receive)


def test_the_first_transport_that_serves_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one is a class and an entry."""

    class Mailbox(InProcess):
        """For two processes."""

        @classmethod
        def between(cls, layout: Layout, *_: object) -> InProcess | None:
            return cls() if layout.processes == 2 else None

    def chosen(processes: int) -> type:
        ranks = range(processes) if processes > 1 else (0, 0)
        layout = Layout(0, tuple((rank,) for rank in ranks), rank_of=tuple(range(len(ranks))))
        return type(transports.transport_for(layout, (), {0: CPU}, "gloo"))

    assert [chosen(processes) for processes in (1, 2)] == [InProcess, Distributed]
    more: list[MakeTransport] = [Mailbox.between, *transports.TRANSPORTS]
    monkeypatch.setattr(transports, "TRANSPORTS", more)
    assert [chosen(processes) for processes in (1, 2, 3)] == [InProcess, Mailbox, Distributed]


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    large = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64]))
    shape = (*shape, SMALL_BYTES) if large else shape
    return TensorSpec(shape, tuple(draw(st.permutations(range(len(shape))))), dtype)


@settings(max_examples=40)
@given(st.lists(tensor_specs(), max_size=5))
def test_messages_arrive_as_they_left(specs: list[TensorSpec]) -> None:
    """In every type, layout and size; small tensors in one piece, large ones without a copy."""
    form = MessageForm(specs, CPU)
    sent = [(torch.rand(spec.in_memory) * 9).to(spec.dtype) for spec in specs]
    tensors = [
        memory.permute([spec.dim_order.index(dim) for dim in range(len(spec.shape))])
        for memory, spec in zip(sent, specs, strict=True)
    ]
    pieces = form.pack(tensors)
    small = [spec for spec in specs if spec.size_bytes <= SMALL_BYTES]
    assert len(pieces) == len(specs) - (len(small) - 1 if len(small) > 1 else 0)
    kept = {piece.data_ptr() for piece in pieces}
    for memory, spec in zip(sent, specs, strict=True):
        assert spec.size_bytes <= SMALL_BYTES or memory.data_ptr() in kept
    buffers = form.buffers()
    for piece, buffer in zip(pieces, buffers, strict=True):
        assert (piece.shape, piece.dtype) == (buffer.shape, buffer.dtype)
        assert piece.is_contiguous()
        buffer.copy_(piece)
    for tensor, arrived, spec in zip(tensors, form.unpack(buffers), specs, strict=True):
        assert torch.equal(tensor, arrived)
        assert arrived.shape == spec.shape
        assert arrived.permute(spec.dim_order).is_contiguous()


def test_calls_of_known_kinds_wait_for_nobody() -> None:
    """A step after `clip_grad_norm_` used to wait for all, in every round of the usual loop."""
    ranks = [Agreement(rank, 2) for rank in range(2)]
    step, norm, smaller = {"the call": "step", "the batch": "(8,)"}, {"the call": "norm"}, {"the call": "step"}

    def begin(number: int, *given: dict[str, str]) -> list[bool]:
        waits = [agreement.enter(number, own) for agreement, own in zip(ranks, given, strict=True)]
        for rank, other in ((0, 1), (1, 0)):
            said = ranks[rank].to_say(number)
            if said is not None and ranks[other].hear(rank, number, said):
                answer = ranks[other].to_say(number)
                assert answer is not None
                ranks[rank].hear(other, number, answer)
        return waits

    assert begin(1, step, step) == [True, True]
    assert begin(2, norm, norm) == [True, True]
    assert begin(3, step, step) == begin(4, norm, norm) == begin(5, step, step) == [False, False]
    assert begin(6, step, smaller) == [False, True]
    texts = {agreement.difference(6).text for agreement in ranks}  # type: ignore[union-attr]
    assert texts == {"the ranks differ in the batch: rank 0 has (8,), rank 1 has None; give every rank the same"}


@pytest.mark.parametrize(("numbers", "expected"), [(1, 1024), (AHEAD_BYTES // 40, 10), (AHEAD_BYTES, 2), (0, 1024)])
def test_many_short_messages_and_few_long_ones_are_under_way(numbers: int, expected: int) -> None:
    form = MessageForm([TensorSpec((numbers,), (0,), torch.float32)], CPU)
    assert Transfer(Action.parse("1RECV_B3"), form, CPU, channel=3).ahead == expected
