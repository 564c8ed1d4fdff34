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
from planner.solve.deadline import Deadline, with_share
from planner.solve.own_links import step_s
from planner.solve.problem import Problem, device_classes
from planner.solve.work_bound import least_s

PATIENCE = 0.25
"""With a search for one R, where several are tried: in parts of the usual patience, and of a time limit in parts of
what all R together have [chosen]."""
FIRST_SHARE = 0.1
"""Of what they have of a time limit, at first, for a plan that may rule single R out [chosen]."""


def best_plan(problem: Problem) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    apart = _apart(problem) if problem.settings.replicas is None else []
    if not apart:
        return _on_groups(problem)[0]
    return _Several(problem, apart).best_plan()


class _Several:
    """The search for any R on devices as they are, and those for single R.

    Without a time limit each is searched once. With one, a first plan of all rules some of them out, and none goes past
    its share; then what is left is all theirs that are not settled.

    Args:
        together: the problem with any R.
        apart: for each R that has other groups of devices.
    """

    def __init__(self, together: Problem, apart: Sequence[Problem]) -> None:
        self._together, self._apart = together, apart
        self._limited = together.settings.time_limit_s is not None
        self._deadline = Deadline(together.settings.time_limit_s)
        self._best: Plan | None = None
        self._least_s = {together: 0.0}  # what no plan of each is below
        self._had_s: dict[Problem, float] = {}

    def best_plan(self) -> Plan | None:
        """See `best_plan`."""
        together = self._together
        self._look(together, (1 + PATIENCE * len(self._apart)) / FIRST_SHARE)
        self._least_s |= {alone: least_s(_with_most_memory(alone)) for alone in self._apart}
        hopeful = [alone for alone in self._apart if self._may_have(alone)]
        for number, alone in enumerate(hopeful):
            if self._may_have(alone):
                self._look(alone, len(hopeful) - number + self._may_have(together) / PATIENCE)
        for one in (together, *hopeful) if self._limited else ():
            more = self._best is None or self._deadline.left_s > self._had_s.get(one, 0.0)
            if self._may_have(one) and more:
                self._look(one, last=self._best is None)
        if self._best is None:
            return None
        return host_search.with_bound(self._best, min(self._least_s.values()))

    def _may_have(self, one: Problem) -> bool:
        """Whether it may have a plan that is faster than the best one."""
        return self._least_s[one] < step_s(self._best)

    def _look(self, one: Problem, parts: float = 1, *, last: bool = False) -> None:
        """Search it with its part of the time that is left, and past that for want of any plan only at last."""
        given = with_share(one, self._deadline, parts)
        self._had_s[one] = min(self._deadline.left_s, given.settings.time_limit_s or math.inf)
        if self._limited and not last:
            given = replace(given, dispensable=True, below_s=min(one.below_s, step_s(self._best)))
        found, least = _on_groups(given)
        self._least_s[one] = max(self._least_s[one], least)
        self._best = min(self._best, found, key=step_s)


def _apart(problem: Problem) -> list[Problem]:
    """The problem for each R that may have other groups of devices than those with as much memory."""
    every = [replace(problem.settings, replicas=one) for one in problem.replicas() if _differs(problem, one)]
    return [replace(problem, settings=one, patience=problem.patience * PATIENCE) for one in every]


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


def _on_groups(problem: Problem) -> tuple[Plan | None, float]:
    """The fastest plan with R as the settings say, and what none is below; of any R on devices as they are.

    Devices that are together here may be on two hosts, and a plan on one host have others: its bound is one of time
    alone then.
    """
    replicas, limited = problem.settings.replicas, problem.settings.time_limit_s is not None
    several = [problem]
    # with one replica the other groupings are the same devices with less memory: a limit of time is not theirs
    if replicas is not None and (replicas > 1 or not limited):
        several = groupings(problem, replicas)
    deadline, unsettled = Deadline(problem.settings.time_limit_s), Unsettled()
    best: Plan | None = None
    lower_bound_s = math.inf
    for number, equal in enumerate(several):
        shared = with_share(equal, deadline, len(several) - number)
        if best is not None:
            shared = replace(shared, dispensable=True, below_s=min(shared.below_s, best.prediction.step_s))
        found = host_search.best_plan(shared, unsettled)
        if found is not None:
            lower_bound_s, best = min(lower_bound_s, found.prediction.lower_bound_s), min(best, found, key=step_s)
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
