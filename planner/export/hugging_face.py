"""For Hugging Face accelerate: `device_map`, and the split points of `prepare_pippy`.

    model = AutoModelForCausalLM.from_pretrained(name, device_map=plan.export("huggingface", model).value["device_map"])

A `device_map` says where modules lie; the model's own code then runs on one device after the other. `prepare_pippy`
runs micro-batches through stages, forward only.
"""

from __future__ import annotations

from torch import nn

from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import called_paths, owners
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.plan.units import seconds_text


def _make(request: Request) -> Made:
    plan, stages = request.plan, request.unit_paths
    device_map = {path: stage.device.name for paths, stage in zip(stages, plan.stages, strict=True) for path in paths}
    for name in _beside(request.model, device_map):
        device_map[name] = _device_at(request, name)
    value = {"device_map": device_map, "split_points": [paths[0] for paths in stages[1:]], "num_chunks": plan.M}
    notes = (
        f"With a device_map one device computes at a time: about {seconds_text(one_after_the_other_s(plan))} for the "
        f"batch where the pipeline takes {seconds_text(plan.prediction.step_s)}; prepare_pippy is for inference.",
        *(
            ("The plan recomputes: call model.gradient_checkpointing_enable(), which recomputes each block.",)
            if request.recomputes
            else ()
        ),
    )
    text = f"device_map = {device_map!r}\nsplit_points = {value['split_points']!r}\nnum_chunks = {plan.M}\n"
    return Made(value, text, notes=notes)


def _beside(model: nn.Module, device_map: dict[str, str]) -> list[str]:
    """Parameters and buffers outside of all units, such as a class token."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return [name for name in names if not any(name.startswith(f"{path}.") for path in device_map)]


def _device_at(request: Request, name: str) -> str:
    """Where the values are when the model first reads a parameter or buffer: on the device of the unit before.

    The first of all if it is read before any unit, or by no layer.
    """
    sequence, stages = request.sequence, request.plan.stages
    device = stages[0].device.name
    for stage in stages:
        for layer in sequence.layers[stage.first_layer : stage.stop_layer]:
            if owners(layer.module_paths, request.all_units):
                device = stage.device.name
            read = sequence.names_read(range(layer.index, layer.index + 1))
            if any(name in sequence.aliases.get(known, (known,)) for known in read):
                return device
    return stages[0].device.name


def one_after_the_other_s(plan: Plan) -> float:
    """Seconds of a step in which all passes and messages of all micro-batches wait for each other."""
    seconds = (
        stage.times_at(size).forward_s
        + stage.times_at(size).recompute_s
        + stage.times_at(size).backward_s
        + stage.times_at(size).send_forward_s
        + stage.times_at(size).send_backward_s
        for stage in plan.stages
        for size in plan.micro_batch_sizes
    )
    return sum(seconds) + plan.prediction.optimizer_s


TARGET = Target(
    name="huggingface",
    engine="accelerate",
    make=_make,
    schedules=tuple(SCHEDULES),
    unit_paths=called_paths,
    between="blocks and the modules next to them",
    recompute=Recompute.LEFT_TO_ENGINE,
    one_process=True,
    has_micro_batches=False,
)
