"""Whether a plan belongs to a model: the model's layers, traced as the plan says, and what they are compared by."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
from torch import nn

from planner.plan.plan import Plan
from profiler.errors import ArgumentError, ForeignPlanError, NotTraceableError, PlanError, PlanFileError
from profiler.text import counted
from profiler.tracing.dataflow import skip_users
from profiler.tracing.sequence import LayerSequence
from profiler.tracing.tracing import check_model as check_is_model
from profiler.tracing.tracing import trace


def traced_as_planned(model: nn.Module, plan: Plan) -> LayerSequence:
    """The model's layers, traced as the plan says.

    Raises:
        ForeignPlanError: it is not called as the plan's sample says.
        PlanError: it cannot be traced, or is no model.
    """
    check_is_model(model)
    try:
        return trace(model, plan.sample, progress=False)
    except NotTraceableError as problem:
        said = f"the plan may be of another model, then plan again for this {type(model).__name__}: {problem}"
        raise NotTraceableError(said, modules=problem.modules, functions=problem.functions) from problem
    except ArgumentError as problem:
        raise ForeignPlanError(
            f"the plan was made for another model than this {type(model).__name__}: {problem}; plan again for this "
            "model, or give the one that was planned for"
        ) from problem
    except PlanError:
        raise
    except Exception as problem:
        raise PlanFileError(
            f"the plan's sample does not describe a call of a model ({type(problem).__name__}: {problem}); plan again"
        ) from problem


def check_model(model: nn.Module, sequence: LayerSequence, plan: Plan) -> None:
    """Refuse a plan of another model.

    Args:
        model: that the plan is to be used for.
        sequence: its layers, traced as planned.
        plan: to be checked.

    Raises:
        ForeignPlanError: the model's fingerprint or number of layers is not the plan's, or a value cannot skip stages
            as the plan says.
    """
    if sequence.fingerprint != plan.model_fingerprint:
        _refuse_another_each_time(sequence, traced_as_planned(model, plan))
        raise ForeignPlanError(
            f"the plan was made for a model with fingerprint {plan.model_fingerprint}, this model has "
            f"{sequence.fingerprint} (torch {torch.__version__}); plan again for this model; if it is the same, what "
            "it computes changes at times with something outside of tensors (an object's address, the time); keep that "
            "in a buffer or pass it as an input"
        )
    if plan.stages[-1].stop_layer != len(sequence):
        raise ForeignPlanError(
            f"the plan's stages hold {counted(plan.stages[-1].stop_layer, 'layer')}, the model has "
            f"{len(sequence)}; plan again"
        )
    if plan.skips:
        _check_skips(sequence, plan)


def _refuse_another_each_time(one: LayerSequence, other: LayerSequence) -> None:
    """Refuse a model whose trace is another one each time.

    Raises:
        ForeignPlanError: naming the first layer that differs.
    """
    if one.fingerprint == other.fingerprint:
        return
    pairs = zip(one.layers, other.layers, strict=False)
    layer = next((a for a, b in pairs if a.signature != b.signature), one.layers[min(len(one), len(other)) - 1])
    raise ForeignPlanError(
        f"each trace of this model is another one, so no plan can be for it: traced twice in a row, its layer "
        f"{layer.index} ({layer.name}{', ' if layer.source else ''}{layer.source}) differs; something outside of "
        "tensors that changes from call to call decides what it computes (a counter, the time, a global variable); "
        "keep it in a buffer or pass it as an input"
    )


def _check_skips(sequence: LayerSequence, plan: Plan) -> None:
    stops = [stage.stop_layer for stage in plan.stages]
    users = {value.name: layers for value, layers in skip_users(sequence).items()}
    for skip in plan.skips:
        for name in skip.values:
            stages = [bisect_right(stops, layer) for layer in users.get(name, ())]
            if skip.ends not in pairwise(stages):
                why = f"uses it in stages {sorted(set(stages))}" if stages else "has no such value that skips layers"
                raise ForeignPlanError(
                    f"the plan sends {name} from stage {skip.sender} to stage {skip.receiver}; this model {why}, so it "
                    "cannot go there directly; plan again for this model"
                )
