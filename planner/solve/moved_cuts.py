"""Plans with the cuts moved, by the simulator's seconds, which knows each boundary's own link, whether they fit or not.

with_moved_cuts     moved by a place or two, as long as steps get shorter
with_far_cuts       the same, also from cuts of which one that lies between hosts is where few bytes cross
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product, takewhile

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.cost.time_ledger import layer_seconds
from planner.plan.stage import Segment
from planner.rules import FREE
from planner.solve.balance import Balance, evaluate_s, placement_of
from planner.solve.deadline import Deadline
from planner.solve.problem import Problem

MOST_WAYS = 400
"""Ways to lay the cuts of a plan that are all tried [chosen]."""
MOST_MOVES, REACH = 8, 2
"""How often the cuts of a plan are moved, and by how many places at a time [chosen]."""
MOST_NARROW = 4
"""Places where fewest bytes cross at which each boundary between hosts is laid [chosen]."""


def with_moved_cuts(problem: Problem, found: Balance, deadline: Deadline) -> Balance:
    """The balance with the cuts that are the fastest where each boundary takes its own link, whatever fits.

    All cuts where there are few, else those that moves of one or of two neighbouring ones lead to; when time is up, the
    best of those that were tried.
    """
    rules = problem.rules
    stops = tuple(stage.stop for stage in found.stages)
    if len(stops) == 1 or (rules.pinned != FREE).any() or found.orders:
        return found
    places = [int(place) for place in np.flatnonzero(rules.allowed)[1:-1]]
    needed = {int(place) for place in np.flatnonzero(rules.demanded)}

    best, cuts = _with_cuts(problem, found, stops[:-1]), stops[:-1]
    few = math.comb(len(places), len(cuts)) <= MOST_WAYS
    for _ in range(1 if few else MOST_MOVES):
        ways = combinations(places, len(cuts)) if few else _moves(cuts, places)
        tried = [
            (_with_cuts(problem, found, way), way)
            for way in takewhile(lambda _: not deadline.over, ways)
            if needed <= {0, *way, stops[-1]}
        ]
        better, where = min(tried, key=lambda one: one[0].step_s, default=(best, cuts))
        if better.step_s >= best.step_s:
            break
        best, cuts = better, tuple(where)
    return best


def with_far_cuts(problem: Problem, found: Balance, deadline: Deadline) -> Balance:
    """The balance with moved cuts, the fastest of those that are moved from its own and from other ones.

    In each of these one boundary between hosts is laid where few bytes cross, and the stages on either side are even: a
    narrow place is mostly further off than cuts are moved.
    """
    best = with_moved_cuts(problem, found, deadline)
    if found.orders or (problem.rules.pinned != FREE).any():
        return best
    for cuts in _narrow_cuts(problem, found):
        if deadline.over:
            break
        moved = with_moved_cuts(problem, _with_cuts(problem, found, cuts), deadline)
        best = min(best, moved, key=lambda one: one.step_s)
    return best


def _narrow_cuts(problem: Problem, found: Balance) -> Iterator[tuple[int, ...]]:
    """Cuts with one boundary between hosts at a place where fewer bytes cross than there do now."""
    ring, size = found.candidate.ring.over(len(found.stages)), found.candidate.split.largest
    placement = placement_of(problem, found.candidate, found.stages)
    layers, seconds = problem.at_boundaries(size), layer_seconds(problem.costs, problem.devices[0].kind, size)
    crossing = layers.output_bytes + layers.output_gradient_bytes
    work = np.concatenate(([0.0], np.cumsum(seconds.forward_s + seconds.backward_s)))
    places = np.flatnonzero(problem.rules.allowed)[1:-1]
    needed = {*np.flatnonzero(problem.rules.demanded)} - {0, problem.layers}
    narrow = places[np.argsort(crossing[places - 1], kind="stable")][:MOST_NARROW]
    for last, stage in enumerate(found.stages[:-1]):
        if not placement.is_far(ring.rank_of(last), ring.rank_of(last + 1)):
            continue
        for place in narrow[crossing[narrow - 1] < crossing[stage.stop - 1]]:
            before, after = places[places < place], places[places > place]
            more = ring.stages - 2 - last
            if len(before) < last or len(after) < more:
                continue
            left, right = _even(work, before, 0, place, last), _even(work, after, place, problem.layers, more)
            if needed <= {*left, place, *right}:
                yield (*left, int(place), *right)


def _even(work: Floats, places: Indices, first: int, stop: int, count: int) -> list[int]:
    """So many of these places, between layers that have about as much work."""
    wanted = work[first] + (work[stop] - work[first]) * np.arange(1, count + 1) / (count + 1)
    at = np.searchsorted(work[places], wanted)
    ranks = np.arange(count)
    at = np.minimum(np.maximum.accumulate(at - ranks) + ranks, len(places) - count + ranks)
    return [int(place) for place in places[at]]


def _moves(cuts: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """One or two neighbouring cuts at one of the next places on either side."""
    at = [bisect_left(places, cut) for cut in cuts]
    steps = range(-REACH, REACH + 1)
    for first in range(len(at)):
        for one, other in product(steps, steps if first + 1 < len(at) else (0,)):
            moved = [*at]
            moved[first] += one
            if first + 1 < len(at):
                moved[first + 1] += other
            inside = moved[0] >= 0 and moved[-1] < len(places)
            if inside and all(before < after for before, after in pairwise(moved)):
                yield tuple(places[place] for place in moved)


def _with_cuts(problem: Problem, found: Balance, cuts: Sequence[int]) -> Balance:
    """The balance with these cuts, and what its step takes."""
    whole = problem.settings.recompute == "always"
    stages = tuple(
        replace(stage, first=first, stop=stop, segments=(Segment(first=first, stop=stop),) if whole else ())
        for stage, (first, stop) in zip(found.stages, pairwise((0, *cuts, problem.layers)), strict=True)
    )
    return replace(found, stages=stages, step_s=evaluate_s(problem, found.candidate, stages))
