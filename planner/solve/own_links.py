"""Plans for several hosts near those that were found with one link: cuts, devices and M for each boundary's own link.

    plans of problems with one link
      cuts moved, orders made for them          where few bytes cross between hosts, also from cuts laid there
      cuts moved again, recompute anew          of the fastest ones
      another M, one or two ranks elsewhere     of the fastest ones, and of what comes of that
      on later devices                          where some are left over, others than the first; and beside the fastest
      with the last host before others          where that one has fewer devices

Steps are the simulator's, which knows each boundary's own link; plans that do not fit do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, product

import numpy as np

from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.rules import FREE
from planner.solve import skip_search
from planner.solve.balance import TIE, Balance, StageChoice, evaluate_s
from planner.solve.deadline import Deadline
from planner.solve.moved_cuts import with_far_cuts, with_moved_cuts
from planner.solve.order_start import with_own_orders
from planner.solve.other_counts import promising
from planner.solve.problem import Candidate, Problem

MOST_PLANS = 10
"""Plans that more is tried with [chosen]."""
MOST_LOOKED = 40
"""Plans of each K beside which others are looked at [chosen]."""
FEW_COUNTS = 16
"""M that are all tried, each with cuts of its own; of more the one with which the plan is fastest as it is [chosen]."""
MOST_DEVICES = 64
"""Other classes of devices that the ranks of a plan are tried on [chosen]."""


class OwnLinks:
    """The fastest plan that was come to.

    Args:
        problem: with hosts.
        lower_bound_s: no plan is faster.
        deadline: when none is tried any more.
        best: plan so far, of other devices or in another order.

    Attributes:
        best: it; None before one was found that fits.
    """

    def __init__(self, problem: Problem, lower_bound_s: float, deadline: Deadline, best: Plan | None = None) -> None:
        self.best = best
        self._problem = problem
        self._lower_bound_s = lower_bound_s
        self._deadline = deadline
        self._improver = self._improver_of(problem)
        self._plans: dict[Balance, Plan | None] = {}

    @property
    def done(self) -> bool:
        """Whether nothing more is to be tried."""
        return self._deadline.over or step_s(self.best) <= self._lower_bound_s

    @property
    def looked_near(self) -> Sequence[Balance]:
        """All plans of which those that fit were made."""
        return tuple(self._plans)

    def look_near(self, starts: Sequence[Balance]) -> None:
        """First with cuts for their own links; when time is up, at what may be the best: to make one takes seconds."""
        moved = [with_far_cuts(self._problem, one, self._deadline) for one in starts]
        others = [
            one for one in _in_other_schedules(self._problem, moved) if self._evaluated_s(one) < step_s(self.best)
        ]
        waiting: Iterable[Balance] = (
            *moved,
            *_with_made_orders(self._problem, moved, self._deadline),
            *starts,
            *(with_far_cuts(self._problem, one, self._deadline) for one in others),
        )
        if self._deadline.over:
            waiting = sorted(dict.fromkeys(waiting), key=self._evaluated_s)
        for start in waiting:
            late = self._deadline.over and self._evaluated_s(start) >= step_s(self.best) * (1 - TIE)
            if start not in self._plans and not late:
                self._note(start, self._improver.nearest(start))

    def _evaluated_s(self, start: Balance) -> float:
        """Seconds of its step over its own links."""
        return evaluate_s(self._problem, start.candidate, start.stages, start.orders)

    def look_near_on(self, later: Problem, starts: Sequence[Balance]) -> None:
        """The same for the problem with later devices alone, and beside each plan that is the fastest yet."""
        improver = self._improver_of(later)
        moved = [with_far_cuts(later, one, self._deadline) for one in starts]
        waiting: Iterable[Balance] = (*moved, *_with_made_orders(later, moved, self._deadline), *starts)
        while waiting:
            fastest = None
            for start in waiting:
                if self.done:
                    return
                if evaluate_s(later, start.candidate, start.stages, start.orders) < step_s(self.best):
                    plan = improver.nearest(start)
                    if step_s(plan) < step_s(self.best):
                        self.best, fastest = plan, start
            waiting = () if fastest is None else self._beside(later, fastest)

    def improve(self) -> None:
        """The fastest plans with other cuts, recompute, M and devices, of each K, and all of them on later devices."""
        for start in sorted(self._plans, key=lambda start: step_s(self._plans[start]))[:MOST_PLANS]:
            close = step_s(self.best) <= self._lower_bound_s * (1 + skip_search.CLOSE_ENOUGH)
            if self.best is not None and (self._deadline.over or close):
                break
            better = self._improver.better(start, dispensable=self.best is not None)
            self.best = min(self.best, better, key=step_s)
        steps: dict[int, float] = {}
        for start, plan in self._plans.items():
            steps[len(start.stages)] = min(step_s(plan), steps.get(len(start.stages), np.inf))
        for stages in sorted(steps, key=lambda number: steps[number]):
            self._improve_with(stages, steps[stages])
        self._look_at_later_devices()

    def _improve_with(self, stages: int, reached_s: float) -> None:
        """From one plan of so many stages to the next, also where plans of another number are faster for a while."""
        looked: set[Balance] = set()
        while not self.done and len(looked) < MOST_LOOKED:
            waiting = [one for one in self._plans if len(one.stages) == stages and one not in looked]
            if not waiting:
                break
            start = min(waiting, key=lambda one: (step_s(self._plans[one]), one.step_s))
            looked.add(start)
            for other in self._beside(self._problem, start):
                if other not in self._plans and other.step_s < reached_s:
                    self._note(other, self._improver.nearest(other) or self._improver.better(other, dispensable=True))
                    reached_s = min(reached_s, step_s(self._plans[other]))

    def _beside(self, problem: Problem, start: Balance) -> Iterable[Balance]:
        """Those of `_beside`, with orders of their own where the plan has."""
        others = _beside(problem, replace(start, orders=()), self._deadline)
        return _with_made_orders(problem, [*others], self._deadline) if start.orders else others

    def _look_at_later_devices(self) -> None:
        for later in _on_later_devices(self._problem):
            self.look_near_on(later, [one for one in self._plans if _has_devices(later, one)])
        for other in _in_other_orders_of_hosts(self._problem):
            self.look_near_on(other, [one for one in self._plans if one.candidate.replicas == 1])

    def _note(self, start: Balance, plan: Plan | None) -> None:
        self._plans[start] = plan
        self.best = min(self.best, plan, key=step_s)

    def _improver_of(self, problem: Problem) -> skip_search.CutImprover:
        values = skip_search.values_of(problem)
        return skip_search.CutImprover(problem, values, self._lower_bound_s, self._deadline)


def _with_made_orders(problem: Problem, plans: Sequence[Balance], deadline: Deadline) -> Iterator[Balance]:
    """The plans of one stage a rank with orders that are made for their own links, of each schedule that makes them."""
    records = {name: SCHEDULES[name] for name in problem.settings.schedules}
    made = [name for name, record in records.items() if record.made_for_plan and record.fewest_chunks == 1]
    for plan, name in product(plans, made):
        if not deadline.over and plan.candidate.ring.chunks == 1 and len(plan.stages) > 1:
            moved = with_moved_cuts(problem, replace(plan, orders=()), deadline) if plan.orders else plan
            found = with_own_orders(problem, moved, name, deadline)
            if found is not None:
                yield found


def _in_other_schedules(problem: Problem, plans: Sequence[Balance]) -> Iterator[Balance]:
    """The plans of a schedule with whole backward passes and one stage a rank in each other one of these.

    What is faster over one link may not be so over several: between hosts messages take long, and who has more
    micro-batches under way waits for them less.
    """
    records = {name: SCHEDULES[name] for name in problem.settings.schedules}
    whole = [name for name, one in records.items() if one.most_chunks == 1 and not one.splits_backward]
    for plan, name in product(plans, whole):
        if plan.candidate.schedule in whole and plan.candidate.schedule != name and len(plan.stages) > 1:
            yield replace(plan, candidate=replace(plan.candidate, schedule=name))


def _beside(problem: Problem, start: Balance, deadline: Deadline) -> Iterator[Balance]:
    """The plan, without orders of its own, with other M, and with one or two ranks elsewhere.

    Which these are depends on which boundaries leave a host: with one link for all other ones may be the best.
    """
    if (problem.rules.pinned != FREE).any() or len(start.stages) == 1:
        return
    stages, candidate = start.stages, start.candidate
    like = candidate.schedule, candidate.replicas
    splits = {one.split for one in problem.candidates() if (one.schedule, one.replicas) == like}
    counts = [replace(candidate, split=split) for split in splits - {candidate.split}]
    counts.sort(key=lambda one: one.split.count)
    if len(counts) > FEW_COUNTS:
        now_s = evaluate_s(problem, candidate, stages)
        found = promising(counts, partial(_step_with, problem, stages), partial(_may_have, problem, stages), now_s)
        counts = [] if found is None else [found]
    for one in counts:
        if _may_have(problem, stages, one):
            yield with_moved_cuts(problem, replace(start, candidate=one), deadline)
    ring = candidate.ring.over(len(stages))
    for classes in islice(_other_devices(_classes_of_ranks(start), len(problem.classes)), MOST_DEVICES):
        others = ((stage, classes[ring.rank_of(number)]) for number, stage in enumerate(stages))
        other = replace(start, stages=tuple(replace(stage, device_class=place) for stage, place in others))
        if _has_devices(problem, other):
            yield with_moved_cuts(problem, other, deadline)


def _step_with(problem: Problem, stages: tuple[StageChoice, ...], candidate: Candidate) -> float:
    return evaluate_s(problem, candidate, stages)


def _may_have(problem: Problem, stages: Sequence[StageChoice], candidate: Candidate) -> bool:
    return len(stages) <= problem.most_stages(candidate.replicas, candidate.split.count)


def _other_devices(classes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Classes of ranks where two are exchanged, or one is another of so many."""
    for one, other in combinations(range(len(classes)), 2):
        if classes[one] != classes[other]:
            yield [classes[{one: other, other: one}.get(place, place)] for place in range(len(classes))]
    for place, other in product(range(len(classes)), range(count)):
        if classes[place] != other:
            yield [*classes[:place], other, *classes[place + 1 :]]


def _on_later_devices(problem: Problem) -> Iterator[Problem]:
    """The problem without the first device, without the first two, and so on to the last one of the first host."""
    assert problem.hosts is not None
    if (problem.rules.pinned != FREE).any():
        return
    for first in range(1, min(problem.hosts.devices_per_host, len(problem.devices))):
        yield from_device(problem, first)


def _in_other_orders_of_hosts(problem: Problem) -> Iterator[Problem]:
    """The problem with its last host before others, where that one has fewer devices; of one replica.

    With several, each would have its ranks in an order of its own.
    """
    assert problem.hosts is not None
    per_host, devices = problem.hosts.devices_per_host, len(problem.devices)
    if (problem.rules.pinned != FREE).any() or devices % per_host == 0 or problem.hosts.adjacent:
        return
    last = devices // per_host
    for place in range(last):
        order = [*range(place), last, *range(place, last)]
        members = [sorted(one.members, key=lambda member: order.index(member // per_host)) for one in problem.classes]
        yield replace(
            problem,
            classes=tuple(replace(one, members=tuple(m)) for one, m in zip(problem.classes, members, strict=True)),
            settings=replace(problem.settings, replicas=1),
        )


def from_device(problem: Problem, first: int) -> Problem:
    """The problem without the devices before that one."""
    left = (tuple(member for member in one.members if member >= first) for one in problem.classes)
    classes = tuple(replace(one, members=members) for one, members in zip(problem.classes, left, strict=True))
    return replace(problem, classes=classes)


def _has_devices(problem: Problem, found: Balance) -> bool:
    """Whether there are enough of each class for all ranks and replicas."""
    used = Counter(_classes_of_ranks(found))
    return all(used[place] <= one.capacity(found.candidate.replicas) for place, one in enumerate(problem.classes))


def _classes_of_ranks(found: Balance) -> list[int]:
    """Each rank's first stage is at its own place in the pipeline."""
    return [stage.device_class for stage in found.stages[: found.candidate.ring.over(len(found.stages)).ranks]]


def step_s(plan: Plan | None) -> float:
    """Seconds of its step; infinite where there is none."""
    return np.inf if plan is None else plan.prediction.step_s
