"""Whether values that stages between do not read are relayed by these, or go past them.

The balancer charges every boundary with all that crosses it: that is what relaying costs. What skipping saves depends
on the cuts on both sides, which its search does not know. So with skips some problems are solved that differ in what
boundaries are charged with, and of all their plans, with skips and without, the fastest that fits is taken:

- with what must cross them in any case, from the layer before to the layer behind: no plan with skips is faster than
  this problem's bound, and none needs less memory;
- with all but the values that no layer uses for as long as an even stage is;
- with everything, as if it were relayed;
- with all but what skips stages in a plan found before, for a few rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from planner.balancer import Balance
from planner.costs import CostModel
from planner.drafting import make_plan
from planner.infeasible import nothing_fits_text
from planner.many_devices import balance_any, with_fewer_classes
from planner.plan import Plan
from planner.problem import Problem
from planner.skips import routes_of
from profiler.errors import ProfileError
from profiler.record import LayerCost, Profile, SkipValue

NEXT = 2
"""Least distance, in layers, of two users of a value that have another layer between them."""
ROUNDS = 4
"""Problems solved one after the other, each charged as the plan of the one before skips stages [chosen]."""


def best_plan(problem: Problem) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    values = _values(problem)
    if not values:
        relayed = balance_any(problem)
        return None if relayed is None else make_plan(problem, relayed)
    bound = balance_any(_charged_without(problem, _apart(values, NEXT)))
    if bound is None:
        return None
    even = max(NEXT, -(-problem.layers // problem.settings.max_stages))
    best: Plan | None = None
    seen = set()
    for first in (balance_any(problem), balance_any(_charged_without(problem, _apart(values, even))), bound):
        found = first
        for _ in range(ROUNDS):
            if found is None or (found.candidate, found.stages) in seen:
                break
            seen.add((found.candidate, found.stages))
            for plan in _drafts(problem, values, replace(found, lower_bound_s=min(found.step_s, bound.lower_bound_s))):
                if best is None or plan.prediction.step_s < best.prediction.step_s:
                    best = plan
            found = balance_any(_charged_without(problem, _skipping(values, found)))
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


def _skipping(values: Iterable[SkipValue], found: Balance) -> list[Gap]:
    """Gaps that a stage lies in."""
    stops = [stage.stop for stage in found.stages]
    return [gap for gap in _apart(values, NEXT) if bisect_right(stops, gap[2]) - bisect_right(stops, gap[1]) > 1]


def _drafts(problem: Problem, values: Sequence[SkipValue], found: Balance) -> Iterator[Plan]:
    """The plans of a balance with skips and without, if they fit."""
    for routes in (routes_of(values, [stage.stop for stage in found.stages]), ()):
        plan = make_plan(problem, found, routes)
        if all(stage.memory.total <= stage.device.memory_bytes for stage in plan.stages):
            yield plan


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
