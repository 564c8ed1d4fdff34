"""The slowest stage of equal devices at least, whatever the cuts: by bisection, for all M of a search."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.compiled import compiled

HALVINGS = 36
"""Steps of the bisection for the smallest bottleneck."""
ROUNDING = 1e-11
"""Relative error of sums that a bound leaves room for."""


@compiled
def least_bottleneck(sums: Floats, links: Floats, stages: int, gain: float) -> float:
    """The smallest g such that so many stages can hold all work, each at most g + gain * the work after it.

    Args:
        sums: of the work before each place where a cut may be, both ends included, ascending.
        links: what the link does if there is a cut, as long at most as a stage that ends there; nothing at both ends.
        stages: how many.
        gain: at least 0.
    """
    total = sums[-1]
    low, high = 0.0, total
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        first = len(sums) - 1
        for _ in range(stages):
            after = total - sums[first]
            reach = sums[first] - (middle + gain * after) - ROUNDING * total
            before = first
            first = min(first, np.searchsorted(sums, reach))
            while first < before and links[first] > middle + gain * (total - sums[first]) + ROUNDING * total:
                first += 1
        if first == 0:
            high = middle
        else:
            low = middle
    return low
