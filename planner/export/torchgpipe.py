"""For torchgpipe: `balance`, devices, M and what is recomputed.

    made = plan.export("torchgpipe", model)
    pipeline = GPipe(made.module, **made.value)
    loss = loss_fn(pipeline(x), y)                # of the whole mini-batch

An `nn.Sequential` that only calls its children, each once, stays as it is, and `balance` counts them; cuts inside a
child move to its border. Of any other model, `made.module` is an `nn.Sequential` of its stages
(`planner.export.stage_module`), with the plan's own cuts and recompute, and `balance` is 1 for each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from planner.export.stage_module import StageModule, check_outputs
from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import calls_each_child_once, child_paths
from planner.plan.schedules import schedules_of
from profiler.errors import InfeasibleError
from profiler.sample_spec import TensorLeaf


class SequentialStage(StageModule):
    """A stage as a child of an `nn.Sequential`: one argument, one result, each a tensor or a tuple of several."""

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Any:  # type: ignore[override]
        """Run the layers on a micro-batch."""
        left = super().forward(*(given if isinstance(given, tuple) else (given,)))
        return left[0] if len(left) == 1 else left


def _arguments(request: Request, balance: list[int], checkpoint: str) -> dict[str, Any]:
    has_statistics = any(layer.statistics for layer in request.sequence.layers)
    return {
        "balance": balance,
        "devices": [stage.device.name for stage in request.plan.stages],
        "chunks": request.plan.M,
        "checkpoint": checkpoint,
        "deferred_batch_norm": has_statistics,
    }


def _text(arguments: dict[str, Any]) -> str:
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"GPipe(model, {listed})\n"


def _children(request: Request) -> Made:
    balance = [len(paths) for paths in request.unit_paths]
    arguments = _arguments(request, balance, "except_last" if request.recomputes else "never")
    return Made(arguments, _text(arguments), module=request.model)


def _stages(request: Request) -> Made:
    check_outputs(request.sequence)
    stages = [SequentialStage(request.sequence, stage) for stage in request.plan.stages]
    arguments = _arguments(request, [1] * len(stages), "never")
    notes = [
        "The model is no nn.Sequential of plain calls: pass the one that plan.export returns as `module`. Its children "
        "are the stages, and recompute what the plan says themselves.",
    ]
    if len(request.sequence.inputs) > 1:
        notes.append(f"It takes one tuple of tensors: {', '.join(request.sequence.inputs)}.")
    outputs = [name for name in request.sequence.output_shapes if request.sequence.output_shapes[name] == ()]
    if outputs:
        notes.append(f"{outputs[0]} comes as one number for each micro-batch; their mean is that of the batch.")
    return Made(arguments, _text(arguments), notes=tuple(notes), module=nn.Sequential(*stages))


def _check_stages(request: Request) -> None:
    dims = {leaf.batch_dim for leaf in request.sequence.sample.leaves if isinstance(leaf, TensorLeaf)}
    if dims != {0}:
        raise InfeasibleError(
            f"torchgpipe cuts all inputs along dimension 0, and those of this model have the batch in dimensions "
            f"{sorted(map(str, dims))}; give it a model whose inputs all have the batch first"
        )


TARGET = Target(
    name="torchgpipe",
    engine="torchgpipe",
    make=_children,
    schedules=schedules_of("torchgpipe"),
    unit_paths=child_paths,
    between="children of the nn.Sequential",
    recompute=Recompute.STAGES,
    defers_statistics=True,
    one_process=True,
    suits=lambda plan, model: calls_each_child_once(model) and plan.sample.autocast is None,
    otherwise=Target(
        name="torchgpipe",
        engine="torchgpipe",
        make=_stages,
        schedules=schedules_of("torchgpipe"),
        unit_paths=None,
        recompute=Recompute.ANY,
        one_process=True,
        autocasts=True,
        check=_check_stages,
    ),
)
