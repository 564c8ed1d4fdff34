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
from profiler.record import Profile

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
    if isinstance(known, Cluster) and known.between is not None:
        return known
    own = tuple(device for stage in plan.stages[: plan.ranks] for device in stage.devices)
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
        ForeignPlanError: the profile is another one.
    """
    from planner.cost.layer_costs import fingerprint_of
    from planner.from_profile import make_problem
    from planner.solve.equal_groups import with_equal_groups

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
    return _on_its_devices(with_equal_groups(problem, plan.replicas), plan)


def _on_its_devices(problem: Problem, plan: Plan) -> Problem:
    """The problem with devices in the order of the plan, and without those before its first one."""
    from planner.solve.own_links import from_device

    if problem.hosts is None or not plan.positions:
        return problem
    later = from_device(problem, min(chain.from_iterable(plan.positions)))
    classes = _classes_of(later, plan)[: plan.ranks]
    used = Counter(classes)
    if all(used[place] <= group.capacity(plan.replicas) for place, group in enumerate(later.classes)):
        for adjacent in (False, True):
            one = replace(later, hosts=replace(problem.hosts, adjacent=adjacent))
            if one.placement(classes, plan.replicas).members == plan.positions:
                return one
    return problem  # of other devices


def as_it_is_s(problem: Problem, plan: Plan) -> float:
    """Seconds of the plan's own step by this problem: a plan may have been made with another link."""
    own = {(stage.first_layer, stage.stop_layer): stage.recompute for stage in plan.stages}
    cuts = [stage.stop_layer for stage in plan.stages[:-1]]
    return evaluated(problem, plan, cuts, lambda first, stop: own[first, stop]).step_s


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
    """By stage the class of its device."""
    classes = [(group.device.kind, group.device.memory_bytes) for group in problem.classes]
    return [classes.index((stage.device.kind, stage.device.memory_bytes)) for stage in plan.stages]
