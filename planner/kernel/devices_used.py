"""Devices in use, as one number: equal devices are counted, so that a plan is no other for having swapped two."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Indices
from planner.kernel.compiled import compiled


@compiled
def used_numbers(capacity: Indices) -> tuple[Indices, Indices]:
    """All choices of devices to use: how many stages each class has, shape (U, C), and how many there are in all, (U,).

    Choice `u` less one stage of class c is choice `u - stride[c]`, where stride[c] is the product of capacity + 1 of
    the classes before.
    """
    choices = 1
    for number in capacity:
        choices *= number + 1
    used = np.zeros((choices, len(capacity)), dtype=np.int64)
    total = np.zeros(choices, dtype=np.int64)
    for choice in range(choices):
        rest = choice
        for device in range(len(capacity)):
            used[choice, device] = rest % (capacity[device] + 1)
            rest //= capacity[device] + 1
            total[choice] += used[choice, device]
    return used, total
