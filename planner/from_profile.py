"""The planner's front door: a profile, devices and a batch size in, a plan out. Pure: nothing is traced or measured.

plan = plan_from_profile(Profile.load("profile.json"), cluster, batch_size=64)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.balancer import Balance, StageChoice, end_seconds, stage_seconds
from planner.costs import CostModel, ParameterRanges
from planner.infeasible import nothing_fits_text
from planner.many_devices import balance_any, with_fewer_classes
from planner.memory import stage_memory
from planner.plan import Plan, Prediction, Stage, StageTimes
from planner.problem import Problem, device_classes
from planner.rules import rules_of
from planner.settings import SettingKeywords, Settings
from planner.simulator import simulate_plan
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, InfeasibleError, ProfileError
from profiler.record import Profile

if TYPE_CHECKING:
    from typing import Unpack

ROUNDING = 1e-9
"""Relative difference between two ways to compute a step time that is taken for rounding."""


def plan_from_profile(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    *,
    batch_size: int,
    optimizer: str | None = None,
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
        settings: see `planner.settings.SettingKeywords`.

    Returns:
        The plan; `plan.prediction.gap` says how far from optimal it can be.

    Raises:
        ArgumentError: an argument has a value that cannot mean anything.
        InfeasibleError: the batch is too small, rules contradict each other, or nothing fits the memory; the message
            says what would help.
        ProfileError: the profile lacks a device kind, an optimizer, a link, or the micro-batch sizes.
    """
    problem = make_problem(profile, devices, batch_size=batch_size, optimizer=optimizer, settings=settings)
    found = balance_any(problem)
    if found is None:
        raise InfeasibleError(nothing_fits_text(with_fewer_classes(problem)))
    return make_plan(problem, found)


def make_problem(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    *,
    batch_size: int,
    optimizer: str | None,
    settings: SettingKeywords,
) -> Problem:
    """What the balancer is asked; see `plan_from_profile`."""
    given = _device_tuple(devices)
    asked = Settings.of(given, batch_size, settings)
    if asked.stages is not None and asked.stages > len(profile.layers):
        raise ArgumentError(
            f"stages is {asked.stages}, but the model has {len(profile.layers)} layers; a stage holds at least 1"
        )
    link = devices.link if isinstance(devices, Cluster) and devices.link is not None else None
    limited = tuple(
        device if limit == device.memory_bytes else device.model_copy(update={"memory_bytes": limit})
        for device, limit in zip(given, asked.memory_limits, strict=True)
    )
    most = min(asked.max_stages, len(profile.layers), batch_size // asked.micro_batches_per_stage)
    rules = rules_of(profile, asked, most)
    problem = Problem(
        costs=CostModel(profile),
        parameters=ParameterRanges(profile),
        devices=limited,
        classes=device_classes(limited, rules),
        link=link or next(iter(profile.links), None),
        optimizer=optimizer if optimizer is not None else profile.optimizers[0].name,
        settings=asked,
        rules=rules,
    )
    _check_profile(problem, most)
    return problem


def _device_tuple(devices: Cluster | Sequence[Device]) -> tuple[Device, ...]:
    if isinstance(devices, Cluster):
        return devices.devices
    if not isinstance(devices, Sequence) or not all(isinstance(device, Device) for device in devices):
        raise ArgumentError(
            f"devices={devices!r} are no planned devices; pass a Cluster or a list of Device, "
            "profiler.local.local_devices makes one of counts and names"
        )
    return tuple(devices)


def _check_profile(problem: Problem, most: int) -> None:
    """The profile knows the devices, the optimizer, a link where one is needed, and micro-batches of some M."""
    settings = problem.settings
    for device in problem.devices:
        problem.costs.measured_sizes(device.kind)
        problem.costs.optimizer(device.kind, problem.optimizer)
    if (most > 1 or (settings.replicas or 2) > 1) and settings.stages != 1 and problem.link is None:
        raise ProfileError(
            f"up to {most} stages need a link between the devices, and 0 were measured; give a Cluster with a link, "
            "profile on the target devices, or set stages=1"
        )
    if next(problem.candidates(), None) is None:
        measured = {device.kind: problem.costs.measured_sizes(device.kind) for device in problem.devices}
        ranges = ", ".join(f"{sizes[0]} to {sizes[-1]} on {kind!r}" for kind, sizes in measured.items())
        share = settings.batch_size // (settings.replicas or 1)
        largest = share // (settings.micro_batches or settings.micro_batches_per_stage)
        smallest = 1 if settings.micro_batches is None else largest
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
    if not any(cost.forward_s + cost.backward_s for cost in problem.costs.profile.costs):
        raise ProfileError("all layers of the profile take 0 seconds; profile the model again")


def make_plan(problem: Problem, found: Balance) -> Plan:
    """The plan that a balance means."""
    profile = problem.costs.profile
    candidate = found.candidate
    draft = Plan(
        model_fingerprint=profile.fingerprint,
        profile_fingerprint=fingerprint_of(profile),
        sample=profile.sample,
        batch_size=problem.settings.batch_size,
        micro_batch_sizes=candidate.split.sizes,
        schedule=candidate.schedule,
        replicas=candidate.replicas,
        optimizer=problem.optimizer,
        stages=_stages(problem, found),
        prediction=Prediction(
            step_s=found.step_s,
            optimizer_s=0.0,
            bubble=0.0,
            samples_per_s=problem.settings.batch_size / found.step_s,
            lower_bound_s=found.lower_bound_s,
            gap=0.0,
            one_device_s=_one_device_s(problem, found),
        ),
    )
    return draft.model_copy(update={"prediction": _prediction(problem, found, draft)})


def fingerprint_of(profile: Profile) -> str:
    """What a plan says of the profile that it was made from."""
    return hashlib.sha256(profile.to_json().encode()).hexdigest()


def _prediction(problem: Problem, found: Balance, draft: Plan) -> Prediction:
    """The simulator has the last word on the step time."""
    timeline = simulate_plan(draft)
    lower_bound_s = min(found.lower_bound_s, timeline.step_s)
    if timeline.step_s <= lower_bound_s * (1 + ROUNDING):
        lower_bound_s = timeline.step_s
    return Prediction(
        step_s=timeline.step_s,
        optimizer_s=timeline.optimizer_s,
        bubble=min(1.0, timeline.bubble),
        samples_per_s=problem.settings.batch_size / timeline.step_s,
        lower_bound_s=lower_bound_s,
        gap=timeline.step_s / lower_bound_s - 1,
        one_device_s=_one_device_s(problem, found),
    )


def _stages(problem: Problem, found: Balance) -> tuple[Stage, ...]:
    """The plan's stages; equal devices are taken in the order in which they were given."""
    sizes = sorted({*found.candidate.split.sizes}, reverse=True)
    seconds = {size: stage_seconds(problem, size, found.stages) for size in sizes}
    left = [list(group.members) for group in problem.classes]
    stages = []
    for index, choice in enumerate(found.stages):
        members = [left[choice.device_class].pop(0) for _ in range(found.candidate.replicas)]
        times = tuple(
            StageTimes(
                micro_batch_size=size,
                **dict(
                    zip(
                        ("forward_s", "recompute_s", "backward_s", "send_forward_s", "send_backward_s"),
                        (float(value) for value in seconds[size][:, index]),
                        strict=True,
                    )
                ),
            )
            for size in sizes
        )
        stages.append(
            _stage(problem, found, index, choice, tuple(problem.devices[member] for member in members), times)
        )
    return tuple(stages)


def _stage(
    problem: Problem,
    found: Balance,
    index: int,
    choice: StageChoice,
    devices: tuple[Device, ...],
    times: tuple[StageTimes, ...],
) -> Stage:
    profile = problem.costs.profile
    first, stop = choice.first, choice.stop
    names = dict.fromkeys(name for layer in profile.layers[first:stop] for name in layer.parameters)
    elements = {parameter.name: parameter.elements for parameter in profile.parameters}
    all_reduce_s, optimizer_s = end_seconds(problem, found.candidate, choice)
    return Stage(
        first_layer=first,
        stop_layer=stop,
        module_paths=_end_paths(profile, first, stop),
        devices=devices,
        rank=index,
        parameters=tuple(names),
        parameter_count=sum(elements[name] for name in names),
        recompute=choice.segments,
        times=times,
        all_reduce_s=all_reduce_s,
        optimizer_s=optimizer_s,
        memory=stage_memory(
            problem.costs,
            problem.parameters,
            devices[0],
            found.candidate.schedule,
            found.candidate.split,
            problem.costs.optimizer(devices[0].kind, problem.optimizer),
            number=len(found.stages) - index,
            first=first,
            stop=stop,
            segments=choice.segments,
        ),
    )


def _end_paths(profile: Profile, first: int, stop: int) -> tuple[str, str]:
    """Module path of the first and the last operation of a stage."""
    paths = [path for layer in profile.layers[first:stop] for path in layer.module_paths or (layer.name,)]
    return paths[0], paths[-1]


def _one_device_s(problem: Problem, found: Balance) -> float:
    """Seconds of the same batch on the first device alone, memory disregarded."""
    kind = problem.devices[0].kind
    sizes = found.candidate.split.sizes
    seconds = {size: problem.costs.layers(kind, size) for size in {*sizes}}
    work = {size: float(costs.forward_s.sum() + costs.backward_s.sum()) for size, costs in seconds.items()}
    optimizer_s = (
        problem.costs.optimizer(kind, problem.optimizer).seconds_per_byte * problem.parameters.trainable[0, -1]
    )
    return found.candidate.replicas * sum(work[size] for size in sizes) + float(optimizer_s)
