"""Replicas on devices of one kind that differ in memory: a stage's R devices all count with the least of theirs.

The search takes devices for equal that have as much memory, and a stage's replicas run on equal ones. Of one kind those
with most memory go together, R at a time: any other R devices have a place among these groups whose least is no
smaller, so nothing is lost by it.

    memory 40 40 36 24, R = 2      groups of 40 and 24, one stage each
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from planner.plan.plan import Plan
from planner.solve import host_search
from planner.solve.balance import Unsettled
from planner.solve.problem import Problem, device_classes
from planner.solve.work_bound import least_s

PATIENCE = 0.25
"""Share of the usual patience with a search for one R, where several are tried [chosen]."""


def best_plan(problem: Problem) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    if problem.settings.replicas is not None:
        return _on_groups(problem, problem.settings.replicas)[0]
    apart = [replicas for replicas in problem.replicas() if _differs(problem, replicas)]
    if not apart:
        return host_search.best_plan(problem)
    problem = _with_time(problem, 1 / (1 + len(apart)))
    unsettled = Unsettled()
    best = host_search.best_plan(problem, unsettled)
    lower_bound_s = unsettled.least_s if best is None else best.prediction.lower_bound_s
    for replicas in apart:
        settings = replace(problem.settings, replicas=replicas)
        alone = replace(problem, settings=settings, patience=problem.patience * PATIENCE)
        bound_s = least_s(_with_most_memory(alone))
        if best is not None and bound_s >= best.prediction.step_s:
            continue
        found, least = _on_groups(alone, replicas)
        lower_bound_s = min(lower_bound_s, least)
        if best is None or (found is not None and found.prediction.step_s < best.prediction.step_s):
            best = found
    return None if best is None else host_search.with_bound(best, lower_bound_s)


def with_equal_groups(problem: Problem, replicas: int) -> Problem:
    """The problem with devices that are equal R at a time; those that are left, or that rules pin, stay as they are."""
    devices = [*problem.devices]
    for members in _groups(problem, replicas):
        least = min(devices[member].memory_bytes for member in members)
        for member in members:
            devices[member] = devices[member].model_copy(update={"memory_bytes": least})
    if devices == [*problem.devices]:
        return problem
    return replace(problem, devices=tuple(devices), classes=device_classes(devices, problem.rules))


def _on_groups(problem: Problem, replicas: int) -> tuple[Plan | None, float]:
    """The fastest plan with so many replicas, and what none is below.

    Devices that are together here may be on two hosts, and a plan on one host have others: its bound is one of time
    alone then.
    """
    equal, unsettled = with_equal_groups(problem, replicas), Unsettled()
    found = host_search.best_plan(equal, unsettled)
    lower_bound_s = unsettled.least_s if found is None else found.prediction.lower_bound_s
    if equal is not problem and problem.hosts is not None:
        lower_bound_s = min(lower_bound_s, least_s(_with_most_memory(problem)))
        found = None if found is None else host_search.with_bound(found, lower_bound_s)
    return found, lower_bound_s


def _groups(problem: Problem, replicas: int) -> Iterator[list[int]]:
    """Positions of devices of one kind, R at a time, those with most memory first."""
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for group in problem.classes:
        if not group.pinned:
            kinds[group.device.kind] += group.members
    for members in kinds.values():
        members.sort(key=lambda member: (-problem.devices[member].memory_bytes, member))
        for first in range(0, len(members) - replicas + 1, replicas):
            yield members[first : first + replicas]


def _differs(problem: Problem, replicas: int) -> bool:
    """Whether there are other groups of R devices than those with as much memory."""
    return _stages_by_class(problem, replicas) != _stages_by_class(with_equal_groups(problem, replicas), replicas)


def _stages_by_class(problem: Problem, replicas: int) -> Counter[tuple[str, int]]:
    """How many stages may run on devices of each kind and memory, as far as any may."""
    found: Counter[tuple[str, int]] = Counter()
    for one in problem.classes:
        found[one.device.kind, one.device.memory_bytes] += one.capacity(replicas)
    return +found


def _with_most_memory(problem: Problem) -> Problem:
    """The problem on devices with as much memory as any of their kind."""
    most: dict[str, int] = {}
    for device in problem.devices:
        most[device.kind] = max(most.get(device.kind, 0), device.memory_bytes)
    devices = tuple(one.model_copy(update={"memory_bytes": most[one.kind]}) for one in problem.devices)
    return replace(problem, devices=devices, classes=device_classes(devices, problem.rules))


def _with_time(problem: Problem, share: float) -> Problem:
    limit_s = problem.settings.time_limit_s
    if limit_s is None:
        return problem
    return replace(problem, settings=replace(problem.settings, time_limit_s=limit_s * share))
