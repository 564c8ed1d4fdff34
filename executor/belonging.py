"""Whether a plan belongs to this model and this machine: found out before anything runs."""

from __future__ import annotations

import torch
from torch import nn

from planner.plan import Plan
from profiler.errors import ForeignPlanError, PlanError, PlanFileError
from profiler.sequence import LayerSequence
from profiler.tracing import trace


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
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ForeignPlanError(
            f"stage {stage} is planned for {device}, but this process sees {torch.cuda.device_count()} CUDA devices; "
            "plan for the devices that are here"
        )
    return device


def traced_as_planned(model: nn.Module, plan: Plan) -> LayerSequence:
    """The model's layers, traced as the plan says.

    Raises:
        PlanError: the model cannot be traced, or is not called as the plan's sample says.
    """
    try:
        return trace(model, plan.sample)
    except PlanError:
        raise
    except Exception as problem:
        raise PlanFileError(
            f"the plan's sample does not describe a call of a model ({type(problem).__name__}: {problem}); plan again"
        ) from problem


def check_model(sequence: LayerSequence, plan: Plan) -> None:
    """Refuse a plan of another model.

    Raises:
        ForeignPlanError: the model's fingerprint or number of layers is not the plan's.
    """
    if sequence.fingerprint != plan.model_fingerprint:
        raise ForeignPlanError(
            f"the plan was made for a model with fingerprint {plan.model_fingerprint}, this model has "
            f"{sequence.fingerprint} (torch {torch.__version__}); plan again for this model"
        )
    if plan.stages[-1].stop_layer != len(sequence):
        raise ForeignPlanError(
            f"the plan's stages hold {plan.stages[-1].stop_layer} layers, the model has {len(sequence)}; plan again"
        )
