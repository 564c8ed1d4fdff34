"""How work is timed: by the clock on CPUs, by events on CUDA devices.

    watch = stopwatch(device)
    for _ in repeats(watch, most=9, budget_s=2.0):
        watch.lap(forward)
        watch.lap(backward)
    Timing.of(...)                      # median and quartiles of the laps

A CUDA device works behind a queue. Laps are enqueued while a spin kernel holds the device back, so that the events
around a lap stand `device time` apart, without the gaps of a queue that runs dry; what it takes the CPU to enqueue the
lap is measured beside it, and a lap took the larger of the two:

    CPU     | launch 1 | launch 2 | launch 3 |
    device  | spin                            | lap 1 | lap 2 | lap 3 |
                                              e0      e1      e2      e3
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")

SPIN_S = 2e-3  # head start of the first round, before it is known how long its launches take
SPIN_MARGIN = 1.5  # later head starts last this times as long as the launches of the round before
SPIN_AT_MOST_S = 0.25
SPIN_CYCLES_PER_S = 2e9  # `torch.cuda._sleep` counts clock cycles; a device that clocks lower waits longer, no harm


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and quartiles of repeated measurements.

    Attributes:
        median_s: median.
        lower_s: first quartile.
        upper_s: third quartile.
        repeats: number of measurements.
    """

    median_s: float
    lower_s: float
    upper_s: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Median and quartiles of at least one measurement."""
        lower, median, upper = np.quantile(np.asarray(seconds, dtype=np.float64), (0.25, 0.5, 0.75))
        return cls(float(median), float(lower), float(upper), len(seconds))

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median; 0 if nothing took any time."""
        return (self.upper_s - self.lower_s) / self.median_s if self.median_s > 0 else 0.0


class Stopwatch(Protocol):
    """Times calls one after the other."""

    def lap(self, call: Callable[[], T]) -> T:
        """Call it and time it."""
        ...

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order; waits until the device is through with them."""
        ...


class CpuStopwatch:
    """Times by the clock."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def lap(self, call: Callable[[], T]) -> T:
        """Call it and time it."""
        start = time.perf_counter()
        result = call()
        self._seconds.append(time.perf_counter() - start)
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order."""
        seconds, self._seconds = self._seconds, []
        return seconds


class CudaStopwatch:
    """Times by events on a CUDA device, behind a spin kernel; see the head of this file."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launches: list[float] = []
        self._spin_s = SPIN_S

    def lap(self, call: Callable[[], T]) -> T:
        """Enqueue it, with an event before and behind."""
        stream = torch.cuda.current_stream(self._device)
        if not self._events:
            self._hold_back()
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        start = time.perf_counter()
        result = call()
        self._launches.append(time.perf_counter() - start)
        behind.record(stream)
        self._events.append((before, behind))
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order: on the device, or enqueuing if that took longer."""
        torch.cuda.synchronize(self._device)
        on_device = [before.elapsed_time(behind) / 1e3 for before, behind in self._events]
        seconds = [max(pair) for pair in zip(on_device, self._launches, strict=True)]
        self._spin_s = min(max(SPIN_S, SPIN_MARGIN * sum(self._launches)), SPIN_AT_MOST_S)
        self._events, self._launches = [], []
        return seconds

    def _hold_back(self) -> None:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(self._spin_s * SPIN_CYCLES_PER_S))


def stopwatch(device: torch.device) -> Stopwatch:
    """What times work on that device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def rounds(*, at_least: int, at_most: int, budget_s: float) -> Iterator[int]:
    """0, 1, ... until the next round would probably end behind the budget, within the two bounds."""
    start = time.perf_counter()
    for number in range(at_most):
        spent = time.perf_counter() - start
        if number >= at_least and spent + spent / max(1, number) > budget_s:
            return
        yield number


def time_call(
    call: Callable[[], object],
    device: torch.device,
    *,
    prepare: Callable[[], object] = lambda: None,
    warm_ups: int = 2,
    at_least: int = 3,
    at_most: int = 30,
    budget_s: float = 1.0,
) -> Timing:
    """Time one call, again and again.

    Args:
        call: what is timed.
        device: where its work runs.
        prepare: called before each call, outside the clock.
        warm_ups: calls before the first that counts.
        at_least: calls that count, whatever the budget.
        at_most: calls that count, whatever is left of the budget.
        budget_s: seconds after which no further call starts.
    """
    watch = stopwatch(device)
    seconds: list[float] = []
    for number in rounds(at_least=warm_ups + at_least, at_most=warm_ups + at_most, budget_s=budget_s):
        prepare()
        watch.lap(call)
        lap = watch.take()
        if number >= warm_ups:
            seconds.extend(lap)
    return Timing.of(seconds)


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Torch computes with that many threads inside, and as before behind; 0 changes nothing."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """No run of Python's cycle collector falls into what is timed inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
