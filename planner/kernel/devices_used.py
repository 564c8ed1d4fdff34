"""Devices in use, as one number: equal devices are counted, so that a plan is no other for having swapped two."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Indices
from planner.kernel.compiled import compiled


@compiled
def used_numbers(capacity: Indices) -> tuple[Indices, Indices]:
    """All ways to use up devices: how many stages each class has, shape (U, C), and how many there are in all, (U,).

    Way `u` less one stage of class c is way `u - stride[c]` with stride[c] = product of capacity + 1 of classes before.
    """
    ways = 1
    for number in capacity:
        ways *= number + 1
    used = np.zeros((ways, len(capacity)), dtype=np.int64)
    total = np.zeros(ways, dtype=np.int64)
    for way in range(ways):
        rest = way
        for device in range(len(capacity)):
            used[way, device] = rest % (capacity[device] + 1)
            rest //= capacity[device] + 1
            total[way] += used[way, device]
    return used, total
