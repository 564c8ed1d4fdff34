"""The planner's front door: a profile, devices and a batch size in, a plan out. Pure: nothing is traced or measured.

plan = plan_from_profile(Profile.load("profile.json"), cluster, batch_size=64)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from planner.balancer import Balance, balance
from planner.costs import CostModel, ParameterRanges
from planner.infeasible import batch_too_small_text, nothing_fits_text
from planner.path_terms import boundary_s
from planner.plan import Plan, Prediction, Segment, Stage, StageTimes
from planner.problem import Problem, RecomputeMode
from planner.simulator import simulate_plan
from planner.stage_options import memory_of
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, InfeasibleError, ProfileError
from profiler.record import Profile

ROUNDING = 1e-9
"""Relative difference between two ways to compute a step time that is taken for rounding."""


def plan_from_profile(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    *,
    batch_size: int,
    optimizer: str | None = None,
    stages: int | None = None,
    max_stages: int | None = None,
    micro_batches: int | None = None,
    micro_batches_per_stage: int = 4,
    memory_limit: int | None = None,
    recompute: RecomputeMode = "auto",
    schedule: Literal["gpipe"] = "gpipe",
) -> Plan:
    """The fastest plan: K, cuts, M and recompute chosen together.

    Args:
        profile: what the model costs; its measured micro-batch sizes must enclose those that a plan uses, other M are
            left out.
        devices: in pipeline order, stage k runs on the k-th. A `Cluster` with a link overrides the profile's.
        batch_size: samples of a mini-batch.
        optimizer: class name of a profiled optimizer; the profile's first by default.
        stages: fixed K; by default the best K up to `max_stages`.
        max_stages: largest K to try; by default the number of devices.
        micro_batches: fixed M; by default the best one.
        micro_batches_per_stage: M is at least this times K.
        memory_limit: bytes that a stage may fill on every device, where that is less than the device has.
        recompute: `"auto"` recomputes the stages that do not fit otherwise, `"always"` every stage, `"never"` none.
        schedule: order of the actions.

    Returns:
        The plan; `plan.prediction.gap` says how far from optimal it can be.

    Raises:
        ArgumentError: an argument has a value that cannot mean anything.
        InfeasibleError: the batch is too small, or nothing fits the memory; the message says what would help.
        ProfileError: the profile lacks a device kind, an optimizer, a link, or the micro-batch sizes.
    """
    given = _device_tuple(devices)
    check_settings(
        len(given),
        batch_size=batch_size,
        stages=stages,
        max_stages=max_stages,
        micro_batches=micro_batches,
        micro_batches_per_stage=micro_batches_per_stage,
        memory_limit=memory_limit,
        recompute=recompute,
        schedule=schedule,
    )
    link = devices.link if isinstance(devices, Cluster) and devices.link is not None else None
    problem = Problem(
        costs=CostModel(profile),
        parameters=ParameterRanges(profile),
        devices=tuple(_limited(device, memory_limit) for device in given),
        link=link or next(iter(profile.links), None),
        batch_size=batch_size,
        optimizer=optimizer if optimizer is not None else profile.optimizers[0].name,
        recompute=recompute,
        stages=stages,
        max_stages=min(len(given), len(profile.layers), max_stages or len(given)),
        micro_batches=micro_batches,
        micro_batches_per_stage=micro_batches_per_stage,
    )
    _check_stages(problem, max_stages)
    _check_micro_batches(problem)
    _check_profile(problem)
    found = balance(problem)
    if found is None:
        raise InfeasibleError(nothing_fits_text(problem))
    return _plan(problem, found, schedule)


def check_settings(
    devices: int,
    *,
    batch_size: int,
    stages: int | None,
    max_stages: int | None,
    micro_batches: int | None,
    micro_batches_per_stage: int,
    memory_limit: int | None,
    recompute: str,
    schedule: str,
) -> None:
    """Refuse settings that no profile can make sense of, before anything is measured.

    Raises:
        ArgumentError: a setting has a value that cannot mean anything.
    """
    _check_counts(batch_size=batch_size, micro_batches_per_stage=micro_batches_per_stage)
    _check_counts(stages=stages, max_stages=max_stages, micro_batches=micro_batches, memory_limit=memory_limit)
    _check_choice("recompute", recompute, ("auto", "always", "never"))
    _check_choice("schedule", schedule, ("gpipe",))
    if not devices:
        raise ArgumentError("got 0 devices; give at least 1")
    if stages is not None and stages > devices:
        raise ArgumentError(f"stages is {stages}, but there are {devices} devices; each stage needs its own")


def _device_tuple(devices: Cluster | Sequence[Device]) -> tuple[Device, ...]:
    if isinstance(devices, Cluster):
        return devices.devices
    if not isinstance(devices, Sequence) or not all(isinstance(device, Device) for device in devices):
        raise ArgumentError(
            f"devices={devices!r} are no planned devices; pass a Cluster or a list of Device, "
            "profiler.local.local_devices makes one of counts and names"
        )
    return tuple(devices)


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int):
            raise ArgumentError(f"{name} is {count!r}; give a whole number of at least 1")
        if count < 1:
            raise ArgumentError(f"{name} is {count}; give at least 1")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{name} is {value!r}; choose one of {', '.join(repr(choice) for choice in choices)}")


def _limited(device: Device, memory_limit: int | None) -> Device:
    if memory_limit is None or memory_limit >= device.memory_bytes:
        return device
    return device.model_copy(update={"memory_bytes": memory_limit})


def _check_stages(problem: Problem, max_stages: int | None) -> None:
    stages = problem.stages
    if stages is None:
        return
    if stages > problem.layers:
        raise ArgumentError(f"stages is {stages}, but the model has {problem.layers} layers; a stage holds at least 1")
    if max_stages is not None and stages > max_stages:
        raise ArgumentError(f"stages is {stages} and max_stages is {max_stages}; leave one of them out")


def _check_micro_batches(problem: Problem) -> None:
    """M is possible for the batch and, with at least `micro_batches_per_stage` for each stage, for K."""
    batch, count = problem.batch_size, problem.micro_batches
    least_stages = problem.stages or 1
    needed = problem.micro_batches_per_stage * least_stages
    if count is not None and count > batch:
        raise ArgumentError(f"micro_batches is {count}, but the batch has {batch} samples; each needs at least 1")
    if count is not None and count < needed:
        raise ArgumentError(
            f"micro_batches is {count}, but {least_stages} stages with micro_batches_per_stage = "
            f"{problem.micro_batches_per_stage} need at least {needed}; give more micro-batches, fewer stages, or a "
            "smaller micro_batches_per_stage"
        )
    if batch < needed:
        raise InfeasibleError(batch_too_small_text(problem, needed))


def _check_profile(problem: Problem) -> None:
    """The profile knows the devices, the optimizer, a link where one is needed, and micro-batches of some M."""
    most = problem.stage_numbers(problem.micro_batches or problem.batch_size)[-1]
    for device in problem.devices[:most]:
        problem.costs.measured_sizes(device.kind)
        problem.costs.optimizer(device.kind, problem.optimizer)
    if most > 1 and problem.link is None:
        raise ProfileError(
            f"up to {most} stages need a link between the devices, and 0 were measured; give a Cluster with a link, "
            "profile on the target devices, or set stages=1"
        )
    if not problem.candidates():
        measured = {device.kind: problem.costs.measured_sizes(device.kind) for device in problem.devices[:most]}
        ranges = ", ".join(f"{sizes[0]} to {sizes[-1]} on {kind!r}" for kind, sizes in measured.items())
        largest = problem.batch_size // (problem.micro_batches or problem.micro_batches_per_stage)
        smallest = 1 if problem.micro_batches is None else largest
        raise ProfileError(
            f"a batch of {problem.batch_size} needs micro-batches of {smallest} to {largest} samples, and the profile "
            f"covers {ranges}; costs are not extrapolated: profile the model at those sizes too"
        )
    if not any(cost.forward_s + cost.backward_s for cost in problem.costs.profile.costs):
        raise ProfileError("all layers of the profile take 0 seconds; profile the model again")


def _plan(problem: Problem, found: Balance, schedule: Literal["gpipe"]) -> Plan:
    profile = problem.costs.profile
    stages = tuple(_stage(problem, found, index) for index in range(len(found.cuts) - 1))
    draft = Plan(
        model_fingerprint=profile.fingerprint,
        profile_fingerprint=hashlib.sha256(profile.to_json().encode()).hexdigest(),
        sample=profile.sample,
        batch_size=problem.batch_size,
        micro_batch_sizes=found.split.sizes,
        schedule=schedule,
        optimizer=problem.optimizer,
        stages=stages,
        prediction=Prediction(
            step_s=found.step_s,
            optimizer_s=0.0,
            bubble=0.0,
            samples_per_s=problem.batch_size / found.step_s,
            lower_bound_s=found.lower_bound_s,
            gap=0.0,
            one_device_s=_one_device_s(problem, found),
        ),
    )
    return draft.model_copy(update={"prediction": _prediction(problem, found, draft)})


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
        samples_per_s=problem.batch_size / timeline.step_s,
        lower_bound_s=lower_bound_s,
        gap=timeline.step_s / lower_bound_s - 1,
        one_device_s=_one_device_s(problem, found),
    )


def _stage(problem: Problem, found: Balance, index: int) -> Stage:
    profile = problem.costs.profile
    first, stop = found.cuts[index], found.cuts[index + 1]
    device, recomputed = problem.devices[index], found.recomputed[index]
    names = dict.fromkeys(name for layer in profile.layers[first:stop] for name in layer.parameters)
    elements = {parameter.name: parameter.elements for parameter in profile.parameters}
    seconds_per_byte = problem.costs.optimizer(device.kind, problem.optimizer).seconds_per_byte
    return Stage(
        first_layer=first,
        stop_layer=stop,
        module_paths=_end_paths(profile, first, stop),
        devices=(device,),
        rank=index,
        parameters=tuple(names),
        parameter_count=sum(elements[name] for name in names),
        recompute=(Segment(first=first, stop=stop),) if recomputed else (),
        times=tuple(_stage_times(problem, found, index, size) for size in sorted({*found.split.sizes}, reverse=True)),
        optimizer_s=float(seconds_per_byte * problem.parameters.trainable[first, stop]),
        memory=memory_of(problem, device, found.split, recompute=recomputed).stage(first, stop),
    )


def _end_paths(profile: Profile, first: int, stop: int) -> tuple[str, str]:
    """Module path of the first and the last operation of a stage."""
    paths = [path for layer in profile.layers[first:stop] for path in layer.module_paths or (layer.name,)]
    return paths[0], paths[-1]


def _stage_times(problem: Problem, found: Balance, index: int, size: int) -> StageTimes:
    first, stop = found.cuts[index], found.cuts[index + 1]
    costs = problem.costs.layers(problem.devices[index].kind, size)
    outputs_s, gradients_s = boundary_s(problem, size)
    return StageTimes(
        micro_batch_size=size,
        forward_s=float(costs.forward_s[first:stop].sum()),
        recompute_s=float(costs.recompute_s[first:stop].sum()) if found.recomputed[index] else 0.0,
        backward_s=float(costs.backward_s[first:stop].sum()),
        send_forward_s=float(outputs_s[stop]),
        send_backward_s=float(gradients_s[first]),
    )


def _one_device_s(problem: Problem, found: Balance) -> float:
    """Seconds of the same batch on the first device alone, memory disregarded."""
    kind = problem.devices[0].kind
    seconds = {size: problem.costs.layers(kind, size) for size in {*found.split.sizes}}
    work = {size: float(costs.forward_s.sum() + costs.backward_s.sum()) for size, costs in seconds.items()}
    optimizer_s = (
        problem.costs.optimizer(kind, problem.optimizer).seconds_per_byte * problem.parameters.trainable[0, -1]
    )
    return sum(work[size] for size in found.split.sizes) + float(optimizer_s)
