"""How work is timed: by the clock on CPUs, by events on CUDA devices.

    watch = backend_of(device).stopwatch(device)
    watch.lap(forward)
    watch.lap(backward)
    forward_s, backward_s = watch.take()

A CUDA device works behind a queue. Laps are enqueued while a spin kernel holds the device back, so that the events
around a lap stand `device time` apart, without the gaps of a queue that runs dry; what it takes the CPU to enqueue the
lap is measured as well, and a lap took the larger of the two:

    CPU     | launch 1 | launch 2 | launch 3 |
    device  | spin                            | lap 1 | lap 2 | lap 3 |
                                              e0      e1      e2      e3

A process that carries out one action after the other sets one mark after each (`Marks`), and reads them later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

SPIN_S = 2e-3  # head start of the first round, before it is known how long its launches take
SPIN_MARGIN = 1.5  # later head starts last this times as long as the launches of the round before
SPIN_AT_MOST_S = 0.25
SPIN_CYCLES_PER_S = 2e9  # `torch.cuda._sleep` counts clock cycles; a device that clocks lower waits longer, no harm


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


class Marks(Protocol):
    """Moments of one process, the first one at the construction.

    Attributes:
        on_the_host: whether they can be set against `time.perf_counter`.
    """

    on_the_host: bool

    def mark(self) -> None:
        """Now, or when the device has done what it was given so far."""

    def seconds(self) -> list[float]:
        """Of all marks, since the first."""
        ...


class CpuMarks:
    """By the clock."""

    on_the_host = True

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        """Now."""
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of all marks, since the first."""
        return [moment - self._times[0] for moment in self._times]


class CudaMarks:
    """By events on the current CUDA device."""

    on_the_host = False

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """When the device has done what it was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of all marks, since the first; waits for the last."""
        self._events[-1].synchronize()
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
