"""How fast a device is while layers are timed: a reference kernel between the laps, by which drift is divided out.

    watch = PacedStopwatch(backend_of(device).stopwatch(device), device, memory_bytes)
    watch.lap(forward)
    (forward_s,) = watch.take()          # as if the device had been as fast as it usually was
    watch.to_usual, watch.slowdown       # known when all is timed

What is usual is the first quartile of all laps of the reference: a device that others load for less than three quarters
of the time is seen without them, and one that clocks lower after its first seconds is seen as it stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from profiler.machine.stopwatches import Stopwatch

T = TypeVar("T")
SIDES = (32, 192, 384, 768, 1536, 3072)
"""Of the reference's square matrices; the first that takes `LEAST_S` is taken, or the largest that there is
room for."""
ROOM_SHARE = 1 / 16
"""Of the memory in which layers are timed, at most for the reference; the smallest needs 8 KiB."""
LEAST_S = 1e-4
"""Of the reference: far more than its launch, and less than a system's scheduler leaves a core to others [chosen]."""
EVERY = 30
"""The reference runs when so many times its duration has passed: 3 % of the time, and less where laps are longer."""
FIRST = 30
"""Laps of the reference before anything is timed."""
STEADY = 0.08
"""A pace within this share of the first is noise of the reference, and divided out it would be noise of the layers."""


def _products(factor: Tensor, times: int) -> None:
    """The same product of matrices several times."""
    for _ in range(times):
        torch.matmul(factor, factor)


class PacedStopwatch:
    """Times calls, and the reference between them.

    Args:
        watch: that times.
        device: where the calls compute.
        memory_bytes: what may be occupied there, of which the reference takes `ROOM_SHARE`.

    Attributes:
        reference_bytes: what the reference occupies while this lives.
    """

    def __init__(self, watch: Stopwatch, device: torch.device, memory_bytes: int) -> None:
        self._watch = watch
        for side in SIDES:
            if side > SIDES[0] and _bytes_of(side) > ROOM_SHARE * memory_bytes:
                break
            factor = torch.full((side, side), 1.0 / side, device=device)
            once = partial(_products, factor)
            for _ in range(3):
                watch.lap(partial(once, 1))
            took_s = min(watch.take())
            self.reference_bytes = _bytes_of(side)
            self._reference = partial(once, max(1, ceil(LEAST_S / took_s)) if took_s > 0 else 1)
            if took_s >= LEAST_S:
                break
        for _ in range(FIRST):
            watch.lap(self._reference)
        self._paces = watch.take()
        self._first_s = _usual(self._paces)
        self._is_reference: list[bool] = []
        self._last = time.perf_counter()

    def lap(self, call: Callable[[], T]) -> T:
        """Call it and time it."""
        if time.perf_counter() - self._last >= EVERY * self._first_s:
            self._refer()
        result = self._watch.lap(call)
        self._is_reference.append(False)
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order, at the pace of the first laps of the reference."""
        self._refer()
        seconds, marks = self._watch.take(), self._is_reference
        self._is_reference = []
        found = []
        before_s, later = self._paces[-1], [one for one, mark in zip(seconds, marks, strict=True) if mark]
        self._paces.extend(later)
        for one, mark in zip(seconds, marks, strict=True):
            if mark:
                before_s = later.pop(0)
                continue
            pace = (before_s + later[0]) / 2 / self._first_s if self._first_s > 0 else 1.0
            found.append(one / pace if abs(pace - 1) > STEADY else one)
        return found

    @property
    def to_usual(self) -> float:
        """What all seconds are to be multiplied by, to be those of the usual pace."""
        ratio = _usual(self._paces) / self._first_s if self._first_s > 0 else 1.0
        return ratio if abs(ratio - 1) > STEADY else 1.0

    @property
    def slowdown(self) -> float:
        """By what share all took longer than at the usual pace, on a device of its own; 0 is undisturbed."""
        usual_s = _usual(self._paces)
        drift = float(np.mean(self._paces)) / usual_s if usual_s > 0 else 1.0
        return max(0.0, drift / (1 - min(0.99, self._watch.lost_share())) - 1)

    def lost_share(self) -> float:
        """Of the time of all laps, the share for which others had the device."""
        return self._watch.lost_share()

    def _refer(self) -> None:
        self._watch.lap(self._reference)
        self._is_reference.append(True)
        self._last = time.perf_counter()


def _bytes_of(side: int) -> int:
    """Of a square matrix and its product with itself."""
    return 2 * 4 * side**2


def _usual(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.25))
