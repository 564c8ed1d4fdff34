"""Clocks, budgets and neighbours; what they measure is in tests/benchmarks."""

import gc
import os
import select
import socket
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from profiler.errors import ProfileError
from profiler.machine.allocator import give_back_freed_memory, keep_freed_memory
from profiler.machine.backend import backend_of
from profiler.machine.background_load import neighbours
from profiler.machine.start import start_process
from profiler.timing.repeats import Timing, collecting_no_garbage, computing_with, rounds, time_call


def test_median_and_quartiles() -> None:
    found = Timing.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found == Timing(median_s=3.0, lower_s=2.0, upper_s=4.0, repeats=5)
    assert found.spread == pytest.approx(2 / 3)
    assert Timing.of([0.0]).spread == 0


def _ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it a second later."""
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr("profiler.machine.stopwatches._OF_THIS_THREAD", None)  # laps go by the clock


def test_laps_are_timed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _ticking(monkeypatch)
    watch = backend_of("cpu").stopwatch(torch.device("cpu"))
    assert watch.lap(lambda: "result") == "result"
    watch.lap(time.perf_counter)
    assert watch.take() == [1.0, 2.0]
    assert watch.take() == []


def test_rounds_keep_to_budget_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(rounds(at_least=1, at_most=3, budget_s=1e9)) == [0, 1, 2]
    assert list(rounds(at_least=2, at_most=9, budget_s=0.0)) == [0, 1]
    _ticking(monkeypatch)  # a round takes a second
    assert list(rounds(at_least=1, at_most=99, budget_s=5.5)) == [0, 1, 2, 3]


def test_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    _ticking(monkeypatch)
    calls: list[str] = []
    found = time_call(
        lambda: calls.append("call"),
        torch.device("cpu"),
        prepare=lambda: calls.append("prepare"),
        warm_ups=2,
        at_least=3,
        at_most=3,
    )
    assert calls == ["prepare", "call"] * 5
    assert (found.repeats, found.median_s) == (3, 1.0)


def test_threads_and_collector_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), computing_with(before + 1), collecting_no_garbage():
        assert torch.get_num_threads() == before + 1
        assert not gc.isenabled()
        raise KeyError
    assert torch.get_num_threads() == before
    assert gc.isenabled()
    with computing_with(0):
        assert torch.get_num_threads() == before


def test_freed_memory_is_kept_where_there_is_glibc() -> None:
    assert keep_freed_memory() is (os.confstr("CS_GNU_LIBC_VERSION") is not None)


def test_memory_in_holes_between_blocks_is_given_back() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    blocks = [torch.ones(2**18) for _ in range(200)]  # of 1 MiB
    holding = _resident_bytes()
    del blocks[::2]
    assert _resident_bytes() > holding - 20 * 2**20, "freed memory is kept"
    give_back_freed_memory()
    assert _resident_bytes() < holding - 80 * 2**20
    assert len(blocks) == 100


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_neighbours_are_busy_and_end() -> None:
    with pytest.raises(KeyError), neighbours(1) as wait_until_busy:
        wait_until_busy()
        raise KeyError
    with neighbours(0) as wait_until_busy:
        wait_until_busy()


@pytest.mark.fresh_processes
def test_a_neighbour_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/true")
    with neighbours(1) as wait_until_busy, pytest.raises(ProfileError, match="ended with code 0 before it had begun"):
        wait_until_busy()


def test_a_neighbour_ends_with_a_caller_that_is_killed_before_it_has_listened() -> None:
    """Its connection is reset then, not closed: a profile that was killed in its first seconds left a busy process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process(
            "profiler.machine.busy_work",
            "1",
            str(theirs.fileno()),
            environment={**os.environ},
            descriptors=[theirs.fileno()],
        )
    ready, _, _ = select.select([ours], [], [], 120)
    assert ready, "it has not begun"
    ours.close()  # with what it said unread
    assert process.wait(timeout=60) == 0
