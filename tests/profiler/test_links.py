"""Links between local workers."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from profiler.device import Cluster, Device
from profiler.errors import ArgumentError
from profiler.machine.links import SIZES_BYTES, fit_link, measure_link, rounds_of
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
    distances = [abs(link.transfer_s(size) / time - 1) for size, time in zip(SIZES_BYTES, seconds, strict=True)]
    assert link.error == pytest.approx(max(distances), rel=1e-6)


def test_two_workers_measure_their_link() -> None:
    link = measure_link(local_devices(["cpu", "cpu"]))
    assert link.bytes_per_s > 1e6
    assert link.latency_s < 1.0


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
