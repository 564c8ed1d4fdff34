"""Whether values that stages between do not read are relayed by these, or go past them.

The balancer charges every boundary with all that crosses it: that is what relaying costs. What skipping saves depends
on the cuts on both sides, which its search does not know. So with skips three problems are solved that differ in what
boundaries are charged with:

- with what must cross them in any case, from the layer before to the layer after, and as few messages under way as may
  be: no plan with skips is faster than this problem's bound, and none needs less memory;
- with all but the values that no layer uses for as long as an even stage is;
- with everything, as if it were relayed.

From the plan of each, one cut after the other is moved to where the simulator finds the step shortest, until none is
worth moving; the fastest plan that fits is taken, with skips or without.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from planner.cost.layer_costs import CostModel
from planner.cost.skips import Route, routes_of
from planner.plan.plan import Plan
from planner.plan.stage import Segment
from planner.rules import FREE
from planner.search_watch import besides, others_follow
from planner.solve.all_schedules import balance_of_all, families, is_plain, with_chunks
from planner.solve.balance import Balance, StageChoice, Unsettled
from planner.solve.build_plan import make_plan, rank_memories, stages_of
from planner.solve.deadline import Deadline, with_share
from planner.solve.infeasible import MOST_CURES_S, lean_cures_text, no_chunks_fit_text, nothing_fits_text
from planner.solve.many_devices import balance_any, with_fewer_classes
from planner.solve.problem import Candidate, Problem
from planner.solve.work_bound import least_s
from profiler.errors import ProfileError
from profiler.record import LayerCost, Profile
from profiler.skip_value import SkipValue

NEXT = 2
"""Least distance, in layers, of two users of a value that have another layer between them."""
REACH = 12
"""Positions on either side of a cut that it is tried at [chosen]."""
MOST_WORK, EACH_PLAN = 80_000, 100
"""What may be tried around plans that searches found; a plan counts as K M of its own and `EACH_PLAN` for all else
[measured: 2 to 5 s]."""
CLOSE_ENOUGH = 1e-3
"""Relative distance from the lower bound at which none is tried [chosen]."""


def best_plan(problem: Problem, unsettled: Unsettled | None = None) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Args:
        problem: that it solves.
        unsettled: notes what is left where there is no plan.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    values = values_of(problem)
    if not values:
        relayed = balance_of_all(problem, unsettled)
        return None if relayed is None else make_plan(problem, relayed)
    if unsettled is not None:
        unsettled.note(least_s(problem))
    deadline = Deadline(problem.settings.time_limit_s)
    problem = _with_share_of_time(problem)
    least = replace(_charged_without(problem, _apart(values, NEXT)), short_messages=False)
    bound = balance_any(least)
    lower_bound_s = least_s(least) if bound is None else bound.lower_bound_s
    even = max(NEXT, -(-problem.layers // problem.settings.max_stages))
    with besides(lower_bound_s), others_follow():
        found = (balance_any(problem), balance_any(_charged_without(problem, _apart(values, even))), bound)
    starts = list({(one.candidate, one.stages): one for one in found if one is not None}.values())
    improver = CutImprover(problem, values, lower_bound_s, deadline)
    plans = [improver.nearest(start) for start in starts]
    for place in sorted(range(len(starts)), key=lambda place: _step_s(plans[place])):
        best_s = _step_s(min(plans, key=_step_s))
        if best_s > lower_bound_s * (1 + CLOSE_ENOUGH):
            plans.append(improver.better(starts[place], dispensable=best_s < np.inf))
    return min(plans, key=_step_s, default=None)


def no_plan_text(problem: Problem) -> str:
    """Why there is none. Cures are those of relaying, which is tried in any case."""
    every = [family[0] for family in families(problem)]
    able = [one for one in every if next(one.candidates(), None) is not None]
    problem = min(able or every, key=lambda one: not is_plain(one.settings))
    if not is_plain(problem.settings):
        chunks, stages = problem.settings.chunks, problem.settings.stages
        changed = ["chunks=1"] * (chunks > 1) + ["stages=None"] * (chunks > 1 and stages is not None)
        free = replace(problem.settings, stages=None if chunks > 1 else stages)
        alone = replace(problem, settings=with_chunks(free, 1, problem.layers) or free)
        besides = f" with {' and '.join(changed)}" if changed else ""
        return f"{no_chunks_fit_text(problem)}. {lean_cures_text(with_fewer_classes(alone), besides)}"
    text = nothing_fits_text(with_fewer_classes(problem))
    if values_of(problem):
        return "no plan was found that fits with values that skip stages; with all of them relayed, " + text
    given_s = problem.settings.time_limit_s
    limit_s = MOST_CURES_S / 2 if given_s is None else min(MOST_CURES_S / 2, given_s)
    settings = replace(problem.settings, skips="direct", time_limit_s=limit_s)
    direct = replace(problem, settings=settings, dispensable=True)
    if problem.costs.profile.skips and values_of(direct) and best_plan(direct) is not None:
        return f'{text}. Or set skips="direct": values then go past stages that do not read them, and it fits'
    return text


def values_of(problem: Problem) -> tuple[SkipValue, ...]:
    """Those that may skip stages."""
    settings = problem.settings
    if settings.skips == "relayed" or min(settings.max_stages, settings.stages or settings.max_stages) < 3:
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


class CutImprover:
    """Plans with skips around those that the balancer found.

    Args:
        problem: the problem.
        values: that may skip stages.
        lower_bound_s: no plan is faster.
        deadline: when none is tried any more.
    """

    def __init__(self, problem: Problem, values: Sequence[SkipValue], lower_bound_s: float, deadline: Deadline) -> None:
        self._problem = problem
        self._values = values
        self._lower_bound_s = lower_bound_s
        self._deadline = deadline
        self._work = 0
        self._tried: dict[tuple[Candidate, tuple[StageChoice, ...]], Plan | None] = {}

    def nearest(self, found: Balance) -> Plan | None:
        """The better of the plan itself with skips and without; None where neither fits."""
        plans = [self._plan(found, routes) for routes in dict.fromkeys((self._routes(found), ()))]
        return min((plan for plan in plans if plan is not None), key=_step_s, default=None)

    def better(self, found: Balance, *, dispensable: bool) -> Plan | None:
        """The plan with its cuts moved; None where none fits, or a rule says which device runs what.

        Args:
            found: the plan.
            dispensable: whether some plan is there that fits, so that nothing is waited for when time is up.
        """
        if (self._problem.rules.pinned != FREE).any():
            return None
        stops = self._climbed(found)
        plans = [self._tried.get((found.candidate, _with_stops(found, stops).stages))]
        if self._problem.settings.recompute == "auto":
            at_stops = self._cut_at(stops)
            one_link = families(replace(with_share(at_stops, self._deadline), hosts=None, dispensable=dispensable))
            plain = next((family[0] for family in one_link if is_plain(family[0].settings)), None)
            with besides(self._lower_bound_s), others_follow():
                exact = None if plain is None else balance_any(plain)
            plans.append(None if exact is None else self._direct(exact))
        return min(plans, key=_step_s)

    def _climbed(self, found: Balance) -> tuple[int, ...]:
        """Where the cuts end up."""
        rules = self._problem.rules
        stops = tuple(stage.stop for stage in found.stages)
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
                best = min(choices, key=lambda choice: _step_s(self._moved(found, choice)), default=stops)
                if _step_s(self._moved(found, best)) < _step_s(self._moved(found, stops)):
                    stops, moved = best, True
        return stops

    def _moved(self, found: Balance, stops: tuple[int, ...]) -> Plan | None:
        """The plan with other cuts; None where it does not fit, or enough was tried."""
        balance = _with_stops(found, stops)
        key = balance.candidate, balance.stages
        if key not in self._tried:
            if self._work >= MOST_WORK or self._deadline.over:
                return None
            self._work += len(stops) * found.candidate.split.count + EACH_PLAN
            self._tried[key] = self._fitted(balance)
        return self._tried[key]

    def _fitted(self, balance: Balance) -> Plan | None:
        """The plan with nothing recomputed but, as a whole, stages that have to be, or that the settings say."""
        mode = self._problem.settings.recompute
        whole = [(Segment(first=stage.first, stop=stage.stop),) for stage in balance.stages]
        segments = [one if mode == "always" else () for one in whole]
        for _ in range(2 if mode == "auto" else 1):
            stages = tuple(
                replace(stage, segments=chosen) for stage, chosen in zip(balance.stages, segments, strict=True)
            )
            plan = self._direct(replace(balance, stages=stages))
            if plan is not None:
                return plan
            over = self._over(replace(balance, stages=stages), self._routes(balance))
            segments = [one if full else () for one, full in zip(whole, over, strict=True)]
        return None

    def _direct(self, found: Balance) -> Plan | None:
        """The plan with skips if it fits."""
        return self._plan(found, self._routes(found))

    def _routes(self, found: Balance) -> tuple[Route, ...]:
        return routes_of(self._values, [stage.stop for stage in found.stages])

    def _plan(self, found: Balance, routes: Sequence[Route]) -> Plan | None:
        """The plan with these routes if it fits."""
        if any(self._over(found, routes)):
            return None
        return make_plan(self._problem, replace(found, lower_bound_s=self._lower_bound_s), routes)

    def _over(self, found: Balance, routes: Sequence[Route]) -> list[bool]:
        """For each stage whether its rank, with all of its chunks, needs more memory than the device has."""
        stages, ring = stages_of(self._problem, found, routes), found.candidate.ring.over(len(found.stages))
        needed = rank_memories(self._problem, found, routes) or [stage.memory for stage in stages]
        full = [memory.total > stages[rank].device.memory_bytes for rank, memory in enumerate(needed)]
        return [full[ring.rank_of(index)] for index in range(len(stages))]

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


def _step_s(plan: Plan | None) -> float:
    """Seconds of its step; infinite where there is none."""
    return np.inf if plan is None else plan.prediction.step_s


def _with_stops(found: Balance, stops: tuple[int, ...]) -> Balance:
    """A balance with other cuts, nothing recomputed."""
    stages = zip(found.stages, pairwise((0, *stops)), strict=True)
    return replace(
        found, stages=tuple(replace(one, first=first, stop=stop, segments=()) for one, (first, stop) in stages)
    )


def _charged_without(problem: Problem, gaps: Iterable[Gap]) -> Problem:
    """The problem with no boundary charged with a value in such a gap."""
    return replace(problem, costs=CostModel(_without(problem.costs.profile, gaps)))


def _without(profile: Profile, gaps: Iterable[Gap]) -> Profile:
    sizes = {cost.micro_batch_size for cost in profile.costs}
    saved: dict[tuple[int, int], tuple[int, int]] = {}  # by layer and size
    for value, before, after in gaps:
        for layer in range(before, after):
            for size in sizes:
                size_bytes = value.bytes_at(size)
                outputs, gradients = saved.get((layer, size), (0, 0))
                saved[layer, size] = outputs + size_bytes, gradients + size_bytes * value.has_gradient

    def charged(cost: LayerCost) -> LayerCost:
        outputs, gradients = saved.get((cost.layer, cost.micro_batch_size), (0, 0))
        if not outputs:
            return cost
        less = {
            "output_bytes": max(0, cost.output_bytes - outputs),
            "output_gradient_bytes": max(0, cost.output_gradient_bytes - gradients),
        }
        return cost.model_copy(update=less)

    return profile.model_copy(update={"costs": tuple(map(charged, profile.costs))})
