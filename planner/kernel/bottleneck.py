"""What limits a step at least, whatever the cuts, for all M of a search: the slowest stage, and the rounds of 1F1B."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Floats, Indices, Mask
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


@compiled
def least_rounds_s(allowed: Mask, around: Floats, messages: Floats, most: int, rounds: Indices) -> Floats:
    """What the stage before a cut waits for at least in 1F1B, whatever the cuts after it.

    With n stages after the cut it may have n + 1 micro-batches in flight, and waits that many times less often; but
    each goes to the end and back over n - 1 more cuts, none of which is better than those with the shortest messages.

    Args:
        allowed: whether a cut may be at each position, both ends included, shape (L + 1,).
        around: seconds of a large and of a small micro-batch around a cut, shape (2, L + 1): its messages, and the
            passes of the layer before it and of all after it.
        messages: of them both ways at each position, shape (2, L + 1).
        most: stages.
        rounds: how often it waits for a large and for a small micro-batch with so many in flight, shape (2, most + 1).
    """
    least_s = np.zeros(len(allowed))
    shortest = np.full((2, most), np.inf)
    for cut in range(len(allowed) - 2, 0, -1):
        if most < 2 or not allowed[cut]:
            continue
        best_s, large_s, small_s = np.inf, around[0, cut], around[1, cut]
        for after in range(1, most):
            best_s = min(best_s, rounds[0, after + 1] * large_s + rounds[1, after + 1] * small_s)
            large_s += shortest[0, after - 1]
            small_s += shortest[1, after - 1]
            if large_s == np.inf:
                break
        least_s[cut] = best_s
        for size in range(2):
            longer = messages[size, cut]
            for place in range(most):
                if shortest[size, place] > longer:
                    shortest[size, place], longer = longer, shortest[size, place]
    return least_s
