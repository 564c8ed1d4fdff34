"""How fast a device is while layers are timed: a reference kernel between the laps, by which drift is divided out.

    watch = PacedStopwatch(backend_of(device).stopwatch(device), device, memory_bytes)
    watch.lap(forward)
    (forward,) = watch.take()
    # when all is timed: seconds, as if the device had been as fast as it usually was
    forward_s = forward * watch.to_usual
    watch.slowdown, watch.drift

A lap of the reference is warmed up by an untimed one, for the layers before have taken its place in the caches: without
that it took 1.2 to 1.5 times as long between layers as by itself, by layer, and GPT's passes came out up to 27 % too
short [measured]. The pace at a lap is the median of the `AROUND` laps of the reference next to it: one alone is 10 %
apart from the next on a machine with nothing else to do, where the pace does not change.

What is usual is the mean of the paces up to `SCATTER` above their first quartile: a device that others load for less
than three quarters of the time is seen without them, one that clocks lower after its first seconds is seen as it stays,
and one that scatters by itself, as a virtual machine does, as it is in the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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
EVERY = 60
"""When so many times its duration has passed, the reference runs twice: 3 % of the time, less where laps are longer."""
FIRST = 30
"""Laps of the reference before anything is timed."""
AROUND = 5
"""Laps of the reference whose median is the pace there; with those of 0.1 ms it follows what lasts over 20 ms."""

SCATTER = 0.15
"""On a machine with nothing else to do nine of ten paces are less than 0.08 to 0.12 over the quartile [measured]."""

OF_A_STEP = 32
"""Paces whose mean is that of a step: with laps of the reference in 3 % of the time, a fifth of a second [chosen]."""


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
                watch.lap(partial(once, 1), _products)
            took_s = min(watch.take())
            self.reference_bytes = _bytes_of(side)
            self._reference = partial(once, max(1, ceil(LEAST_S / took_s)) if took_s > 0 else 1)
            if took_s >= LEAST_S:
                break
        for _ in range(FIRST):
            watch.lap(self._reference, self._reference)
        self._first_s = float(np.median(watch.take()))
        self._paces: list[float] = []
        self._is_reference: list[bool] = []
        self._last = time.perf_counter()

    def lap(self, call: Callable[[], T], key: Hashable = None) -> T:
        """Call it and time it."""
        if time.perf_counter() - self._last >= EVERY * self._first_s:
            self._refer()
        result = self._watch.lap(call, key)
        self._is_reference.append(False)
        return result

    def take(self) -> list[float]:
        """Seconds of the laps since the last `take`, in order, in a unit that `to_usual` is the seconds of."""
        self._refer()
        seconds, marks = self._watch.take(), np.array(self._is_reference)
        self._is_reference = []
        laps = np.array(seconds)
        paces = _smooth(laps[marks] / self._first_s if self._first_s > 0 else np.ones(marks.sum()))
        self._paces.extend(paces)
        after = np.cumsum(marks)[~marks]  # how many laps of the reference came before; the last comes after all
        between = (paces[np.maximum(after - 1, 0)] + paces[after]) / 2
        return [float(one) for one in laps[~marks] / between]

    @property
    def to_usual(self) -> float:
        """What all that was taken is to be multiplied by, to be seconds at the usual pace."""
        return _usual(self._paces)

    @property
    def slowdown(self) -> float:
        """By what share all took longer than at the usual pace, on a device of its own; 0 is undisturbed."""
        drift = float(np.mean(self._paces)) / _usual(self._paces) if self._paces else 1.0
        return max(0.0, drift / (1 - min(0.99, self._watch.lost_share())) - 1)

    @property
    def drift(self) -> float:
        """By what share nine of ten steps are slower or faster than the usual pace, on a device without other work.

        No pace that is more than `SCATTER` over the first quartile counts: others had the device, see `slowdown`.
        """
        paces = np.array(self._paces)
        quiet = paces[_is_quiet(paces)] if len(paces) else paces
        blocks = quiet[: len(quiet) // OF_A_STEP * OF_A_STEP].reshape(-1, OF_A_STEP).mean(axis=1)
        if len(blocks) < 2:
            return 0.0
        return float(np.quantile(np.abs(blocks / _usual(self._paces) - 1), 0.9))

    def lost_share(self) -> float:
        """Of the time of all laps, the share for which others had the device."""
        return self._watch.lost_share()

    def _refer(self) -> None:
        self._reference()
        self._watch.lap(self._reference, self._reference)
        self._is_reference.append(True)
        self._last = time.perf_counter()


def _bytes_of(side: int) -> int:
    """Of a square matrix and its product with itself."""
    return 2 * 4 * side**2


def _smooth(paces: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of those around each; of fewer at the ends."""
    padded = np.pad(paces, AROUND // 2, constant_values=np.nan)
    return np.asarray(np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, AROUND), axis=1))


def _usual(paces: Sequence[float]) -> float:
    if not paces:
        return 1.0
    all_of_them = np.array(paces)
    return float(all_of_them[_is_quiet(all_of_them)].mean())


def _is_quiet(paces: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which paces are the device's own."""
    return np.asarray(paces <= (1 + SCATTER) * np.quantile(paces, 0.25))
