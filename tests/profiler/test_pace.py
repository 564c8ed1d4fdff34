"""The pace of a device is divided out of what is timed; of a clock that is made up, and of a core that is shared."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from profiler.machine.stopwatches import ClockStopwatch
from profiler.timing.pace import PacedStopwatch

WORK_S = 2e-3
HERE = torch.device("cpu")


class MadeUp:
    """A stopwatch on a device whose pace depends on the time; calls return their seconds at pace 1."""

    REFERENCE_S = 2e-4

    def __init__(self, pace_at: Callable[[float], float], noise: float = 0.0) -> None:
        self.now = 0.0
        self._pace_at, self._noise = pace_at, noise
        self._random = random.Random(0)
        self._seconds: list[float] = []
        self.is_cold = False

    def warm_up(self, *_: object) -> None:
        self.is_cold = False

    def lap(self, call: Callable[[], Any], key: object = None) -> Any:
        is_reference = isinstance(call, partial)
        work_s = self.REFERENCE_S * (1.4 if self.is_cold else 1.0) if is_reference else call()
        self.is_cold = not is_reference
        lasted_s = 0.0
        while work_s > 0:  # in steps of 0.1 ms, for the pace may change
            step_s = min(work_s, 1e-4)
            lasted_s += step_s * self._pace_at(self.now + lasted_s)
            work_s -= step_s
        lasted_s *= 1 + self._random.uniform(-self._noise, self._noise)
        self.now += lasted_s
        self._seconds.append(lasted_s)

    def take(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds

    def lost_share(self) -> float:
        return 0.0


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[MadeUp], tuple[list[float], PacedStopwatch]]:
    def measure(made_up: MadeUp) -> tuple[list[float], PacedStopwatch]:
        monkeypatch.setattr("profiler.timing.pace.time.perf_counter", lambda: made_up.now)
        monkeypatch.setattr("profiler.timing.pace._products", made_up.warm_up)
        watch = PacedStopwatch(made_up, HERE, 2**20)
        found = []
        for _ in range(60):
            for _ in range(20):
                watch.lap(lambda: WORK_S)
            found.extend(watch.take())
        return [one * watch.to_usual for one in found], watch

    return measure


def test_noise_is_left_alone(timed: Any) -> None:
    seconds, watch = timed(MadeUp(lambda _: 1.0))
    assert seconds == pytest.approx([WORK_S] * 1200)
    assert watch.to_usual == 1.0
    assert watch.slowdown < 1e-6
    assert watch.drift < 1e-6


def test_bursts_are_divided_out(timed: Any) -> None:
    """Half of the time everything takes 1.7 times as long, for 0.2 s at a time."""
    seconds, watch = timed(MadeUp(lambda now: 1.7 if now % 0.4 > 0.2 else 1.0, noise=0.02))
    assert median(seconds) == pytest.approx(WORK_S, rel=0.02)
    assert sum(abs(one / WORK_S - 1) < 0.1 for one in seconds) > 0.85 * len(seconds)
    assert 0.2 < watch.slowdown < 0.6


def test_a_burst_at_the_start_is_no_reason_to_be_slow(timed: Any) -> None:
    seconds, _ = timed(MadeUp(lambda now: 2.0 if now < 0.1 else 1.0, noise=0.02))
    assert median(seconds) == pytest.approx(WORK_S, rel=0.02)


def test_a_clock_that_falls_after_the_start_is_the_usual_one(timed: Any) -> None:
    """Training will be as slow as the device is when it is warm."""
    seconds, watch = timed(MadeUp(lambda now: 1.0 if now < 0.05 else 1.3, noise=0.02))
    assert median(seconds) == pytest.approx(1.3 * WORK_S, rel=0.02)
    assert watch.slowdown < 0.05


def test_layers_that_take_the_reference_out_of_the_cache_are_no_load(timed: Any) -> None:
    """Some of them do so more than others, and the pace at these seemed to be lower."""
    seconds, watch = timed(MadeUp(lambda _: 1.0, noise=0.02))
    assert sum(seconds) == pytest.approx(1200 * WORK_S, rel=0.01)
    assert watch.slowdown < 0.02


@pytest.mark.parametrize("period_s", [0.013, 0.5])
def test_a_pace_that_scatters_by_itself_counts_in_the_mean(timed: Any, period_s: float) -> None:
    """Training meets the same."""
    seconds, watch = timed(MadeUp(lambda now: 1.0 + 0.12 * (now / period_s % 1.0), noise=0.1))
    assert sum(seconds) == pytest.approx(1.06 * 1200 * WORK_S, rel=0.015)
    assert watch.slowdown < 0.02


def test_a_pace_that_drifts_is_in_doubt_and_bursts_of_others_are_not(timed: Any) -> None:
    _, drifting = timed(MadeUp(lambda now: 1.0 + 0.06 * (now / 3.0 % 1.0), noise=0.02))
    assert 0.015 < drifting.drift < 0.04
    _, burst = timed(MadeUp(lambda now: 1.7 if now % 0.4 > 0.2 else 1.0, noise=0.02))
    assert burst.drift < 0.02


def test_the_reference_takes_little_time(timed: Any) -> None:
    made_up = MadeUp(lambda _: 1.0)
    timed(made_up)
    assert made_up.now < 1.06 * 1200 * WORK_S


def test_what_sleeps_goes_by_the_clock() -> None:
    watch = ClockStopwatch()
    watch.lap(lambda: time.sleep(0.02))
    (seconds,) = watch.take()
    assert seconds >= 0.02


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be kept to a core here")
def test_a_core_that_is_shared_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has half of the core: by the clock everything takes twice as long. A thread that waits once in
    between, for Python's lock say, was no reason any more to see nobody."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = os.sched_getaffinity(0)
    core = min(before)
    rival = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    try:
        os.sched_setaffinity(0, [core])
        watch = ClockStopwatch()
        begun_s, computed_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - begun_s < 0.6:
            if time.perf_counter() - begun_s < 0.01:
                time.sleep(1e-4)
            watch.lap(lambda: sum(range(20_000)))
        lasted_s, computed_s = time.perf_counter() - begun_s, time.process_time() - computed_s
        seconds = sum(watch.take())
    finally:
        os.sched_setaffinity(0, before)
        rival.kill()
        rival.wait()
    assert computed_s < 0.85 * lasted_s, "the rival had no part of the core"
    assert seconds == pytest.approx(computed_s, rel=0.1)
    assert watch.lost_share() == pytest.approx(1 - computed_s / lasted_s, abs=0.1)
