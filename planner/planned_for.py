"""What a plan was made for: its devices, and the links between them, by which others are held against it.

A plan knows the seconds of its own messages, and no link. One that was made in this process remembers the cluster; of
one from a file the cluster is passed, or the profile's own link is taken, if the plan's step is what it says. Of those
on several hosts it knows which devices it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import isclose
from typing import TYPE_CHECKING, TypeAlias

from planner.plan.micro_batches import MicroBatches
from planner.plan.plan import Plan
from planner.plan.schedules import ONE_CHUNK
from planner.plan.stage import Segment
from planner.plan.units import seconds_text
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, ForeignPlanError
from profiler.quantities import shown
from profiler.record import Profile
from profiler.text import counted

if TYPE_CHECKING:
    from planner.solve.balance import Balance
    from planner.solve.problem import Problem

SegmentsOf: TypeAlias = Callable[[int, int], tuple[Segment, ...]]
"""What is recomputed of the stage of layers [first, stop)."""
ROUNDING = 1e-6
"""Relative difference of two step times that comes from rounding."""


def planned_for(plan: Plan, profile: Profile, devices: Cluster | Sequence[Device] | None = None) -> Cluster:
    """The cluster: of several hosts all devices, since where one is says which link is before it; else the plan's own.

    Args:
        plan: that was made for it.
        profile: what it was made from.
        devices: what it was made for, where that is known.
    """
    known = plan.cluster if devices is None else devices
    if isinstance(known, Cluster) and known.devices_per_host is not None:
        return known
    own = tuple(stage.devices[replica] for replica in range(plan.replicas) for stage in plan.stages[: plan.ranks])
    link = known.link if isinstance(known, Cluster) else None
    return Cluster(devices=own, link=link or next(iter(profile.links), None))


def refuse_other_links(plan: Plan, step_s: float) -> None:
    """Refuse links by which the plan takes another time than it says.

    Args:
        plan: of which nobody said what it was made for.
        step_s: what it takes by the profile's own link.

    Raises:
        ArgumentError: with both times.
    """
    if plan.cluster is None and not isclose(step_s, plan.prediction.step_s, rel_tol=ROUNDING):
        raise ArgumentError(
            f"by the link in the profile a step of this plan takes {seconds_text(step_s)} "
            f"({step_s / plan.prediction.step_s - 1:+.2%}), and the plan says "
            f"{seconds_text(plan.prediction.step_s)}: it was made for other links; pass devices=, the Cluster that it "
            "was made for, or leave the profile out"
        )


def problem_of(plan: Plan, profile: Profile, devices: Cluster | Sequence[Device] | None = None) -> Problem:
    """The problem whose only freedom is recompute and cuts.

    Args:
        plan: that solves it.
        profile: what it was made from.
        devices: see `planned_for`.

    Raises:
        ForeignPlanError: the profile is another one, or the devices are.
    """
    from planner.cost.layer_costs import fingerprint_of
    from planner.from_profile import make_problem
    from planner.solve.equal_groups import groupings

    if fingerprint_of(profile) != plan.profile_fingerprint:
        raise ForeignPlanError("the plan was not made from this profile; pass the one that it was made from")
    problem = make_problem(
        profile,
        planned_for(plan, profile, devices),
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        settings={
            "schedule": plan.schedule,
            "chunks": plan.chunks,
            "stages": plan.K,
            "micro_batches": plan.M,
            "micro_batches_per_stage": 1,
            "replicas": plan.replicas,
            "shard_optimizer": plan.shard_optimizer,
            "skips": "direct" if plan.skips else "relayed",
        },
    )
    several = groupings(problem, plan.replicas)
    found = next(filter(None, (_on_its_devices(one, plan) for one in several)), None)
    if found is None and not plan.positions:
        return several[0]
    if found is None:
        _classes_of(several[0], plan)
        raise ForeignPlanError(
            f"the plan has devices {shown([*chain.from_iterable(plan.positions)])} for its ranks, and of these "
            f"{counted(len(problem.devices), 'device')} it would have others; pass the Cluster that it was made for"
        )
    return found


def _on_its_devices(problem: Problem, plan: Plan) -> Problem | None:
    """The problem with devices in the order of the plan, and without those before its first one; None for others."""
    from planner.solve.own_links import from_device

    if problem.devices_per_host is None:
        return problem
    if not plan.positions:
        return _by_its_step(problem, plan)
    later = from_device(problem, min(chain.from_iterable(plan.positions)))
    if _has_room(later, plan):
        hosts, classes = problem.hosts, _classes_of(later, plan)[: plan.ranks]
        for one in (later, later if hosts is None else replace(later, hosts=replace(hosts, adjacent=True))):
            if one.placement(classes, plan.replicas).members == plan.positions:
                return one
    return None


def _by_its_step(problem: Problem, plan: Plan) -> Problem | None:
    """Of a plan that does not say where its devices are: without those at the front with which its step is another."""
    from planner.solve.own_links import from_device

    for first in range(len(problem.devices) - plan.ranks * plan.replicas + 1):
        later = from_device(problem, first)
        if _has_room(later, plan) and isclose(as_it_is_s(later, plan), plan.prediction.step_s, rel_tol=ROUNDING):
            return later
    return None


def _has_room(problem: Problem, plan: Plan) -> bool:
    """Whether there are devices for all ranks of the plan."""
    of_class = {_memory(group.device): group for group in problem.classes}
    used = Counter(_memory(stage.device) for stage in plan.stages[: plan.ranks])
    return all(one in of_class and count <= of_class[one].capacity(plan.replicas) for one, count in used.items())


def as_it_is_s(problem: Problem, plan: Plan) -> float:
    """Seconds of the plan's own step by this problem: a plan may have been made with another link."""
    own = {(stage.first_layer, stage.stop_layer): stage.recompute for stage in plan.stages}
    cuts = [stage.stop_layer for stage in plan.stages[:-1]]
    return evaluated(problem, plan, cuts, lambda first, stop: own[first, stop]).step_s


def in_order_of_ranks_s(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds of the plan's step where the replicas of a rank are on devices after each other.

    Args:
        plan: that was made for it.
        profile: what it was made from.
        cluster: of devices that are equal but for their memory.
    """
    problem = problem_of(plan, profile, cluster)
    adjacent = None if problem.hosts is None else replace(problem.hosts, adjacent=True)
    return as_it_is_s(replace(problem, hosts=adjacent), plan)


def evaluated(problem: Problem, plan: Plan, cuts: Sequence[int], segments_of: SegmentsOf) -> Balance:
    """The plan with these cuts and segments, whether it fits or not, and what its step takes by the problem."""
    from planner.solve.balance import Balance, StageChoice, evaluate_s
    from planner.solve.problem import Candidate

    ring = plan.ring if plan.chunks > 1 else ONE_CHUNK
    split = MicroBatches(plan.batch_size // plan.replicas, plan.M)
    candidate = Candidate(plan.schedule, plan.replicas, split, ring)
    stages = tuple(
        StageChoice(first, stop, place, segments_of(first, stop))
        for (first, stop), place in zip(pairwise([0, *cuts, problem.layers]), _classes_of(problem, plan), strict=True)
    )
    step_s = evaluate_s(problem, candidate, stages, plan.orders)
    return Balance(candidate, stages, step_s, min(step_s, plan.prediction.lower_bound_s), plan.orders)


def _classes_of(problem: Problem, plan: Plan) -> list[int]:
    """By stage the class of its device.

    Raises:
        ForeignPlanError: there is none.
    """
    classes = [_memory(group.device) for group in problem.classes]
    missing = next((stage.device for stage in plan.stages if _memory(stage.device) not in classes), None)
    if missing is not None:
        raise ForeignPlanError(
            f"the plan runs on {missing.kind} with {missing.memory_bytes} bytes, and there are "
            f"{', '.join(f'{kind} with {size}' for kind, size in classes)}; pass the Cluster that it was made for, "
            "with its limits of memory"
        )
    return [classes.index(_memory(stage.device)) for stage in plan.stages]


def _memory(device: Device) -> tuple[str, int]:
    return device.kind, device.memory_bytes
