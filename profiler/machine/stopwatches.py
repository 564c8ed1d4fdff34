"""How work is timed: what measures it, and the ones that go by the clock; others lie with their kind of device.

    watch = backend_of(device).stopwatch(device)
    watch.lap(forward, "forward")
    watch.lap(backward, "backward")
    forward_s, backward_s = watch.take()

A process that carries out one action after the other sets one mark after each (`Marks`), and reads them later.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")
_OF_THIS_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # of Linux


class Watch(Protocol):
    """Looks at calls one after the other."""

    def lap(self, call: Callable[[], T], key: Hashable = None) -> T:
        """Call it and note what it takes.

        Args:
            call: what is looked at.
            key: equal for laps that do the same; None for one of which nothing is known.
        """
        ...

    def take(self) -> list[float]:
        """What the laps since the last `take` took, in order; waits until the device is through with them."""
        ...


class Stopwatch(Watch, Protocol):
    """Takes seconds."""

    def lost_share(self) -> float:
        """Of the time of all laps, the share for which others had the device; it is in no lap. 0 if nobody knows."""
        ...


class ClockStopwatch:
    """Times by the clock, and what one thread computes by its own seconds: while others have its core it stands still.

    A lap in which the thread waited of itself (it slept, or another thread computed for it) goes by the clock.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._last = _Moment.now()
        self._lost_s = 0.0
        self._lasted_s = 0.0

    def lap(self, call: Callable[[], T], key: Hashable = None) -> T:
        """Call it and time it."""
        before = _Moment.now()
        if not self._seconds:
            self._last = before
        result = call()
        after = _Moment.now()
        lasted_s, computed_s = after.since(before)
        alone = torch.get_num_threads() == 1 and after.computed_all_since(before)
        self._seconds.append(min(computed_s, lasted_s) if alone else lasted_s)
        if torch.get_num_threads() == 1 and after.computed_all_since(self._last):
            lasted_s, computed_s = after.since(self._last)  # between laps others take the core as well
            self._lasted_s += lasted_s
            self._lost_s += max(0.0, lasted_s - computed_s)
        self._last = after
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def lost_share(self) -> float:
        """For which share of the time others had the core, where the thread did not wait of itself."""
        return self._lost_s / self._lasted_s if self._lasted_s > 0 else 0.0


class _Moment(NamedTuple):
    """A moment of this thread.

    Attributes:
        clock_s: by the clock.
        computed_s: that it has computed.
        waits: how often it has given up its core of itself; None where the system does not say.
    """

    clock_s: float
    computed_s: float
    waits: int | None

    @classmethod
    def now(cls) -> _Moment:
        """This one."""
        waits = None if _OF_THIS_THREAD is None else resource.getrusage(_OF_THIS_THREAD).ru_nvcsw
        return cls(time.perf_counter(), time.thread_time(), waits)

    def since(self, earlier: _Moment) -> tuple[float, float]:
        """Seconds by the clock, and that the thread computed."""
        return self.clock_s - earlier.clock_s, self.computed_s - earlier.computed_s

    def computed_all_since(self, earlier: _Moment) -> bool:
        """Whether the thread never waited of itself since then."""
        return self.waits is not None and self.waits == earlier.waits


class Marks(Protocol):
    """Moments of one process, the first one at the construction.

    Attributes:
        on_the_host: whether the host is at them when it sets them.
    """

    on_the_host: bool

    def mark(self) -> None:
        """Now, or when the device has done what it was given so far."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def seconds(self) -> list[float]:
        """Of all marks, since the first."""
        ...

    def began_s(self) -> float:
        """When the first one was, by `time.perf_counter`."""
        ...


class ClockMarks:
    """By the clock."""

    on_the_host = True

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        """Now."""
        self._times.append(time.perf_counter())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._times)

    def seconds(self) -> list[float]:
        """Of all marks, since the first."""
        return [moment - self._times[0] for moment in self._times]

    def began_s(self) -> float:
        """When the first one was, by `time.perf_counter`."""
        return self._times[0]
