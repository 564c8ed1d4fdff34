"""For DeepSpeed: the `parts` of a `PipelineModule`, the bounds of its stages among its layers, and its configuration.

DeepSpeed balances by itself, by parameters or by class; other bounds take a subclass of three lines, which `text` has.
Its layers are the children of an `nn.Sequential` that only calls them, each once; of another model the blocks of its
lists and what stands next to them, which its user writes as such a list.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from planner.export.around import hooks_around, lines_text, operations_around
from planner.export.refusing import apart, calls_of, refuse_other_calls
from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import called_paths, calls_each_child_once, child_paths
from planner.plan.schedules import schedules_of
from profiler.precision import precision_named, recipe_of

_SCRIPT = """\
from deepspeed.pipe import PipelineModule


class PlannedModule(PipelineModule):  # with the stages of the plan
    def _partition_layers(self, method="uniform"):
        self.parts = {parts}
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


# layers: {layers}
module = PlannedModule(
    layers, num_stages={stages}, loss_fn=loss_fn, activation_checkpoint_interval={interval}
)
# configuration: {config}
"""


def _make(request: Request) -> Made:
    plan, stages, notes = request.plan, request.unit_paths, []
    if not calls_each_child_once(request.model):
        stages = tuple(tuple(path for path in paths if calls_of(request.sequence, path)) for paths in stages)
        done, hooked = operations_around(request), hooks_around(request)
        notes.append(
            "PipelineModule calls layers one after the other: what the model does between these modules must become "
            f"part of them{f': {lines_text(done)}' if done else ''}."
        )
        if hooked:
            notes.append(f"Forward hooks of {' and '.join(hooked)} are not called there.")
    parts = [0, *accumulate(len(paths) for paths in stages)]
    config: dict[str, Any] = {
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": request.micro_batch_size,
        "gradient_accumulation_steps": plan.M,
    }
    recipe = recipe_of(plan.sample.precision)
    if recipe is not None:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": precision_named(recipe.adds)}}
    if plan.shard_optimizer:
        config["zero_optimization"] = {"stage": 1}
    value: dict[str, Any] = {
        "num_stages": plan.K,
        "parts": parts,
        "layers": [path for paths in stages for path in paths],
        "activation_checkpoint_interval": int(request.recomputes),
        "config": config,
    }
    for name in apart(plan, request.sequence):
        notes.append(f"{name} is shared by stages: give the layers that use it as TiedLayerSpec.")
    text = _SCRIPT.format(
        parts=parts,
        layers=", ".join(value["layers"]),
        stages=plan.K,
        interval=value["activation_checkpoint_interval"],
        config=config,
    )
    return Made(value, text, {"deepspeed_module.py": text}, tuple(notes))


def _target(otherwise: Target | None = None, **differences: Any) -> Target:
    return Target(
        name="deepspeed",
        engine="DeepSpeed",
        make=_make,
        schedules=schedules_of("deepspeed"),
        recompute=Recompute.UNITS,
        adds_tied=True,
        averages_replicas=True,
        shards_optimizer=True,
        precisions=("bf16-mixed", "bf16-grads"),
        otherwise=otherwise,
        **differences,
    )


TARGET = _target(
    unit_paths=child_paths,
    between="children of the nn.Sequential",
    suits=lambda plan, model: calls_each_child_once(model),
    otherwise=_target(
        unit_paths=called_paths,
        between="blocks and the modules next to them",
        tensors_between=1,
        check=lambda request: refuse_other_calls(request, "DeepSpeed", request.all_units),
    ),
)
