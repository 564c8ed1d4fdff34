"""Digests tell data apart by their values, and by nothing else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.watch.contents import EVERY, LOOKED_AT, Contents, digest_of_data
from profiler.machine.backend import BACKENDS
from profiler.machine.cpu import Cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64, torch.complex64]


def values(dtype: torch.dtype) -> Tensor:
    whole = torch.arange(60).reshape(3, 4, 5)
    return whole % 2 == 0 if dtype == torch.bool else whole.to(dtype)


def contents_of(rank: int, trees: list[object]) -> Contents:
    contents = Contents(rank)
    for number, tree in enumerate(trees):
        for _ in range(EVERY):  # of every sixteenth call something is looked at
            contents.note(number, tree)
    return contents


def differ(ours: list[object], theirs: list[object]) -> bool:
    first, other = contents_of(0, ours), contents_of(1, theirs)
    latest = other.latest()
    assert latest is not None
    first.hear(1, *latest)
    return first.difference() is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_makes_the_difference_and_the_layout_makes_none(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    turned = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    other = tensor.clone()
    other[1, 2, 3] = ~other[1, 2, 3] if dtype == torch.bool else other[1, 2, 3] + 1
    assert turned.stride() != tensor.stride()
    assert digest_of_data([tensor, "x"]) == digest_of_data([turned, "x"])
    assert digest_of_data([tensor, "x"]) != digest_of_data([other, "x"])
    assert not differ([tensor], [turned])
    assert differ([tensor], [other])  # few elements: all are looked at


def test_what_is_not_a_number_is_equal_to_itself() -> None:
    nan = torch.tensor([float("nan"), float("inf"), -0.0])
    assert digest_of_data(nan) == digest_of_data(nan.clone())
    assert digest_of_data(nan) != digest_of_data(nan.abs())
    assert not differ([{"x": nan, "y": float("nan")}], [{"x": nan.clone(), "y": float("nan")}])


def test_other_leaves_count_by_value_but_not_by_their_address() -> None:
    assert digest_of_data([1, "a", None, object()]) == digest_of_data([1, "a", None, object()])
    assert digest_of_data([1, "a"]) != digest_of_data([1, "b"])
    assert digest_of_data(torch.zeros(4)) != digest_of_data(torch.zeros(2, 2))
    assert digest_of_data(torch.zeros(2)) != digest_of_data(torch.zeros(2, dtype=torch.int32))
    assert digest_of_data(torch.zeros(0, 3)) == digest_of_data(torch.zeros(0, 3))


@given(st.integers(0, 5), st.integers(1, 6))
def test_a_difference_stays_and_other_calls_do_not_matter(wrong: int, heard_at: int) -> None:
    """Whichever later call a beat tells of, a difference in one before shows, and none shows before it."""
    batches: list[object] = [torch.full((1000,), float(number)) for number in range(7)]
    others = list(batches)
    others[wrong] = torch.ones(1000) / 3
    first, other = contents_of(0, batches), contents_of(1, others[: heard_at + 1])
    latest = other.latest()
    assert latest is not None
    first.hear(1, *latest)
    found = first.difference()
    assert (found is not None) == (wrong <= heard_at)
    assert found is None or (found.rank == 1 and "rank 1 was given other values than rank 0" in found.text)


def test_rank_0_judges_also_of_calls_that_it_makes_later() -> None:
    same, other = torch.zeros(10), torch.ones(10)
    ahead = contents_of(1, [same, other])
    latest = ahead.latest()
    assert latest is not None
    ahead.hear(0, 1, "something else")
    assert ahead.difference() is None  # not rank 0
    behind = contents_of(0, [same])
    behind.hear(1, *latest)
    assert behind.difference() is None
    for _ in range(EVERY):
        behind.note(1, same)
    assert behind.difference() is not None


def test_what_has_not_arrived_on_the_host_waits_in_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with a queue copies arrive later; a digest of memory that is not filled yet would accuse somebody."""
    arrived: list[bool] = []

    class Queued(Cpu):
        def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
            position = len(arrived)
            arrived.append(False)
            return tensor.clone(), lambda: arrived[position]

    monkeypatch.setitem(BACKENDS, "cpu", Queued())
    contents = contents_of(0, [torch.ones(3), torch.zeros(3)])
    assert contents.latest() is None
    arrived[:] = [False, True]
    contents.note(2, torch.ones(3))
    assert contents.latest() is None  # the first call's is not there
    arrived[:] = [True, True]
    for _ in range(EVERY):
        contents.note(3, torch.ones(3))
    latest = contents.latest()
    assert latest is not None
    assert latest[0] == 1


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 650])
def test_in_turn_every_element_of_a_batch_is_looked_at(elements: int) -> None:
    batch = torch.zeros(elements)
    looks = -(-elements // LOOKED_AT)
    for place in {0, elements // 3, elements // 2, elements - 2, elements - 1} & set(range(elements)):
        wrong = batch.clone()
        wrong[place] = 1
        assert differ([batch] * looks, [wrong] * looks)
        assert not differ([batch] * looks, [batch.clone()] * looks)
