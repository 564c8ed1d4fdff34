"""A line says how long work takes, by the clock, on any terminal, and goes on while nothing is done."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from profiler import progress_line
from profiler.progress_line import ProgressLine, TimeLeft


def seconds(left: TimeLeft, clock: Sequence[float]) -> list[float | None]:
    return [left.seconds(now_s) for now_s in clock]


def test_nothing_is_said_before_anybody_can_know() -> None:
    left = TimeLeft(0.0)
    assert seconds(left, [0.0, 60.0]) == [None, None]
    left.reached(0.01, 1.0)
    assert left.seconds(1.0) is None


def test_time_runs_down_between_two_steps_and_is_never_stuck() -> None:
    left = TimeLeft(0.0)
    left.reached(0.5, 10.0)
    assert seconds(left, [10.0, 12.0, 15.0]) == [10.0, 8.0, 5.0]
    late = seconds(left, [16.0, 18.5, 20.0, 25.0, 99.0])
    assert all(before != after and after for before, after in pairwise(late))


def test_a_slow_beginning_is_forgotten() -> None:
    left = TimeLeft(0.0)
    for share, now_s in ((0.1, 50.0), (0.2, 51.0), (0.3, 52.0), (0.4, 53.0)):
        left.reached(share, now_s)
    assert left.seconds(53.0) == pytest.approx(6.0)


def test_work_that_begins_anew_has_a_time_of_its_own() -> None:
    left = TimeLeft(0.0)
    left.reached(0.9, 90.0)
    left.reached(0.0, 90.0)
    assert left.seconds(95.0) is None
    left.reached(0.5, 95.0)
    assert left.seconds(95.0) == 5.0


@pytest.mark.parametrize(("rows", "columns", "widest"), [(24, 100, 99), (24, 40, 39), (0, 0, 79)])
def test_it_fits_a_terminal_also_one_that_does_not_know_its_size(
    rows: int, columns: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of 0 columns, as `script` and some containers give, saw nothing."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(progress_line, "DELAY_S", 0.0)
        monkeypatch.setattr(progress_line, "REFRESH_S", 0.0)
        with ProgressLine("work", total=2, wanted=True) as line:
            line.now("braces {x}")
            line.update()
        seen = b"".join(
            iter(lambda: os.read(reader, 4096) if select.select([reader], [], [], 0)[0] else b"", b"")
        ).decode()
    os.close(reader)
    shown = [part for part in seen.replace("\n", "\r").split("\r") if part.strip()]
    assert any("work: braces {x}  50%|" in part for part in shown)
    assert max(map(len, shown)) == widest


def test_steps_that_are_left_out_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    line = ProgressLine("work", total=100, wanted=False)
    line.ends_within(30.0)
    clock[0] += 10.0
    line.reached(10)
    assert "00:10, 00:20 left" in line._state()[0]
    line.reached(100)
    assert "left" not in line._state()[0]
