"""The planner's front door: a profile, devices and a batch size in, a plan out. Pure: nothing is traced or measured.

plan = plan_from_profile(Profile.load("profile.json"), cluster, batch_size=64)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.cost.hosts import Hosts
from planner.cost.layer_costs import CostModel, check_profile
from planner.cost.parameter_ranges import ParameterRanges
from planner.cost.time_ledger import layer_seconds
from planner.doubt import with_doubt
from planner.keywords import SettingKeywords, takes_settings
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES, ScheduleName, one_chunk_schedules
from planner.rates import with_rates
from planner.rules import most_stages, rules_of, with_chunks_for_cuts
from planner.search_watch import watched
from planner.settings import Settings
from planner.solve.deadline import Deadline
from planner.solve.equal_groups import with_equal_groups
from planner.solve.passed_over import time_for_plan, with_unused
from planner.solve.problem import Problem, device_classes
from planner.solve.skip_search import no_plan_text
from planner.solve.time_shares import best_in_time
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, InfeasibleError, ProfileError
from profiler.quantities import MOST_DEVICES, MOST_MICRO_BATCHES, SHORTEST_WORK_S
from profiler.record import Profile
from profiler.text import counted

if TYPE_CHECKING:
    from typing import Unpack


@takes_settings
def plan_from_profile(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    *,
    batch_size: int,
    optimizer: str | None = None,
    progress: bool = False,
    **settings: Unpack[SettingKeywords],
) -> Plan:
    """The fastest plan: schedule, replicas, K, cuts, M, devices and recompute chosen together.

        plan = plan_from_profile(profile, cluster, batch_size=64, schedule="auto", memory_limit=24 * 2**30)

    Args:
        profile: what the model costs; its measured micro-batch sizes must enclose those that a plan uses, other M are
            left out.
        devices: what stages may run on; the plan chooses which and in which order. A `Cluster` with a link overrides
            the profile's.
        batch_size: samples of a mini-batch.
        optimizer: class name of a profiled optimizer; the profile's first by default.
        progress: show on a terminal the best step so far.
        settings: see `planner.keywords.SettingKeywords`.

    Interrupted from the keyboard, the search ends with the best plan so far, whose `interrupted` is True; where there
    is none yet, with the first one. A second interrupt goes on as usual.

    Returns:
        The plan; `plan.prediction.gap` says how far from optimal it can be.

    Raises:
        ArgumentError: an argument has a value that cannot mean anything.
        InfeasibleError: the batch is too small, rules contradict each other, or nothing fits the memory; the message
            says what would help.
        ProfileError: the profile lacks a device kind, an optimizer, a link, or the micro-batch sizes.
    """
    problem = make_problem(profile, devices, batch_size=batch_size, optimizer=optimizer, settings=settings)
    with watched(progress=progress, limit_s=problem.settings.time_limit_s) as watch:
        plan = plan_of(problem)
    cut_short = watch.interrupted and plan.prediction.gap > 0
    return plan.model_copy(update={"interrupted": cut_short}).made_from(profile, problem.cluster)


def plan_of(problem: Problem) -> Plan:
    """The fastest plan of a problem; nothing is shown, and an interrupt ends it as usual.

    Raises:
        InfeasibleError: there is none.
    """
    began_s = time.monotonic()
    _ = problem.costs.fingerprint  # the plan names it, and of a large profile it takes seconds: they count, too
    equal = with_equal_groups(problem, problem.settings.replicas or 1)
    plan = best_in_time(time_for_plan(problem), time.monotonic() - began_s)
    if plan is None:
        if Deadline(None).interrupted:
            raise KeyboardInterrupt
        raise InfeasibleError(no_plan_text(equal))
    profile = problem.costs.profile
    found = with_rates(with_unused(equal, plan, time.monotonic() - began_s), profile)
    return with_doubt(found, problem.costs, problem.links)


def make_problem(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    *,
    batch_size: int,
    optimizer: str | None,
    settings: SettingKeywords,
) -> Problem:
    """What the balancer is asked; see `plan_from_profile`."""
    check_profile(profile)
    cluster = cluster_of(devices)
    begun = profile.sample.cut_at
    asked = with_chunks_for_cuts(profile.layers, Settings.of(cluster, batch_size, settings), begun)
    rules = rules_of(profile.layers, asked, begun)
    limited = tuple(
        device if limit == device.memory_bytes else device.model_copy(update={"memory_bytes": limit})
        for device, limit in zip(cluster.devices, asked.memory_limits, strict=True)
    )
    costs = CostModel(profile)
    asked = replace(asked, schedules=_measured_schedules(asked, costs, limited))
    problem = Problem(
        costs=costs,
        parameters=ParameterRanges(profile),
        devices=limited,
        classes=device_classes(limited, rules),
        link=cluster.link or next(iter(profile.links), None),
        hosts=_hosts(cluster),
        devices_per_host=cluster.devices_per_host if cluster.has_several_hosts else None,
        optimizer=optimizer if optimizer is not None else profile.optimizers[0].name,
        settings=asked,
        rules=rules,
    )
    _check_profile(problem, most_stages(asked, len(profile.layers)))
    return problem


def _measured_schedules(settings: Settings, costs: CostModel, devices: Sequence[Device]) -> tuple[ScheduleName, ...]:
    """Of the schedules asked for those that the profile has seconds for.

    Raises:
        ProfileError: there is none left.
    """
    if all(costs.splits_backward(device.kind) for device in devices if costs.measured_sizes(device.kind)):
        return settings.schedules
    left = tuple(name for name in settings.schedules if not SCHEDULES[name].splits_backward)
    if not left:
        kinds = {device.kind for device in devices if not costs.splits_backward(device.kind)}
        raise ProfileError(
            f"schedule {settings.schedules[0]!r} takes gradients of parameters apart, and the profile has 0 seconds of "
            f"that on {min(kinds)!r}: there is nothing to take apart, or doing so saved nothing, as in layers of few "
            "microseconds, or an earlier version measured it; profile larger layers or micro-batches, or choose one of "
            f"{', '.join(map(repr, one_chunk_schedules()))}"
        )
    return left


def _hosts(cluster: Cluster) -> Hosts | None:
    """Where the devices are, if that matters."""
    if not cluster.has_unlike_links:
        return None
    assert cluster.link is not None
    assert cluster.between is not None
    assert cluster.devices_per_host is not None
    return Hosts(cluster.link, cluster.between, cluster.devices_per_host, ports=cluster.ports)


def cluster_of(devices: Cluster | Sequence[Device]) -> Cluster:
    """The devices as a cluster.

    Raises:
        ArgumentError: they are none, or too many.
    """
    if isinstance(devices, Cluster):
        return devices
    if not isinstance(devices, Sequence) or not all(isinstance(device, Device) for device in devices):
        raise ArgumentError(
            f"devices={devices!r} are no planned devices; pass a Cluster, which Cluster.of makes of text, or a list of "
            "Device, which profiler.machine.local.local_devices makes of counts and names"
        )
    if not 1 <= len(devices) <= MOST_DEVICES:
        raise ArgumentError(f"got {len(devices)} devices; give 1 to {MOST_DEVICES}")
    return Cluster(devices=tuple(devices))


def _check_profile(problem: Problem, most: int) -> None:
    """The profile knows the devices, the optimizer, a link where one is needed, and micro-batches of some M."""
    settings = problem.settings
    for device in problem.devices:
        problem.costs.measured_sizes(device.kind)
        problem.costs.optimizer(device.kind, problem.optimizer)
    most_replicas = settings.replicas or len(problem.devices)
    if (most > 1 or most_replicas > 1) and settings.stages != 1 and problem.link is None:
        raise ProfileError(
            f"up to {most} stages need a link between the devices, and 0 were measured; give a Cluster with a link, "
            "profile on the target devices, or set stages=1"
        )
    _check_groups(problem)
    if next(with_equal_groups(problem, settings.replicas or 1).candidates(), None) is None:
        measured = {device.kind: problem.costs.measured_sizes(device.kind) for device in problem.devices}
        ranges = ", ".join(f"{sizes[0]} to {sizes[-1]} on {kind!r}" for kind, sizes in measured.items())
        share = settings.batch_size // (settings.replicas or 1)
        largest = -(-share // (settings.micro_batches or settings.micro_batches_per_stage))
        smallest = max(1, share // (settings.micro_batches or MOST_MICRO_BATCHES))
        if settings.micro_batch_sizes is not None:
            raise InfeasibleError(
                f"micro_batch_sizes allows {sorted(settings.micro_batch_sizes)} samples, and no M of a batch "
                f"of {share} "
                f"that the other settings allow has these sizes alone; the profile covers {ranges}"
            )
        raise ProfileError(
            f"a batch of {settings.batch_size} needs micro-batches of {smallest} to {largest} samples, and the profile "
            f"covers {ranges}; costs are not extrapolated: profile the model at those sizes too"
        )
    for kind in dict.fromkeys(device.kind for device in problem.devices):
        for size in problem.costs.measured_sizes(kind):
            costs = layer_seconds(problem.costs, kind, size)
            work_s = float(costs.forward_s.sum() + costs.backward_s.sum())
            if work_s < SHORTEST_WORK_S:
                raise ProfileError(
                    f"all layers of the profile take {work_s:.3g} seconds for {counted(size, 'sample')} on {kind!r}, "
                    f"less than {SHORTEST_WORK_S:.0e}; profile the model again"
                )


def _check_groups(problem: Problem) -> None:
    """Each stage can run on devices of one kind, one in every replica."""
    replicas, needed = problem.settings.replicas or 1, problem.settings.ranks or 1
    found = sum(group.capacity(replicas) for group in with_equal_groups(problem, replicas).classes)
    if found < needed:
        many = Counter(device.kind for device in problem.devices)
        listed = ", ".join(f"{count} of {kind!r}" for kind, count in many.items())
        raise InfeasibleError(
            f"replicas is {replicas}, so a stage needs {replicas} devices of one kind; {listed} "
            f"make {found} such groups, at least {needed} are needed; set fewer replicas"
        )
