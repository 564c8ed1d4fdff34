"""The executor's small parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.micro_batch import sizes_for, split_target
from executor.randomness import generator_of, key, preserved
from executor.tied import TiedParameter, accumulator_of, sum_gradients
from executor.transport import InProcess
from planner.schedule import Action
from profiler import ArgumentError


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
    generator = generator_of(torch.device("cpu"))
    before = generator.get_state()
    with pytest.raises(ValueError, match="x"), preserved([generator]):
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
        sum_gradients([TiedParameter("w", (parameter,), accumulators, (0,))], rank=0)
        assert parameter.grad is not None
        assert parameter.grad.item() == expected
        assert all(accumulator.grad is None for accumulator in accumulators)


def test_a_message_in_one_process_reaches_its_other_end_once() -> None:
    transport = InProcess({0: torch.device("cpu"), 1: torch.device("cpu")})
    receive = Action.parse("1RECV_F3")
    assert not transport.ready(receive)
    transport.send(Action.parse("0SEND_F3"), [torch.ones(2)])
    assert transport.ready(receive)
    assert transport.receive(receive)[0].tolist() == [1.0, 1.0]
    assert not transport.ready(receive)
