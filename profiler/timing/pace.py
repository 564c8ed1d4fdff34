"""How fast a device is while layers are timed: a reference kernel between the laps, by which drift is divided out.

    watch = PacedStopwatch(backend_of(device).stopwatch(device), device)
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
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from profiler.machine.stopwatches import Stopwatch

T = TypeVar("T")
SIDES = (192, 384, 768, 1536, 3072)
"""Of the reference's square matrices; the first that takes `LEAST_S` is taken."""
LEAST_S = 1e-4
"""Of the reference: far more than its launch, and less than a system's scheduler leaves a core to others [chosen]."""
EVERY = 30
"""The reference runs when so many times its duration has passed: 3 % of the time, and less where laps are longer."""
FIRST = 30
"""Laps of the reference before anything is timed."""
STEADY = 0.08
"""A pace within this share of the first is noise of the reference, and divided out it would be noise of the layers."""


def _reference(watch: Stopwatch, device: torch.device) -> Callable[[], Tensor]:
    """A product of matrices, to be called."""
    for side in SIDES:
        factor = torch.full((side, side), 1.0 / side, device=device)
        product = partial(torch.matmul, factor, factor)
        for _ in range(3):
            watch.lap(product)
        if min(watch.take()) >= LEAST_S:
            break
    return product


class PacedStopwatch:
    """Times calls, and the reference between them.

    Args:
        watch: that times.
        device: where the calls compute.
    """

    def __init__(self, watch: Stopwatch, device: torch.device) -> None:
        self._watch = watch
        self._reference = _reference(watch, device)
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


def _usual(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.25))
