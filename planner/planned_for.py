"""What a plan was made for: its devices, and the links between them, by which others are held against it.

A plan knows the seconds of its own messages, and no link. One that was made in this process remembers the cluster; of
one from a file the cluster is passed, or the profile's own link is taken, if the plan's step is what it says. Of those
on several hosts it knows which devices it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise, product
from math import isclose
from typing import TYPE_CHECKING, TypeAlias

from planner.plan.micro_batches import MicroBatches
from planner.plan.plan import Plan
from planner.plan.schedules import ONE_CHUNK
from planner.plan.stage import Segment, Stage
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
    if isinstance(known, Cluster) and known.has_several_hosts:
        return known
    own = tuple(stage.devices[replica] for replica in range(plan.replicas) for stage in plan.stages[: plan.ranks])
    link = known.link if isinstance(known, Cluster) else None
    return Cluster(devices=own, link=link or next(iter(profile.links), None))


def refuse_other_links(plan: Plan, problem: Problem, devices: Cluster | Sequence[Device] | None) -> None:
    """Refuse links by which the plan takes another time than it says, or of which its own messages say nothing.

    Args:
        plan: without values that skip stages, whose seconds are not told from those of other messages.
        problem: of the plan, on these devices.
        devices: that it was said to be made for; None for those that it remembers, or the profile's link.

    Raises:
        ForeignPlanError: by the links of these devices it takes another time.
        ArgumentError: nobody said what it was made for, and by the profile's link it does.
    """
    if plan.skips or (devices is None and plan.cluster is not None):
        return
    step_s = as_it_is_s(problem, plan)
    took = f"a step of this plan takes {seconds_text(step_s)} ({step_s / plan.prediction.step_s - 1:+.2%})"
    differs = not isclose(step_s, plan.prediction.step_s, rel_tol=ROUNDING)
    if differs and devices is not None:
        raise ForeignPlanError(
            f"by the links of these devices {took}, and the plan says {seconds_text(plan.prediction.step_s)}: it was "
            "made for others; pass the Cluster that it was made for"
        )
    if differs:
        raise ArgumentError(
            f"by the link in the profile {took}, and the plan says {seconds_text(plan.prediction.step_s)}: it was made "
            "for other links; pass devices=, the Cluster that it was made for, or leave the profile out"
        )
    if devices is None and len(plan.processes_by_host) > 1 and not _sends_between_hosts(plan):
        raise ArgumentError(
            f"the plan is for {len(plan.processes_by_host)} hosts and sends 0 bytes between them, so it does not say "
            "over which link; pass devices=, the Cluster that it was made for, or leave the profile out"
        )


def _sends_between_hosts(plan: Plan) -> bool:
    """Whether a message or an all-reduce of the plan says what the link between its hosts takes."""
    assert plan.devices_per_host is not None
    hosts = [[position // plan.devices_per_host for position in row] for row in plan.positions]
    for stage, after in pairwise(plan.stages):
        sent = any(times.send_forward_s for times in stage.times) or any(times.send_backward_s for times in after.times)
        if sent and hosts[stage.rank] != hosts[after.rank]:
            return True
    return any(stage.all_reduce_s and len({*hosts[stage.rank]}) > 1 for stage in plan.stages)


def problem_of(plan: Plan, profile: Profile, devices: Cluster | Sequence[Device] | None = None) -> Problem:
    """The problem whose only freedom is recompute and cuts, on the plan's own devices.

    Args:
        plan: that solves it.
        profile: what it was made from.
        devices: see `planned_for`.

    Raises:
        ForeignPlanError: the profile is another one, or the devices are.
    """
    from planner.cost.layer_costs import fingerprint_of
    from planner.from_profile import make_problem

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
    if problem.devices_per_host is None:
        return placed_as(problem, plan, [range(rank, len(problem.devices), plan.ranks) for rank in range(plan.ranks)])
    if plan.devices_per_host not in (None, problem.devices_per_host):
        raise ForeignPlanError(
            f"the plan is for hosts of {counted(plan.devices_per_host, 'device')}, and these have "
            f"{problem.devices_per_host}; pass the Cluster that it was made for"
        )
    return placed_as(problem, plan, plan.positions or _where_it_is(problem, plan))


def placed_as(problem: Problem, plan: Plan, positions: Sequence[Sequence[int]]) -> Problem:
    """The problem with the plan's devices alone, each rank on its own of them.

    Args:
        problem: with all devices.
        plan: whose ranks run there.
        positions: by rank, where its device of each replica is among them.

    Raises:
        ForeignPlanError: there are other devices at these positions.
    """
    devices = [*problem.devices]
    for stage, row in zip(plan.stages[: plan.ranks], positions, strict=True):
        for device, position in zip(stage.devices, row, strict=True):
            there = devices[position] if position < len(devices) else None
            if there is None or there.kind != device.kind or there.memory_bytes < device.memory_bytes:
                raise ForeignPlanError(_other_device_text(device, position, there))
            devices[position] = device
    return _in_rows(replace(problem, devices=tuple(devices)), plan, positions)


def _in_rows(problem: Problem, plan: Plan, positions: Sequence[Sequence[int]]) -> Problem:
    """The same, whatever is at these positions."""
    from planner.solve.problem import DeviceClass

    devices: dict[tuple[str, int], Device] = {}
    rows: dict[tuple[str, int], list[Sequence[int]]] = {}
    for stage, row in zip(plan.stages[: plan.ranks], positions, strict=True):
        key = _memory(stage)
        devices[key] = stage.device.model_copy(update={"memory_bytes": key[1]})
        rows.setdefault(key, []).append(row)
    members = {key: tuple(row[replica] for replica in range(plan.replicas) for row in own) for key, own in rows.items()}
    classes = tuple(DeviceClass(device, members[key], pinned=False) for key, device in devices.items())
    hosts = None if problem.hosts is None else replace(problem.hosts, adjacent=False)
    return replace(problem, classes=classes, hosts=hosts)


def own_positions(problem: Problem, plan: Plan) -> Sequence[Sequence[int]]:
    """By rank, where the plan's devices are among those of its problem."""
    return problem.placement(_classes_of(problem, plan)[: plan.ranks], plan.replicas).members


def _other_device_text(device: Device, position: int, there: Device | None) -> str:
    found = "there is none"
    if there is not None:
        found = f"that is {shown(there.kind)} with {there.memory_bytes}"
    return (
        f"the plan runs on {shown(device.kind)} with {device.memory_bytes} bytes, device {position} of its cluster, "
        f"and here {found}; pass the Cluster that it was made for, with its limits of memory"
    )


def _where_it_is(problem: Problem, plan: Plan) -> Sequence[Sequence[int]]:
    """The devices of a plan that does not say where they are: those on which its step takes what it says.

    Raises:
        ForeignPlanError: there are none.
    """
    from planner.solve.equal_groups import groupings
    from planner.solve.own_links import from_device

    several = (problem, *groupings(problem, plan.replicas))
    hosts = problem.hosts
    orders = (hosts,) if hosts is None else (hosts, replace(hosts, adjacent=True))
    spare = len(problem.devices) - plan.ranks * plan.replicas
    for one, first, order in product(several, range(spare + 1), orders):
        later = replace(from_device(one, first), hosts=order)
        if _has_room(later, plan):
            rows = own_positions(later, plan)
            if isclose(as_it_is_s(placed_as(problem, plan, rows), plan), plan.prediction.step_s, rel_tol=ROUNDING):
                return rows
    raise ForeignPlanError(
        f"the plan does not say where its devices are, and on none of these {counted(len(problem.devices), 'device')} "
        f"it takes the {seconds_text(plan.prediction.step_s)} that it says; pass the Cluster that it was made for, "
        "with its limits of memory"
    )


def _has_room(problem: Problem, plan: Plan) -> bool:
    """Whether there are devices for all ranks of the plan."""
    of_class = {(group.device.kind, group.device.memory_bytes): group for group in problem.classes}
    used = Counter(_memory(stage) for stage in plan.stages[: plan.ranks])
    return all(one in of_class and count <= of_class[one].capacity(plan.replicas) for one, count in used.items())


def as_it_is_s(problem: Problem, plan: Plan) -> float:
    """Seconds of the plan's own step by this problem: a plan may have been made with another link."""
    own = {(stage.first_layer, stage.stop_layer): stage.recompute for stage in plan.stages}
    cuts = [stage.stop_layer for stage in plan.stages[:-1]]
    return evaluated(problem, plan, cuts, lambda first, stop: own[first, stop]).step_s


def in_order_of_processes(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[float, list[int]]:
    """What becomes of the plan where processes are numbered as devices are, the replicas of a rank one after the other.

    Args:
        plan: that was made for it.
        profile: what it was made from.
        cluster: of devices that are equal but for their memory.

    Returns:
        Seconds of its step, and the ranks that do not fit there.
    """
    flat = iter(sorted(chain.from_iterable(plan.positions)))
    rows = [[*islice(flat, plan.replicas)] for _ in range(plan.ranks)]
    rooms = [min(cluster.devices[position].memory_bytes for position in row) for row in rows]
    step_s = as_it_is_s(_in_rows(problem_of(plan, profile, cluster), plan, rows), plan)
    return step_s, [rank for rank, memory in enumerate(plan.device_memories) if memory.total > rooms[rank]]


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
    return [classes.index(_memory(stage)) for stage in plan.stages]


def _memory(stage: Stage) -> tuple[str, int]:
    """Kind and memory of its devices, of which it may fill what the least of them has."""
    return stage.device.kind, min(device.memory_bytes for device in stage.devices)
