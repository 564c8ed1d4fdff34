"""Plans for devices on several hosts: which boundaries leave a host follows from K and R, which the search chooses.

The balancer charges every boundary with one link. So three problems are solved that differ in what it charges, and in
which K and R they have:

- near: the plan is on the first host. All links are the one inside it, and the answer is exact;
- far: every boundary is charged with the faster link and, where no plan on several hosts has all replicas of a stage on
  one of them, all-reduce with the one between: no plan on several hosts is faster than this problem's bound;
- far with every boundary charged with the link between: its cuts lie where few bytes cross.

From the plans of both far ones each cut in turn is moved to where the simulator, which knows each boundary's own link,
finds the step shortest. The same is done for each K and R of a few more, since how many boundaries leave a host depends
on these. Where devices are left over, which stage is the last one on a host also depends on how many of them are those
at the front, and the same plans are tried on later ones. The fastest plan that fits is taken; its bound is the smaller
one of near and far.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product, takewhile

import numpy as np

from planner.cost.hosts import Hosts
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.plan.stage import Segment
from planner.rules import FREE
from planner.search_watch import besides, others_follow
from planner.solve import skip_search
from planner.solve.all_schedules import balance_of_all
from planner.solve.balance import Balance, evaluate_s
from planner.solve.deadline import Deadline
from planner.solve.order_start import with_own_orders
from planner.solve.problem import Problem
from planner.solve.work_bound import least_s
from profiler.device import Link

MOST_SHAPES = 10
"""Pairs of K and R that are planned for on their own [chosen]."""
PATIENCE = 0.25
"""Share of the usual patience with a search for one pair [chosen]."""
MOST_WAYS = 400
"""Ways to lay the cuts of a plan that are all tried [chosen]."""
MOST_MOVES, REACH = 8, 2
"""How often the cuts of a plan are moved, and by how many places at a time [chosen]."""
PARTS = 4
"""Shares of the time limit: near, far, far with slow boundaries, and all pairs together."""


def best_plan(problem: Problem) -> Plan | None:
    """The fastest plan that was found; None when none fits the devices' memory.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    if problem.hosts is None:
        return skip_search.best_plan(problem)
    hosts, deadline = problem.hosts, Deadline(problem.settings.time_limit_s)
    limit_s = problem.settings.time_limit_s
    given = problem if limit_s is None else _with_time(problem, limit_s / PARTS)
    near = _near(given, hosts)
    far = replace(given, link=_fastest(hosts), ring=_ring(given, hosts), hosts=None)
    lower_bound_s: float = np.inf
    starts: list[Balance] = []
    reached_s: float = np.inf
    both = [one for one in (far, near) if one is not None]
    for place, one in enumerate(both):
        if least_s(one) > reached_s:
            lower_bound_s = min(lower_bound_s, least_s(one))
            continue
        with besides(lower_bound_s if place == len(both) - 1 else 0.0), others_follow():
            found = _balanced(replace(one, dispensable=problem.dispensable or bool(starts)))
        if found is not None:
            reached_s = evaluate_s(problem, found.candidate, found.stages, found.orders)
        if found is not None:
            starts.append(found)
        lower_bound_s = min(lower_bound_s, least_s(one) if found is None else found.lower_bound_s)
    with besides(lower_bound_s), others_follow():
        return _with_own_links(problem, far, starts, lower_bound_s, deadline)


def _with_own_links(
    problem: Problem, far: Problem, starts: list[Balance], lower_bound_s: float, deadline: Deadline
) -> Plan | None:
    """The fastest plan near those of near and far, and of those where all boundaries are slow."""
    hosts = problem.hosts
    assert hosts is not None
    fast, slow = _fastest(hosts), _slowest(hosts)
    improver = skip_search.CutImprover(problem, skip_search.values_of(problem), lower_bound_s, deadline)
    slowed = replace(far, link=slow, ring=hosts.between, dispensable=problem.dispensable or bool(starts))
    starts += [found for found in (_balanced(slowed),) if found is not None]
    plans: dict[Balance, Plan | None] = {}
    best: Plan | None = None

    def look_near(starts: Sequence[Balance]) -> None:
        """First with cuts for their own links; when time is up, at what may be the best: to make one takes seconds."""
        nonlocal best
        moved = [with_moved_cuts(problem, one, deadline) for one in starts]
        for start in (*moved, *_with_made_orders(problem, moved, deadline), *starts):
            if start not in plans and not (deadline.over and start.step_s >= _step_s(best)):
                plans[start] = improver.nearest(start)
                best = min(best, plans[start], key=_step_s)

    look_near(starts)
    for shape in _shapes(slowed, starts):
        for link in (fast, slow):
            if deadline.over or _step_s(best) <= lower_bound_s:
                break
            found = _balanced(_within(replace(shape, link=link), deadline))
            look_near(() if found is None else (found,))
    for start in sorted(plans, key=lambda start: _step_s(plans[start]))[:MOST_SHAPES]:
        if best is not None and (deadline.over or _step_s(best) <= lower_bound_s * (1 + skip_search.CLOSE_ENOUGH)):
            break
        best = min(best, improver.better(start, dispensable=best is not None), key=_step_s)
    for later in _on_later_devices(problem):
        improver = skip_search.CutImprover(later, skip_search.values_of(later), lower_bound_s, deadline)
        moved = [with_moved_cuts(later, start, deadline) for start in plans if _has_devices(later, start)]
        for start in (*moved, *_with_made_orders(later, moved, deadline)):
            if deadline.over or _step_s(best) <= lower_bound_s:
                return best
            if evaluate_s(later, start.candidate, start.stages, start.orders) < _step_s(best):
                best = min(best, improver.nearest(start), key=_step_s)
    return best


def _with_made_orders(problem: Problem, plans: Sequence[Balance], deadline: Deadline) -> Iterator[Balance]:
    """The plans of one stage a rank with orders that are made for their own links, of each schedule that makes them."""
    made = [name for name in problem.settings.schedules if SCHEDULES[name].made_for_plan]
    for plan, name in product(plans, made):
        if not deadline.over and plan.candidate.ring.chunks == 1 and len(plan.stages) > 1:
            moved = with_moved_cuts(problem, replace(plan, orders=()), deadline) if plan.orders else plan
            found = with_own_orders(problem, moved, name, deadline)
            if found is not None:
                yield found


def _on_later_devices(problem: Problem) -> Iterator[Problem]:
    """The problem without the first device, without the first two, and so on to the last one of the first host."""
    assert problem.hosts is not None
    if (problem.rules.pinned != FREE).any():
        return
    for first in range(1, min(problem.hosts.devices_per_host, len(problem.devices))):
        left = tuple(
            replace(one, members=tuple(member for member in one.members if member >= first)) for one in problem.classes
        )
        yield replace(problem, classes=left)


def _has_devices(problem: Problem, found: Balance) -> bool:
    """Whether there are enough of each class for all stages and replicas."""
    used = Counter(stage.device_class for stage in found.stages)
    return all(used[place] <= one.capacity(found.candidate.replicas) for place, one in enumerate(problem.classes))


def with_moved_cuts(problem: Problem, found: Balance, deadline: Deadline) -> Balance:
    """The balance with the cuts that are the fastest where each boundary takes its own link, whatever fits.

    All cuts where there are few, else those that moves of one or of two neighbouring ones lead to; when time is up, the
    best of those that were tried.
    """
    rules, whole = problem.rules, problem.settings.recompute == "always"
    stops = tuple(stage.stop for stage in found.stages)
    if len(stops) == 1 or (rules.pinned != FREE).any() or found.orders:
        return found
    places = [int(place) for place in np.flatnonzero(rules.allowed)[1:-1]]
    needed = {int(place) for place in np.flatnonzero(rules.demanded)}

    def moved(cuts: Sequence[int]) -> Balance:
        edges = pairwise((0, *cuts, stops[-1]))
        stages = tuple(
            replace(stage, first=first, stop=stop, segments=(Segment(first=first, stop=stop),) if whole else ())
            for stage, (first, stop) in zip(found.stages, edges, strict=True)
        )
        return replace(found, stages=stages, step_s=evaluate_s(problem, found.candidate, stages))

    best, cuts = moved(stops[:-1]), stops[:-1]
    few = math.comb(len(places), len(cuts)) <= MOST_WAYS
    for _ in range(1 if few else MOST_MOVES):
        ways = combinations(places, len(cuts)) if few else _moves(cuts, places)
        tried = [
            (moved(way), way) for way in takewhile(lambda _: not deadline.over, ways) if needed <= {0, *way, stops[-1]}
        ]
        better, where = min(tried, key=lambda one: one[0].step_s, default=(best, cuts))
        if better.step_s >= best.step_s:
            break
        best, cuts = better, tuple(where)
    return best


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


def _balanced(problem: Problem) -> Balance | None:
    return balance_of_all(problem) if next(problem.candidates(), None) is not None else None


def _with_time(problem: Problem, limit_s: float) -> Problem:
    return replace(problem, settings=replace(problem.settings, time_limit_s=max(limit_s, 1e-3)))


def _within(problem: Problem, deadline: Deadline) -> Problem:
    """The problem with no more time than is left."""
    limit_s = problem.settings.time_limit_s
    return problem if limit_s is None else _with_time(problem, min(limit_s, deadline.left_s))


def _fastest(hosts: Hosts) -> Link:
    """A link over which no message is longer under way than over either, and that nobody copies for."""
    return _of_both([_under_way(link) for link in (hosts.link, hosts.between)], min, max)


def _under_way(link: Link) -> Link:
    """What is left of messages without copies at both ends."""
    return link.slowed(1 - sum(link.copied)).model_copy(update={"sender_share": 0.0, "receiver_share": 0.0})


def _slowest(hosts: Hosts) -> Link:
    """A link that is about as slow as the slower one for each message."""
    return _of_both([hosts.link, hosts.between], max, min)


def _of_both(both: Sequence[Link], time: Callable[..., float], rate: Callable[..., float]) -> Link:
    """Where both links' seconds are lines between two sizes, so are theirs; the smaller ones bend down between them."""
    known = {size for link in both for size, _ in link.measured}
    sizes = sorted({1, *known}) if known else []
    return Link(
        latency_s=time(one.latency_s for one in both),
        bytes_per_s=rate(one.bytes_per_s for one in both),
        error=max(one.error for one in both),
        measured=tuple((size, time(one.transfer_s(size) for one in both)) for size in sizes),
    )


def _near(problem: Problem, hosts: Hosts) -> Problem | None:
    """The problem on the first host, which the first devices of each class are on; None where R does not fit there."""
    if (problem.settings.replicas or 1) > hosts.devices_per_host:
        return None
    first = [
        replace(one, members=tuple(member for member in one.members if member < hosts.devices_per_host))
        for one in problem.classes
    ]
    return replace(problem, link=hosts.link, hosts=None, classes=tuple(first))


def _ring(problem: Problem, hosts: Hosts) -> Link:
    """What all-reduce takes at least where a plan is on several hosts."""
    replicas, per_host = problem.settings.replicas, hosts.devices_per_host
    if replicas is None or len(problem.classes) > 1:
        return _fastest(hosts)
    least_stages = per_host // replicas + 1
    always = (replicas - 1) * least_stages >= per_host
    return hosts.between if always else _fastest(hosts)


def _shapes(problem: Problem, starts: list[Balance]) -> Iterator[Problem]:
    """The problem for single K and R: those around what was found first, then powers of two on all devices."""
    settings, devices = problem.settings, len(problem.devices)
    seen: set[tuple[int, int]] = set()
    known = [(len(one.stages), one.candidate.replicas) for one in starts]
    powers = [2**power for power in range(math.ceil(math.log2(devices)) + 1)]
    even = [(devices // replicas, replicas) for replicas in powers if devices % replicas == 0]
    near = [(stages + more, replicas) for more in (0, -1, 1) for stages, replicas in known]
    for stages, replicas in (*even, *near):
        shape = stages, replicas
        fixed = settings.stages in (None, stages) and settings.replicas in (None, replicas)
        if shape in seen or not fixed or stages < 1 or stages > settings.max_stages or settings.chunks > 1:
            continue
        seen.add(shape)
        if len(seen) > MOST_SHAPES:
            return
        yield replace(problem, settings=replace(settings, stages=stages, replicas=replicas), patience=PATIENCE)


def _step_s(plan: Plan | None) -> float:
    return np.inf if plan is None else plan.prediction.step_s
