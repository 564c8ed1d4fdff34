"""Whether a plan belongs to this machine and to how it is called: found out before anything runs."""

from __future__ import annotations

import torch
from torch import nn

from executor.run.transports import CHOICES
from planner.plan.plan import Plan
from profiler.errors import ArgumentError, ForeignPlanError, PlanFileError
from profiler.machine.backend import BACKENDS
from profiler.quantities import check_seconds, shown
from profiler.run.loss import LossFunction
from profiler.tracing.sample import keywords_of
from profiler.tracing.sequence import LayerSequence
from profiler.tracing.tracing import check_model as check_module


def check_arguments(
    model: nn.Module,
    plan: Plan,
    *,
    loss_fn: object,
    initialize: object,
    seed: int,
    timeout_s: float | None,
    transport: str,
    **switches: object,
) -> None:
    """What a `Pipeline` is given means something.

    Raises:
        ArgumentError: naming what does not.
    """
    check_module(model)
    if not isinstance(plan, Plan):
        raise ArgumentError(f"the plan is a {type(plan).__name__}; pass a Plan, Plan.load(path) reads one")
    for name, function in (("loss_fn", loss_fn), ("initialize", initialize)):
        if function is not None and not callable(function):
            raise ArgumentError(f"{name} is {shown(function)}; pass a function, or leave it out")
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ArgumentError(f"{name} is {shown(switch)}; give True or False")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ArgumentError(f"the seed is {seed!r}; pass a whole number of at most 64 bits")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    if transport not in CHOICES:
        raise ArgumentError(f"transport={transport!r}; pass one of {', '.join(map(repr, CHOICES))}")


def device_of(plan: Plan, stage: int, replica: int) -> torch.device:
    """The torch device of a stage.

    Raises:
        ForeignPlanError: this machine has no such device.
    """
    name = plan.stages[stage].devices[replica].name
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise PlanFileError(f"stage {stage} is planned for {name!r}, which is no torch device; plan again") from problem
    if device.type not in BACKENDS:
        raise PlanFileError(f"stage {stage} is planned for {name!r}, where no stage runs; plan again")
    there = BACKENDS[device.type].count()
    if there is not None and (device.index or 0) >= there:
        raise ForeignPlanError(
            f"stage {stage} is planned for {device}, but this process sees {there} {device.type.upper()} devices; "
            "plan for the devices that are here"
        )
    return device


def takes_target(sequence: LayerSequence, loss_fn: LossFunction | None) -> bool:
    """Whether the `target` of a step is an argument of the model, which computes its loss itself.

    Raises:
        ArgumentError: the model takes an argument by a name under which `step` takes something else.
    """
    names = keywords_of(sequence.sample)
    taken = {
        "target": "what the loss function compares with",
        "scaler": "what scales gradients",
        "accumulate": "how many calls make a step of the optimizer",
    }
    for name, what in taken.items():
        if name in names and (name != "target" or loss_fn is not None):
            raise ArgumentError(
                f"the model takes an argument {name!r} by keyword, and step takes {what} by this name; plan with a "
                "sample that gives the model its arguments by position"
            )
    return "target" in names
