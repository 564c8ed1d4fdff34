"""Repeated measurements of a call, and what they come to."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from profiler.machine.backend import backend_of


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


def rounds(*, at_least: int, at_most: int, budget_s: float) -> Iterator[int]:
    """0, 1, ... until the next round would probably end after the budget, within the two bounds."""
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
    """Time one call many times.

    Args:
        call: what is timed.
        device: where its work runs.
        prepare: called before each call, outside the clock.
        warm_ups: calls before the first that counts.
        at_least: calls that count, whatever the budget.
        at_most: calls that count, whatever is left of the budget.
        budget_s: seconds after which no further call starts.
    """
    watch = backend_of(device).stopwatch(device)
    seconds: list[float] = []
    for number in rounds(at_least=warm_ups + at_least, at_most=warm_ups + at_most, budget_s=budget_s):
        prepare()
        watch.lap(call, "call")
        lap = watch.take()
        if number >= warm_ups:
            seconds.extend(lap)
    return Timing.of(seconds)


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Torch computes with that many threads inside, and as before afterwards; 0 changes nothing."""
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
