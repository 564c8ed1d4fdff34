"""Whether values that stages between do not read are relayed by these, or go past them.

The balancer charges every boundary with all that crosses it: that is what relaying costs. What skipping saves depends
on the cuts on both sides, which its search does not know. So with skips three problems are solved that differ in what
boundaries are charged with:

- with what must cross them in any case, from the layer before to the layer behind: no plan with skips is faster than
  this problem's bound, and none needs less memory;
- with all but the values that no layer uses for as long as an even stage is;
- with everything, as if it were relayed.

From the plan of each, one cut after the other is moved to where the simulator finds the step shortest, until none is
worth moving; the fastest plan that fits is taken, with skips or without.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from planner.balancer import Balance
from planner.clock import Clock
from planner.costs import CostModel
from planner.drafting import make_plan
from planner.infeasible import nothing_fits_text
from planner.many_devices import balance_any, with_fewer_classes
from planner.plan import Plan, Segment
from planner.problem import Problem
from planner.rules import FREE
from planner.skips import routes_of
from profiler.errors import ProfileError
from profiler.record import LayerCost, Profile, SkipValue

NEXT = 2
"""Least distance, in layers, of two users of a value that have another layer between them."""
REACH = 12
"""Positions on either side of a cut that it is tried at [chosen]."""
MOST_TRIED = 600
"""Plans tried around one that a search found [chosen: 2 to 5 s for some hundred layers]."""


def best_plan(problem: Problem) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    values = _values(problem)
    if not values:
        relayed = balance_any(problem)
        return None if relayed is None else make_plan(problem, relayed)
    clock = Clock(problem.settings.time_limit_s)
    problem = _with_share_of_time(problem)
    bound = balance_any(_charged_without(problem, _apart(values, NEXT)))
    if bound is None:
        return None
    even = max(NEXT, -(-problem.layers // problem.settings.max_stages))
    found = (balance_any(problem), balance_any(_charged_without(problem, _apart(values, even))), bound)
    starts = {(one.candidate, one.stages): one for one in found if one is not None}
    best: Plan | None = None
    for start in starts.values():
        for plan in _Around(problem, values, bound.lower_bound_s, clock).plans(start):
            if best is None or plan.prediction.step_s < best.prediction.step_s:
                best = plan
    return best


def no_plan_text(problem: Problem) -> str:
    """Why there is none."""
    values = _values(problem)
    if values:
        least = _charged_without(problem, _apart(values, NEXT))
        if balance_any(least) is None:
            return nothing_fits_text(with_fewer_classes(least))
        note = "no plan was found that fits with values that skip stages; with all of them relayed, "
        return note + nothing_fits_text(with_fewer_classes(problem))
    return nothing_fits_text(with_fewer_classes(problem))


def _values(problem: Problem) -> tuple[SkipValue, ...]:
    """Those that may skip stages."""
    if problem.settings.skips == "relayed" or problem.settings.stages == 1:
        return ()
    values = problem.costs.profile.skips
    if values is None:
        raise ProfileError(
            'skips is "direct", and the profile does not say which values could go past a stage; profile the model '
            'again, or set skips="relayed"'
        )
    return values


Gap: TypeAlias = tuple[SkipValue, int, int]  # a value and two layers that use it, with none between that does


def _apart(values: Iterable[SkipValue], distance: int) -> list[Gap]:
    """Gaps of at least so many layers."""
    gaps = [(value, *users) for value in values for users in pairwise(value.users)]
    return [gap for gap in gaps if gap[2] - gap[1] >= distance]


def _with_share_of_time(problem: Problem) -> Problem:
    """The problem with a quarter of its time: there are three of them, and plans to try around theirs."""
    limit_s = problem.settings.time_limit_s
    if limit_s is None:
        return problem
    return replace(problem, settings=replace(problem.settings, time_limit_s=limit_s / 4))


class _Around:
    """Plans with skips around one that the balancer found.

    Args:
        problem: the problem.
        values: that may skip stages.
        lower_bound_s: no plan is faster.
        clock: how much time is left.
    """

    def __init__(self, problem: Problem, values: Sequence[SkipValue], lower_bound_s: float, clock: Clock) -> None:
        self._problem = problem
        self._values = values
        self._lower_bound_s = lower_bound_s
        self._clock = clock
        self._tried: dict[tuple[int, ...], Plan | None] = {}

    def plans(self, found: Balance) -> Iterator[Plan]:
        """The plan itself with skips and without, and better ones."""
        relayed = make_plan(self._problem, replace(found, lower_bound_s=self._lower_bound_s))
        plans: list[Plan | None] = [self._direct(found), relayed]
        stops = self._climbed(found)
        if stops is not None:
            plans.append(self._tried[stops])
            exact = balance_any(self._cut_at(stops)) if self._problem.settings.recompute == "auto" else None
            plans.append(None if exact is None else self._direct(exact))
        yield from (plan for plan in plans if plan is not None and not any(_over(plan)))

    def _climbed(self, found: Balance) -> tuple[int, ...] | None:
        """Where the cuts end up; None where nothing around fits, or a rule says which device runs what."""
        rules = self._problem.rules
        stops = tuple(stage.stop for stage in found.stages)
        if (rules.pinned != FREE).any():
            return None
        places = np.flatnonzero(rules.allowed)
        moved = True
        while moved:
            moved = False
            for cut in range(len(stops) - 1):
                if rules.demanded[stops[cut]]:
                    continue
                least, most = stops[cut - 1] if cut else 0, stops[cut + 1]
                near = sorted(places[(places > least) & (places < most)], key=lambda place: abs(place - stops[cut]))
                choices = [(*stops[:cut], int(place), *stops[cut + 1 :]) for place in near[: 2 * REACH]]
                best = min(choices, key=lambda choice: self._step_s(found, choice), default=stops)
                if self._step_s(found, best) < self._step_s(found, stops):
                    stops, moved = best, True
        return stops if self._step_s(found, stops) < np.inf else None

    def _step_s(self, found: Balance, stops: tuple[int, ...]) -> float:
        """Seconds of the step with other cuts; infinite where it does not fit, or enough was tried."""
        if stops not in self._tried:
            if len(self._tried) >= MOST_TRIED or self._clock.over:
                return np.inf
            self._tried[stops] = self._moved(found, stops)
        plan = self._tried[stops]
        return np.inf if plan is None else plan.prediction.step_s

    def _moved(self, found: Balance, stops: tuple[int, ...]) -> Plan | None:
        """The plan with other cuts; a stage that may is recomputed as a whole where it does not fit otherwise."""
        mode = self._problem.settings.recompute
        bounds = list(pairwise((0, *stops)))
        whole = [(Segment(first=first, stop=stop),) for first, stop in bounds]
        segments: list[tuple[Segment, ...]] = list(whole) if mode == "always" else [()] * len(bounds)
        for _ in range(2):
            stages = tuple(
                replace(stage, first=first, stop=stop, segments=again)
                for stage, (first, stop), again in zip(found.stages, bounds, segments, strict=True)
            )
            plan = self._direct(replace(found, stages=stages))
            over = _over(plan)
            if not any(over):
                return plan
            if mode != "auto":
                return None
            segments = [again if full else kept for again, full, kept in zip(whole, over, segments, strict=True)]
        return None

    def _direct(self, found: Balance) -> Plan:
        """The plan with skips."""
        routes = routes_of(self._values, [stage.stop for stage in found.stages])
        return make_plan(self._problem, replace(found, lower_bound_s=self._lower_bound_s), routes)

    def _cut_at(self, stops: tuple[int, ...]) -> Problem:
        """The problem with these cuts, where boundaries are charged with what does not skip stages."""
        skipping = [
            gap for gap in _apart(self._values, NEXT) if bisect_right(stops, gap[2]) - bisect_right(stops, gap[1]) > 1
        ]
        rules = self._problem.rules
        allowed, demanded = rules.allowed & False, rules.demanded & False
        allowed[[0, *stops]] = True
        demanded[list(stops[:-1])] = True
        return replace(
            _charged_without(self._problem, skipping), rules=replace(rules, allowed=allowed, demanded=demanded)
        )


def _over(plan: Plan) -> list[bool]:
    """For each stage whether it needs more memory than its device has."""
    return [stage.memory.total > stage.device.memory_bytes for stage in plan.stages]


def _charged_without(problem: Problem, gaps: Iterable[Gap]) -> Problem:
    """The problem with no boundary charged with a value in such a gap."""
    return replace(problem, costs=CostModel(_without(problem.costs.profile, gaps)))


def _without(profile: Profile, gaps: Iterable[Gap]) -> Profile:
    saved: dict[tuple[int, int], tuple[int, int]] = {}  # by layer and size
    for value, before, after in gaps:
        for layer in range(before, after):
            for size, size_bytes in value.size_bytes:
                outputs, gradients = saved.get((layer, size), (0, 0))
                saved[layer, size] = outputs + size_bytes, gradients + size_bytes * value.has_gradient

    def charged(cost: LayerCost) -> LayerCost:
        outputs, gradients = saved.get((cost.layer, cost.micro_batch_size), (0, 0))
        if not outputs:
            return cost
        less = {
            "output_bytes": cost.output_bytes - outputs,
            "output_gradient_bytes": cost.output_gradient_bytes - gradients,
        }
        return cost.model_copy(update=less)

    return profile.model_copy(update={"costs": tuple(map(charged, profile.costs))})
