"""Parts of a problem, which the search solves each for itself: a schedule, R and M; so many stages; on these devices.

    every schedule, R and M           what the settings allow
        so many stages                1, 2, ..., as many as there may be
            on so many devices        of each class, where there are several

What a search that is cut off finds depends on all that it is asked. So where no proof comes the smallest parts are
searched, each in a way that depends on nothing but the part. A problem with fewer stages, devices, schedules or sizes
of micro-batches has some of these parts and no others, and so no better plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.solve.balance import Balance
from planner.solve.problem import Candidate, DeviceClass, Problem
from planner.solve.work_bound import work_bound_s


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a problem.

    Attributes:
        candidate: schedule, R and M.
        stages: K; None for any.
        devices: how many stages run on each class of devices; None for any.
    """

    candidate: Candidate
    stages: int | None = None
    devices: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """How much of it is fixed: 0, 1 or 2 of stages and devices."""
        return (self.stages is not None) + (self.devices is not None)

    def lies_in(self, other: Part) -> bool:
        """Whether it is the other or a part of it."""
        return (
            self.candidate == other.candidate
            and other.stages in (None, self.stages)
            and other.devices in (None, self.devices)
        )

    def parts(self, problem: Problem) -> list[Part]:
        """What it falls into; nothing if it is one of the smallest."""
        most = problem.most_stages(self.candidate.replicas, self.candidate.split.count)
        if self.stages is None:
            return [replace(self, stages=number) for number in range(1, most + 1)]
        if self.devices is None and len(problem.classes) > 1:
            return [replace(self, devices=numbers) for numbers in _shares(problem, self.candidate, self.stages)]
        return []

    def smallest(self, problem: Problem) -> Part:
        """Of the smallest in it one with the least bounds: first of the numbers of stages, then of devices."""
        part = self
        while parts := part.parts(problem):
            part = min(parts, key=lambda one: one.bound_s(problem))
        return part

    def problem(self, whole: Problem) -> Problem:
        """The same as a problem, which looks alike whatever the problem is that it is a part of."""
        found = whole
        if self.stages is not None:
            found = replace(found, settings=replace(found.settings, stages=self.stages, max_stages=self.stages))
        if self.devices is not None:
            classes = tuple(
                replace(group, members=group.members[: self.devices[place] * self.candidate.replicas], alike=())
                for place, group in self._in_order(whole)
            )
            found = replace(found, classes=classes)
        return found

    def in_whole(self, whole: Problem, found: Balance) -> Balance:
        """A plan of `problem` as one of the whole."""
        if self.devices is None:
            return found
        places = [place for place, _ in self._in_order(whole)]
        stages = tuple(replace(stage, device_class=places[stage.device_class]) for stage in found.stages)
        return replace(found, stages=stages)

    def bound_s(self, whole: Problem) -> float:
        """What none of its plans is below, from the work alone."""
        return work_bound_s(self.problem(whole), self.candidate)

    def _in_order(self, whole: Problem) -> list[tuple[int, DeviceClass]]:
        """The classes in use and their places, by what they are and not by their places."""
        used = [place for place, number in enumerate(self.devices or ()) if number]

        def key(place: int) -> tuple[str, int, bool]:
            group = whole.classes[place]
            return group.device.kind, group.device.memory_bytes, group.pinned

        return [(place, whole.classes[place]) for place in sorted(used, key=key)]


def _shares(problem: Problem, candidate: Candidate, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to take so many stages' devices of the classes; those that layers are pinned to are always in."""
    rooms = [range(int(group.pinned), min(stages, group.capacity(candidate.replicas)) + 1) for group in problem.classes]
    return (numbers for numbers in itertools.product(*rooms) if sum(numbers) == stages)
