"""Links between local workers."""

from statistics import median
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from planner.cost.time_ledger import message_s
from planner.plan import actions
from planner.plan.actions import AHEAD_BYTES, SENDS_AHEAD, receives_ahead
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError
from profiler.machine import ring
from profiler.machine.links import (
    SIZES_BYTES,
    SLOTS_AT_LEAST,
    SLOTS_BYTES,
    WORST_LINE,
    Lap,
    _between_ends,
    fit_link,
    measure_link,
    rounds_of,
    shares_copied,
)
from profiler.machine.local import local_devices


@given(latency_s=st.floats(1e-7, 1e-2), bytes_per_s=st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency_s: float, bytes_per_s: float) -> None:
    link = fit_link(SIZES_BYTES, [latency_s + size / bytes_per_s for size in SIZES_BYTES])
    assert link.error < 1e-3
    for size in SIZES_BYTES:
        assert link.transfer_s(size) == pytest.approx(latency_s + size / bytes_per_s, rel=1e-3)


@given(seconds=st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES_BYTES), max_size=len(SIZES_BYTES)))
def test_any_measurement_gives_a_link_that_states_its_error(seconds: list[float]) -> None:
    link = fit_link(SIZES_BYTES, seconds)
    line = [link.latency_s + size / link.bytes_per_s for size in SIZES_BYTES]
    distances = [abs(of_line / time - 1) for of_line, time in zip(line, seconds, strict=True)]
    assert link.error == pytest.approx(max(distances), rel=1e-6)
    assert bool(link.measured) == (link.error > WORST_LINE)
    if link.measured:
        assert [link.transfer_s(size) for size in SIZES_BYTES] == pytest.approx(seconds)
    assert Link.model_validate_json(link.to_json()) == link


MOMENT = st.floats(0, 10, allow_subnormal=False)


@given(turns=st.lists(st.tuples(MOMENT, MOMENT, MOMENT), min_size=1, max_size=5), apart_s=st.floats(-1e3, 1e3))
def test_what_both_ends_note_of_a_turn_is_two_transfers_whatever_their_clocks_say(turns: Any, apart_s: float) -> None:
    noted: list[list[float]] = [[], []]
    for there_s, works_s, back_s in turns:
        came_s = there_s + apart_s  # by the other clock, of a message that left at 0
        went_s = came_s + works_s
        noted[0].append(went_s - apart_s + back_s)
        noted[1].append(came_s - went_s)

    def add_the_other(own: torch.Tensor) -> None:
        own += torch.tensor(noted[1], dtype=torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", add_the_other)
        found = _between_ends([noted[0]])
    assert found == pytest.approx([median((there_s + back_s) / 2 for there_s, _, back_s in turns)], abs=1e-9)


LEAPS = Link(latency_s=1.0, bytes_per_s=10.0, error=0.5, measured=((10, 4.0), (20, 2.0), (40, 6.0)))


def test_messages_between_measured_sizes_lie_on_the_line_between_them() -> None:
    assert [LEAPS.transfer_s(size) for size in (0, 1, 10, 15, 20, 30, 40, 50)] == [0, 4, 4, 3, 2, 4, 6, 7]
    assert [LEAPS.slowed(2.0).transfer_s(size) for size in (1, 15, 50)] == [8, 6, 14]


@given(size=st.integers(0, 200), latency_s=st.floats(0, 1))
def test_the_planner_charges_what_the_link_says(size: int, latency_s: float) -> None:
    for link in (LEAPS, Link(latency_s=latency_s, bytes_per_s=7.0)):
        assert float(message_s(link, np.array(float(size)))) == pytest.approx(link.transfer_s(size))
    whole = message_s(LEAPS, np.array([[0.0, 15.0], [40.0, float(size)]]))
    assert whole == pytest.approx(np.array([[0, 3], [6, LEAPS.transfer_s(size)]]))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (((10, 1.0), (10, 2.0)), "10 bytes before 10; sizes ascend"),
        (((20, 1.0), (10, 2.0)), "20 bytes before 10; sizes ascend"),
        (((0, 1.0),), r"measured\[0\]\[0\]"),
        (((10, 0.0),), r"measured\[0\]\[1\]"),
        (((10, float("nan")),), r"measured\[0\]\[1\]"),
        (((10,),), r"measured\[0\]"),
    ],
)
def test_a_table_that_means_nothing_is_refused(measured: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Link(latency_s=0.0, bytes_per_s=1.0, measured=measured)


def test_links_are_measured_through_as_much_memory_as_is_trained_through() -> None:
    assert receives_ahead(1) + SENDS_AHEAD == SLOTS_AT_LEAST
    assert AHEAD_BYTES == SLOTS_BYTES
    assert (actions.MOST_SLOTS, actions.SLOT_ALIGNMENT) == (ring.MOST_SLOTS, ring.ALIGNMENT)


def test_two_workers_measure_their_link() -> None:
    link = measure_link(local_devices(["cpu", "cpu"]))
    assert link.bytes_per_s > 1e6
    assert link.latency_s < 1.0
    assert link.sender_share > 0.01  # they copy what they say to each other
    assert link.receiver_share > 0.01


@given(st.lists(st.tuples(st.floats(1e-6, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9))
def test_shares_that_ends_copy_are_medians_and_leave_something_to_the_link(
    laps: list[tuple[float, float, float]],
) -> None:
    link = Link(latency_s=0.0, bytes_per_s=1.0)
    shares = shares_copied([Lap(whole_s, whole_s * out, whole_s * into) for whole_s, out, into in laps])
    sender, receiver = (median(lap[place] for lap in laps) for place in (1, 2))
    less = min(1.0, 0.95 / max(1e-9, sender + receiver))
    assert shares == pytest.approx({"sender_share": sender * less, "receiver_share": receiver * less})
    copying = Link.model_validate({**link.model_dump(), **shares})
    assert Link.model_validate_json(copying.to_json()) == copying
    assert copying.slowed(2.0).copied == copying.copied


def test_a_link_without_copies_is_written_as_before() -> None:
    assert (
        Link(latency_s=0.0, bytes_per_s=1.0).to_json()
        == '{\n "bytes_per_s": 1.0,\n "error": 0.0,\n "latency_s": 0.0\n}\n'
    )


def test_ends_do_not_copy_for_all_of_a_message_s_seconds() -> None:
    with pytest.raises(
        ArgumentError, match=r"sender_share is 0\.5 and receiver_share 0\.5; both together are less than 1"
    ):
        Link(latency_s=0.0, bytes_per_s=1.0, sender_share=0.5, receiver_share=0.5)


def test_a_cuda_device_has_no_link_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    card = Device(name="cuda:0", kind="card", memory_bytes=1)
    with pytest.raises(ArgumentError, match=r"both ends of the link are 'cuda:0'; .* pass Cluster"):
        measure_link(Cluster(devices=(card, card)))


def test_small_messages_go_more_often_than_large_ones() -> None:
    assert (min(SIZES_BYTES), max(SIZES_BYTES)) == (2**10, 2**26)
    assert [rounds_of(size) for size in (2**10, 2**22, 2**26)] == [20, 8, 3]


def test_one_device_has_no_link() -> None:
    with pytest.raises(ArgumentError, match="the cluster has 1 device; a link needs 2"):
        measure_link(local_devices(["cpu"]))
