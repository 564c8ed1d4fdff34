"""How work is timed: what measures it, and the ones that go by the clock; others lie with their kind of device.

    watch = backend_of(device).stopwatch(device)
    watch.lap(forward)
    watch.lap(backward)
    forward_s, backward_s = watch.take()

A process that carries out one action after the other sets one mark after each (`Marks`), and reads them later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Stopwatch(Protocol):
    """Times calls one after the other."""

    def lap(self, call: Callable[[], T]) -> T:
        """Call it and time it."""
        ...

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order; waits until the device is through with them."""
        ...


class ClockStopwatch:
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


class ClockMarks:
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
