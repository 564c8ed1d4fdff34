"""Plans for devices on several hosts: which boundaries leave a host follows from K and R, which the search chooses.

The balancer charges every boundary with one link. So three problems are solved that differ in what it charges, and in
which K and R they have:

- near: the plan is on the first host. All links are the one inside it, and the answer is exact;
- far: every boundary is charged with the faster link and, where no plan on several hosts has all replicas of a stage on
  one of them, all-reduce with the one between: no plan on several hosts is faster than this problem's bound;
- far with every boundary charged with the link between: its cuts lie where few bytes cross.

Near is solved for each later host, too, whose devices no host before it has all of.

`planner.solve.own_links` looks for faster plans near all of these, with the simulator, which knows each boundary's own
link. The same is done for each K and R of a few more, since how many boundaries leave a host depends on these. The
fastest plan that fits is taken; its bound is the smaller one of near and far.

All of it is done for both orders of devices (`planner.cost.hosts`): where the replicas of a rank are after each other,
it also begins near the plans that were looked at in the other order, and only faster plans count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from planner.cost.hosts import Hosts, faster_of, slower_of
from planner.plan.plan import Plan
from planner.rules import FREE
from planner.search_watch import besides, others_follow
from planner.settings import CHUNKS_TRIED, FEW_RANKS
from planner.solve import skip_search
from planner.solve.all_schedules import balance_of_all, with_chunks
from planner.solve.balance import Balance, Unsettled, evaluate_s
from planner.solve.deadline import Deadline, with_share
from planner.solve.own_links import OwnLinks, from_device, step_s
from planner.solve.problem import Problem
from planner.solve.work_bound import even_share_s, least_s
from profiler.device import Link

MOST_SHAPES = 10
"""Pairs of K and R that are planned for on their own, of more devices [chosen]."""
FEW_DEVICES = 8
"""Of which all pairs are planned for [chosen]."""
MOST_COUNTS = 16
"""M that are planned for on their own [chosen]."""
PATIENCE = 0.25
"""Share of the usual patience with a search for one pair [chosen]."""
SHARE_OF_ADJACENT = 0.2
"""Of the time limit, at least, for plans whose replicas of a rank are after each other [chosen]."""
MOST_KNOWN = 10
"""Plans in the other order near which is looked then [chosen]."""
PARTS = 4
"""Shares of the time limit: near, far, far with slow boundaries, and all pairs together; each has at least its share of
what those before it left."""


def best_plan(problem: Problem, unsettled: Unsettled | None = None) -> Plan | None:
    """The fastest plan that was found in either order; None when none fits the devices' memory.

    Args:
        problem: that it solves.
        unsettled: notes what is left where there is no plan.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer, or does not say which values could skip stages.
    """
    if problem.hosts is None:
        return skip_search.best_plan(problem, unsettled)
    if unsettled is not None:
        unsettled.note(least_s(problem))
    limit_s, several = problem.settings.time_limit_s, max(problem.replicas()) > 1
    deadline = Deadline(limit_s)
    first = problem if limit_s is None or not several else _with_time(problem, limit_s * (1 - SHARE_OF_ADJACENT))
    best, lower_bound_s, known = _in_order(first)
    if several:
        others = replace(_within(problem, deadline), hosts=replace(problem.hosts, adjacent=True), least_replicas=2)
        with besides(lower_bound_s):
            best, other_bound_s, _ = _in_order(others, best, [one for one in known if one.candidate.replicas > 1])
        lower_bound_s = min(lower_bound_s, other_bound_s)
    return None if best is None else with_bound(best, lower_bound_s)


def best_in_order(problem: Problem) -> Plan | None:
    """The fastest plan that was found with devices in the problem's own order; None when none fits."""
    return skip_search.best_plan(problem) if problem.hosts is None else _in_order(problem)[0]


def with_bound(plan: Plan, lower_bound_s: float) -> Plan:
    """The plan, of which it is known that none is below so many seconds."""
    step = plan.prediction.step_s
    lower_bound_s = min(lower_bound_s, step)
    found = plan.prediction.model_copy(update={"lower_bound_s": lower_bound_s, "gap": step / lower_bound_s - 1})
    return plan.model_copy(update={"prediction": found})


def _in_order(
    problem: Problem, best: Plan | None = None, known: Sequence[Balance] = ()
) -> tuple[Plan | None, float, Sequence[Balance]]:
    """The fastest plan with devices in one order, or the best one so far.

    Args:
        problem: says the order.
        best: plan so far.
        known: plans in another order, near which is looked, too.

    Returns:
        The plan, what none in this order is below, and all that were looked near.
    """
    assert problem.hosts is not None
    hosts, deadline = problem.hosts, Deadline(problem.settings.time_limit_s)
    given = with_share(problem, deadline, PARTS)
    near = None if hosts.adjacent else _near(given, hosts, 0)  # on one host the order says nothing
    far = replace(given, link=_fastest(hosts), ring=_ring(given, hosts), hosts=None)
    both = [one for one in (far, near) if one is not None]
    starts, lower_bound_s = _over_one_link(problem, both, best, deadline)
    if step_s(best) <= lower_bound_s:
        return best, lower_bound_s, ()
    plans = OwnLinks(problem, lower_bound_s, deadline, best)
    with besides(lower_bound_s), others_follow():
        may_end = problem.dispensable or best is not None or bool(starts) or deadline.over
        slow = replace(far, link=slower_of(hosts.link, hosts.between), ring=hosts.between, dispensable=may_end)
        slow = with_share(slow, deadline, PARTS - len(both))
        starts += [found for found in (_balanced(slow),) if found is not None]
        plans.look_near([*starts, *_fastest_of(problem, known)])
        for later, alone in () if hosts.adjacent else _on_later_hosts(given, hosts):
            if not plans.done and least_s(alone) < step_s(plans.best):
                found = _balanced(_within(replace(alone, dispensable=plans.best is not None), deadline))
                plans.look_near_on(later, () if found is None else (found,))
        shapes = [*_shapes(slow, starts), *_counts(slow)]
        for number, shape in enumerate(shapes):
            if plans.done:
                break
            parts = min(PARTS, 1 + len(shapes) - number)
            _look_near_shape(plans, with_share(shape, deadline, parts), far, deadline)
        plans.improve()
    return plans.best, lower_bound_s, plans.looked_near


def _over_one_link(
    problem: Problem, both: Sequence[Problem], best: Plan | None, deadline: Deadline
) -> tuple[list[Balance], float]:
    """What was found for problems with one link, of which the last one's bound may end the search.

    Args:
        problem: that plans are for.
        both: far, and near if that is one.
        best: plan so far.
        deadline: when what is left is not looked for any more.

    Returns:
        Plans, and what none of these problems has a plan below.
    """
    starts: list[Balance] = []
    lower_bound_s, reached_s = math.inf, step_s(best)
    for place, one in enumerate(both):
        if reached_s < np.inf and (besides_s := least_s(one)) > reached_s:
            lower_bound_s = min(lower_bound_s, besides_s)
            continue
        late = place > 0 and deadline.over  # what was in vain on all devices is so on some of them
        with besides(lower_bound_s if place == len(both) - 1 else 0.0), others_follow():
            in_vain = problem.dispensable or best is not None or bool(starts) or late
            shared = with_share(one, deadline, PARTS - place)
            found = _balanced(replace(shared, dispensable=in_vain, below_s=min(one.below_s, step_s(best))))
        if found is None:
            lower_bound_s = min(lower_bound_s, even_share_s(one) if deadline.over else least_s(one))
            continue
        reached_s = min(step_s(best), evaluate_s(problem, found.candidate, found.stages, found.orders))
        starts.append(found)
        lower_bound_s = min(lower_bound_s, found.lower_bound_s)
    return starts, lower_bound_s


def _look_near_shape(plans: OwnLinks, shape: Problem, far: Problem, deadline: Deadline) -> None:
    """Look near the plans of single K and R, or of one M, over the faster link and over the slower one.

    Over the faster link no plan takes longer than over its own: where none is found to be faster so, none is looked
    for over the slower one.
    """
    rosy = replace(shape, link=far.link, ring=far.ring, below_s=step_s(plans.best))
    found = _balanced(_within(rosy, deadline))
    if found is None or found.step_s >= step_s(plans.best):
        return
    plans.look_near((found,))
    found = None if plans.done else _balanced(_within(shape, deadline))
    plans.look_near(() if found is None else (found,))


def _fastest_of(problem: Problem, known: Sequence[Balance]) -> list[Balance]:
    """Those of these plans that are the fastest in this problem's order of devices."""

    def own_s(one: Balance) -> float:
        return evaluate_s(problem, one.candidate, one.stages, one.orders)

    return sorted(known, key=own_s)[:MOST_KNOWN]


def _balanced(problem: Problem) -> Balance | None:
    return balance_of_all(problem) if next(problem.candidates(), None) is not None else None


def _with_time(problem: Problem, limit_s: float) -> Problem:
    return replace(problem, settings=replace(problem.settings, time_limit_s=max(limit_s, 1e-3)))


def _counts(problem: Problem) -> Iterator[Problem]:
    """The problem for each M, where devices are unlike and M are few: which of these are used depends on M, too."""
    counts = sorted({one.split.count for one in problem.candidates()})
    if len(problem.classes) == 1 or not 1 < len(counts) <= MOST_COUNTS:
        return
    for count in counts:
        yield replace(problem, settings=replace(problem.settings, micro_batches=count), patience=PATIENCE)


def _within(problem: Problem, deadline: Deadline) -> Problem:
    """The problem with no more time than is left."""
    limit_s = problem.settings.time_limit_s
    return problem if limit_s is None else _with_time(problem, min(limit_s, deadline.left_s))


def _fastest(hosts: Hosts) -> Link:
    """A link over which no message is longer under way than over either, and that nobody copies for."""
    return faster_of(*map(_under_way, (hosts.link, hosts.between)))


def _under_way(link: Link) -> Link:
    """What is left of messages without copies at both ends."""
    return link.slowed(1 - sum(link.copied)).model_copy(update={"sender_share": 0.0, "receiver_share": 0.0})


def _near(problem: Problem, hosts: Hosts, number: int) -> Problem | None:
    """The problem on one host; None where R does not fit there, or a module must run on another."""
    first = number * hosts.devices_per_host
    there = range(first, first + hosts.devices_per_host)
    elsewhere = {int(device) for device in problem.rules.pinned} - {FREE, *there}
    if (problem.settings.replicas or 1) > hosts.devices_per_host or elsewhere:
        return None
    classes = tuple(
        replace(one, members=tuple(member for member in one.members if member in there)) for one in problem.classes
    )
    return replace(problem, link=hosts.link, hosts=None, classes=classes)


def _on_later_hosts(problem: Problem, hosts: Hosts) -> Iterator[tuple[Problem, Problem]]:
    """The problem from a host on and on it alone, for each whose devices no host before it has all of."""
    if (problem.rules.pinned != FREE).any():
        return
    before: list[list[int]] = []
    for number in range(math.ceil(len(problem.devices) / hosts.devices_per_host)):
        alone = _near(problem, hosts, number)
        if alone is None:
            return
        counts = [len(one.members) for one in alone.classes]
        if number and not any(all(map(operator.le, counts, known)) for known in before):
            yield from_device(problem, number * hosts.devices_per_host), alone
        before.append(counts)


def _ring(problem: Problem, hosts: Hosts) -> Link:
    """What all-reduce takes at least where a plan is on several hosts."""
    replicas, per_host = problem.settings.replicas, hosts.devices_per_host
    if replicas is None or len(problem.classes) > 1:
        return _fastest(hosts)
    ranks = problem.settings.ranks
    if ranks is not None and ranks * replicas == len(problem.classes[0].members):
        placement = problem.placement([0] * ranks, replicas)  # all devices are used, in whatever order
        return faster_of(*(placement.averaging(rank) or _fastest(hosts) for rank in range(ranks)))
    ranks_on_a_host = 1 if hosts.adjacent else per_host // replicas + 1
    always = replicas > per_host if hosts.adjacent else (replicas - 1) * ranks_on_a_host >= per_host
    if not always:
        return _fastest(hosts)
    return faster_of(hosts.averaging(1, 1), hosts.averaging(min(per_host, replicas // 2), per_host))


def _shapes(problem: Problem, starts: list[Balance]) -> Iterator[Problem]:
    """The problem for single K and R: powers of two on all devices, and those around what was found.

    Of few devices all others, too; those that leave fewer idle come first.
    """
    settings, devices = problem.settings, len(problem.devices)
    seen: set[tuple[int, int, int]] = set()
    tried = CHUNKS_TRIED[:1] if settings.choose_chunks else ()
    chunks = sorted({settings.chunks, *tried, *(one.candidate.ring.chunks for one in starts)})
    known = [(len(one.stages) // one.candidate.ring.chunks, one.candidate.replicas) for one in starts]
    powers = [2**power for power in range(math.ceil(math.log2(devices)) + 1)]
    even = [(devices // replicas, replicas) for replicas in powers if devices % replicas == 0]
    near = [(ranks + more, replicas) for more in (0, -1, 1) for ranks, replicas in known]
    rest = [
        (used // replicas, replicas)
        for used in range(devices, 0, -1)
        for replicas in range(1, used + 1)
        if devices <= FEW_DEVICES and used % replicas == 0
    ]
    for (ranks, replicas), each in product((*even, *near, *rest), chunks):
        alone = with_chunks(replace(settings, choose_chunks=False), each, problem.layers)
        stages = ranks * each
        if alone is None or (stages, replicas, each) in seen:
            continue
        fixed = settings.stages in (None, stages) and settings.replicas in (None, replicas)
        if not fixed or not (1 if each == 1 else FEW_RANKS * each) <= stages <= min(alone.max_stages, problem.layers):
            continue
        seen.add((stages, replicas, each))
        if len(seen) > MOST_SHAPES and devices > FEW_DEVICES:
            return
        yield replace(problem, settings=replace(alone, stages=stages, replicas=replicas), patience=PATIENCE)
