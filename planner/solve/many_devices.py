"""More unlike devices than the search can tell apart: similar ones are taken for equal.

The search counts how many devices of each class are in use, so its work grows with the product of those numbers.
Where that is too much the most similar classes are merged, those of one kind, which differ in memory alone, before
others:

- as large as the smallest and of the slower kind, they give a plan, which then runs on the devices themselves;
- as large as the largest, where a class has one kind, they give a lower bound, and perhaps a better plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from planner.cost.stage_memory import stage_memory
from planner.cost.time_ledger import layer_seconds
from planner.search_watch import besides
from planner.solve.balance import Balance, StageChoice, Unsettled, best_of, evaluate_s
from planner.solve.balancer import balance
from planner.solve.problem import DeviceClass, Problem
from planner.solve.work_bound import least_s

FEW_COMBINATIONS, MOST_COMBINATIONS = 256, 4096
"""Combinations of devices in use, so many of each class, that the search always tells apart (8 unlike devices), and at
most [chosen]."""
MOST_PLACES = 10_000_000
"""The product of combinations, layers and candidates between these [fitted: 10 s]."""


def balance_any(problem: Problem, reached: Balance | None = None, unsettled: Unsettled | None = None) -> Balance | None:
    """`planner.solve.balancer.balance` for any number of unlike devices.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    groups = _groups(problem)
    if len(groups) == len(problem.classes):
        return balance(problem, reached, unsettled)
    settings = problem.settings
    if settings.time_limit_s is not None:
        problem = replace(problem, settings=replace(settings, time_limit_s=settings.time_limit_s / 2))
    with besides(0.0):
        small = balance(_merged(problem, groups, min))
    plans = [] if small is None else [*_on_members(problem, small, groups)]
    if all(len({one.device.kind for one in group}) == 1 for group in groups):
        left = Unsettled()
        large = balance(
            replace(_merged(problem, groups, max), dispensable=problem.dispensable or bool(plans)), unsettled=left
        )
        lower_bound_s = left.least_s if large is None else large.lower_bound_s
        plans += [] if large is None else _on_members(problem, large, groups)
    else:
        lower_bound_s = least_s(problem)
    best: Balance | None = None
    for plan in plans:
        if plan.better_than(best):
            best = plan
    if best is None and unsettled is not None:
        unsettled.note(lower_bound_s)
    return best_of(reached, best, lower_bound_s)


def with_fewer_classes(problem: Problem) -> Problem:
    """The same problem with no more classes of devices than can be told apart, each as small as its smallest."""
    return _merged(problem, _groups(problem), min)


def _groups(problem: Problem) -> list[list[DeviceClass]]:
    """The classes, the most similar ones together; those that a rule pins stay alone."""
    groups = [[one] for one in problem.classes]
    if _in_use(groups) <= FEW_COMBINATIONS:
        return groups
    candidates = sum(1 for _ in problem.candidates())
    most = max(FEW_COMBINATIONS, min(MOST_COMBINATIONS, MOST_PLACES // (problem.layers * max(1, candidates))))
    while _in_use(groups) > most:
        free = [group for group in groups if not group[0].pinned]
        if len(free) < 2:
            break
        first, second = min(combinations(free, 2), key=lambda pair: _distance(problem, *pair))
        groups = [group for group in groups if group is not first and group is not second] + [first + second]
    return groups


def _in_use(groups: Sequence[Sequence[DeviceClass]]) -> int:
    """How many combinations of devices in use there are."""
    return math.prod(1 + sum(len(one.members) for one in group) for group in groups)


def _distance(problem: Problem, first: Sequence[DeviceClass], second: Sequence[DeviceClass]) -> tuple[float, float]:
    """How unlike the devices of two groups are: in speed, then in memory."""
    both = [one.device for one in (*first, *second)]
    seconds = [_seconds(problem, device.kind) for device in both]
    sizes = [device.memory_bytes for device in both]
    return max(seconds) / min(seconds), max(sizes) / min(sizes)


def _seconds(problem: Problem, kind: str) -> float:
    """What the smallest measured micro-batch takes."""
    costs = layer_seconds(problem.costs, kind, problem.costs.measured_sizes(kind)[0])
    return float((costs.forward_s + costs.backward_s).sum()) or 1.0


def _merged(
    problem: Problem, groups: Sequence[Sequence[DeviceClass]], extent: Callable[[Iterable[int]], int]
) -> Problem:
    """With one class for each group, of its slowest kind and the least or the most memory."""
    classes = []
    for group in groups:
        slowest = max((one.device for one in group), key=lambda device: _seconds(problem, device.kind))
        memory_bytes = extent(one.device.memory_bytes for one in group)
        members = tuple(sorted(member for one in group for member in one.members))
        device = slowest.model_copy(update={"memory_bytes": memory_bytes})
        alike = tuple(len(one.members) for one in group) if len(group) > 1 else ()
        classes.append(DeviceClass(device, members, group[0].pinned, alike))
    return replace(problem, classes=tuple(classes))


def _on_members(problem: Problem, found: Balance, groups: Sequence[Sequence[DeviceClass]]) -> Iterator[Balance]:
    """The plan on the devices themselves, if it fits: what needs most memory on the largest of its group."""
    position_of = {id(one): position for position, one in enumerate(problem.classes)}
    left = [
        sorted((one for one in group for _ in range(one.capacity(found.candidate.replicas))),
               key=lambda one: one.device.memory_bytes)
        for group in groups
    ]  # fmt: skip
    chosen: dict[int, StageChoice] = {}
    stages = found.stages
    needs = {index: _bytes(problem, found, index, groups[stage.device_class][0]) for index, stage in enumerate(stages)}
    for index in sorted(needs, key=lambda index: -needs[index]):
        place = left[stages[index].device_class]
        if not place:
            return
        group = place.pop()
        if _bytes(problem, found, index, group) > group.device.memory_bytes:
            return
        chosen[index] = replace(stages[index], device_class=position_of[id(group)])
    moved = tuple(chosen[index] for index in range(len(stages)))
    yield Balance(found.candidate, moved, evaluate_s(problem, found.candidate, moved), 0.0)


def _bytes(problem: Problem, found: Balance, index: int, group: DeviceClass) -> int:
    """Bytes of a stage on a device of that class."""
    stage, candidate = found.stages[index], found.candidate
    return stage_memory(
        problem.costs,
        problem.parameters,
        group.device,
        candidate.schedule,
        candidate.split,
        problem.costs.optimizer(group.device.kind, problem.optimizer),
        number=len(found.stages) - index,
        first=stage.first,
        stop=stage.stop,
        segments=stage.segments,
        replicas=problem.as_replicas(candidate.replicas),
        carrier=problem.carrier(group.device),
    ).total
