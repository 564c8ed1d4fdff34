"""Rates of a device that has been measured, fitted to counted work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from profiler.record import LayerCost
from profiler.timing.counted_work import LayerWork, Operations
from profiler.timing.roofline import LAUNCH, Rates, roofline_s

WIDEST_FIT = np.log(100.0)
"""Fitted rates lie within this factor of those that the fit starts from."""
MARGIN = 2.0
"""A model that was not fitted to may be off by this many times the deviation of those that were [assumed]."""


def fitted_rates(
    models: Iterable[tuple[Mapping[int, Sequence[LayerWork]], Sequence[LayerCost]]], start: Rates
) -> tuple[Rates, float]:
    """Rates of a device that has been measured, and that computes what it is asked for at once.

    Minimizes the squared logarithm of predicted over measured time, over layers, sizes and both directions.

    Args:
        models: of each model the work by micro-batch size and layer, and times of these layers on the device.
        start: rates to begin with.

    Returns:
        The rates, and the error to state: `MARGIN` times the sum of all deviations as a share of the sum of all times.
    """
    parts, times = [], []
    for work, measured in models:
        for cost in measured:
            layer = work[cost.micro_batch_size][cost.layer]
            for operations, seconds in ((layer.forward, cost.forward_s), (layer.backward, cost.backward_s)):
                if seconds > 0 and operations.names:
                    parts.append(operations)
                    times.append(seconds)
    owner = np.repeat(np.arange(len(parts)), [len(part.names) for part in parts])
    everything = Operations(
        (),
        np.concatenate([part.flops for part in parts]),
        np.concatenate([part.size_bytes for part in parts]),
        np.concatenate([part.arithmetic for part in parts]),
        np.concatenate([part.aligned for part in parts]),
    )
    truth = np.array(times)

    def predicted(logarithms: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.bincount(owner, roofline_s(everything, np.exp(logarithms), start.unaligned), len(truth)).astype(
            np.float64
        )

    weights = np.sqrt(truth / truth.sum())  # what takes long counts

    def residuals(logarithms: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(weights * np.log(predicted(logarithms) / truth))

    begin = np.log(astuple(start)[: LAUNCH + 1])
    found = least_squares(residuals, begin, bounds=(begin - WIDEST_FIT, begin + WIDEST_FIT))
    rates = replace(Rates(*(float(value) for value in np.exp(found.x))), unaligned=start.unaligned)
    error = MARGIN * float(np.abs(predicted(found.x) - truth).sum() / truth.sum())
    return rates, error
