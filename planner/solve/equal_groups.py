"""Replicas on devices of one kind that differ in memory: a stage's R devices all count with the least of theirs.

The search takes devices for equal that have as much memory, and a stage's replicas run on equal ones. Of one kind those
with most memory go together, R at a time: any other R devices have a place among these groups whose least is no
smaller, so nothing is lost by it.

    memory 40 40 36 24, R = 2      groups of 40 and 24, one stage each

On several hosts such groups may lie across them, and which device a replica has says over which links it sends. There
groups within hosts are tried as well, and all devices of a kind with the least memory of them all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
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
    return _with_least(problem, _groups(problem, replicas))


def groupings(problem: Problem, replicas: int) -> list[Problem]:
    """The problems that are searched for plans with so many replicas; the first is that of `with_equal_groups`."""
    found = [with_equal_groups(problem, replicas)]
    if problem.hosts is not None:
        per_host, positions = problem.hosts.devices_per_host, range(len(problem.devices))
        within = [
            group
            for first in positions[::per_host]
            for group in _groups(problem, replicas, positions[first : first + per_host])
        ]
        found += [_with_least(problem, groups) for groups in (within, _groups(problem, None))]
    by_memory: dict[tuple[int, ...], Problem] = {}
    for one in found:
        by_memory.setdefault(tuple(device.memory_bytes for device in one.devices), one)
    return [*by_memory.values()]


def _with_least(problem: Problem, groups: Iterable[Sequence[int]]) -> Problem:
    """The problem in which each device of a group has as much memory as the least of them."""
    devices = [*problem.devices]
    for members in groups:
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
    several, unsettled = groupings(problem, replicas), Unsettled()
    best: Plan | None = None
    lower_bound_s = math.inf
    for equal in several:
        shared = _with_time(equal, 1 / len(several))
        if best is not None:
            shared = replace(shared, dispensable=True, below_s=min(shared.below_s, best.prediction.step_s))
        found = host_search.best_plan(shared, unsettled)
        if found is not None:
            lower_bound_s = min(lower_bound_s, found.prediction.lower_bound_s)
            best = found if best is None or found.prediction.step_s < best.prediction.step_s else best
    if best is None:
        lower_bound_s = unsettled.least_s
    if problem.hosts is not None and any(one is not problem for one in several):
        lower_bound_s = min(lower_bound_s, least_s(_with_most_memory(problem)))
        best = None if best is None else host_search.with_bound(best, lower_bound_s)
    return best, lower_bound_s


def _groups(problem: Problem, replicas: int | None, among: Container[int] | None = None) -> Iterator[list[int]]:
    """Positions of devices of one kind, R at a time, those with most memory first; all of a kind without R.

    Args:
        problem: with the devices.
        replicas: R.
        among: their positions, if not all.
    """
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for group in problem.classes:
        if not group.pinned:
            kinds[group.device.kind] += [member for member in group.members if among is None or member in among]
    for members in filter(None, kinds.values()):
        members.sort(key=lambda member: (-problem.devices[member].memory_bytes, member))
        together = replicas or len(members)
        for first in range(0, len(members) - together + 1, together):
            yield members[first : first + together]


def _differs(problem: Problem, replicas: int) -> bool:
    """Whether there are other groups of R devices than those with as much memory."""
    if replicas > 1 and problem.hosts is not None:
        return any(one is not problem for one in groupings(problem, replicas))
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
