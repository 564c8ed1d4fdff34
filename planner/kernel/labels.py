"""Where the search keeps rears of plans: all of them, those of one place while it is filled, and the complete plans.

A rear is a label: its numbers (`planner.kernel.rear`), and its links: what its first stage is, and which label comes
after that one. Named tuples hold no numbers that change, so a size is an array of one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled
from planner.kernel.heap import order_heap, sift_down
from planner.kernel.rows import copy_row, copy_rows

PARENT, DEVICE, CHOICE, POSITION, LINKS = range(5)
"""Columns of links: the label after the first stage, -1 for the empty one; the first stage's class of devices, and how
it recomputes, a place in `Choices`, -1 for one that keeps everything; where it begins. And how many columns there are.
"""
FIRST_ROOM = 1024
"""Labels that there is room for at the start."""


class Labels(NamedTuple):
    """All labels; those of a place, devices in use and the position where they begin, lie at [begin, end) of it.

    Attributes:
        size: how many there are, shape (1,).
        numbers: of each label, shape (room, columns).
        links: of each label, shape (room, LINKS).
        begin: shape (devices in use, positions).
        end: shape (devices in use, positions).
    """

    size: Indices
    numbers: Floats
    links: Indices
    begin: Indices
    end: Indices


class ParetoSet(NamedTuple):
    """The labels of one place while it is filled, none of which dominates another.

    Attributes:
        size: how many there are, shape (1,).
        numbers: of each label, shape (width, columns).
        raised: the same, raised to what makes no difference to any continuation: these are compared.
        bound_s: what it takes at least when it is completed.
        links: of each label, shape (width, LINKS).
        heap: the labels by their bounds, once there is no room, see `planner.kernel.heap`; shape (width,).
        ordered: 1 if that is in order, shape (1,).
    """

    size: Indices
    numbers: Floats
    raised: Floats
    bound_s: Floats
    links: Indices
    heap: Indices
    ordered: Indices


class BestPlans(NamedTuple):
    """The best complete plans so far, as they came.

    Attributes:
        size: how many there are, shape (1,).
        objective_s: of each, shape (room,).
        links: of each, shape (room, LINKS).
        heap: the plans by their objective, once there is no room, see `planner.kernel.heap`; shape (room,).
    """

    size: Indices
    objective_s: Floats
    links: Indices
    heap: Indices


@compiled
def empty_label(combinations: int, positions: int, columns: int) -> Labels:
    """Of no devices, at the last position."""
    labels = Labels(
        np.ones(1, dtype=np.int64),
        np.zeros((FIRST_ROOM, columns)),
        np.zeros((FIRST_ROOM, LINKS), dtype=np.int64),
        np.zeros((combinations, positions), dtype=np.int64),
        np.zeros((combinations, positions), dtype=np.int64),
    )
    labels.links[0, PARENT], labels.links[0, POSITION] = -1, positions - 1
    labels.end[0, positions - 1] = 1
    return labels


@compiled
def empty_set(width: int, columns: int) -> ParetoSet:
    """With room for `width` labels."""
    numbers, raised, links = np.zeros((width, columns)), np.zeros((width, columns)), np.zeros((width, LINKS), np.int64)
    heap, ordered = np.zeros(width, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return ParetoSet(np.zeros(1, dtype=np.int64), numbers, raised, np.zeros(width), links, heap, ordered)


@compiled
def no_plans(most: int) -> BestPlans:
    """With room for `most` plans."""
    links, heap = np.zeros((most, LINKS), dtype=np.int64), np.zeros(most, dtype=np.int64)
    return BestPlans(np.zeros(1, dtype=np.int64), np.full(most, np.inf), links, heap)


@compiled
def insert_plan(best: BestPlans, objective_s: float, parent: int, device: int, choice: int) -> float:
    """Add a complete plan, and say what the one takes for which there is no room then; infinite if there is."""
    slot, over_s = best.size[0], np.inf
    if slot == len(best.objective_s):
        slot = best.heap[0]
        over_s = best.objective_s[slot]
        if over_s <= objective_s:
            return float(objective_s)
    best.objective_s[slot] = objective_s
    _link(best.links, slot, parent, device, choice)
    if best.size[0] == len(best.objective_s):
        sift_down(best.heap, best.objective_s, 0)
    else:
        best.size[0] += 1
        if best.size[0] == len(best.objective_s):
            order_heap(best.heap, best.objective_s)
    return float(over_s)


@compiled
def _link(links: Indices, slot: int, parent: int, device: int, choice: int) -> None:
    links[slot, PARENT], links[slot, DEVICE], links[slot, CHOICE], links[slot, POSITION] = parent, device, choice, 0


@compiled
def is_dominated(pareto: ParetoSet, raised: Floats) -> bool:
    """Whether a label of the set dominates a new one; if not, those that the new one dominates are dropped."""
    compared, columns = pareto.raised, len(raised)
    count = pareto.size[0]
    other, dominated = 0, False
    while other < count and not dominated:
        no_more, no_less = True, True
        for column in range(columns):
            no_more &= compared[other, column] <= raised[column]
            no_less &= compared[other, column] >= raised[column]
        if no_more:
            dominated = True
        elif no_less:
            count -= 1
            copy_row(pareto.numbers[count], pareto.numbers[other])
            copy_row(compared[count], compared[other])
            copy_row(pareto.links[count], pareto.links[other])
            pareto.bound_s[other] = pareto.bound_s[count]
        else:
            other += 1
    pareto.size[0] = count
    return dominated


@compiled
def insert_label(
    pareto: ParetoSet, numbers: Floats, raised: Floats, bound_s: float, parent: int, device: int, choice: int
) -> float:
    """Add a label; where there is no room the one with the largest bound, which may be the new one, falls off.

    Returns:
        The bound of what falls off; infinite if nothing does.
    """
    slot, over_s = pareto.size[0], np.inf
    full = slot == len(pareto.bound_s)
    if full:
        if not pareto.ordered[0]:
            order_heap(pareto.heap, pareto.bound_s)
            pareto.ordered[0] = 1
        slot = pareto.heap[0]
        over_s = max(bound_s, pareto.bound_s[slot])
        if pareto.bound_s[slot] <= bound_s:
            return float(over_s)
    else:
        pareto.size[0] += 1
        pareto.ordered[0] = 0
    copy_row(numbers, pareto.numbers[slot])
    copy_row(raised, pareto.raised[slot])
    pareto.bound_s[slot] = bound_s
    _link(pareto.links, slot, parent, device, choice)
    if full:
        sift_down(pareto.heap, pareto.bound_s, 0)
    return float(over_s)


@compiled
def with_place(labels: Labels, pareto: ParetoSet, devices_used: int, position: int, limit_s: float) -> Labels:
    """The labels with those of one more place that are below the limit; the set is empty then."""
    while labels.size[0] + pareto.size[0] > len(labels.links):
        labels = _with_room(labels)
    count = labels.size[0]
    labels.begin[devices_used, position] = count
    for slot in range(pareto.size[0]):
        if pareto.bound_s[slot] < limit_s:
            copy_row(pareto.numbers[slot], labels.numbers[count])
            copy_row(pareto.links[slot], labels.links[count])
            labels.links[count, POSITION] = position
            count += 1
    labels.end[devices_used, position] = labels.size[0] = count
    pareto.size[0] = 0
    return labels


@compiled
def _with_room(labels: Labels) -> Labels:
    """The same labels with room for as many more."""
    room, columns = labels.numbers.shape
    numbers, links = np.zeros((2 * room, columns)), np.zeros((2 * room, LINKS), dtype=np.int64)
    copy_rows(labels.numbers, numbers)
    copy_rows(labels.links, links)
    return Labels(labels.size, numbers, links, labels.begin, labels.end)
