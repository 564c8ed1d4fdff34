"""For Hugging Face accelerate: `device_map`, and the split points of `prepare_pippy`.

    model = AutoModelForCausalLM.from_pretrained(name, device_map=plan.export("huggingface", model).value["device_map"])

A `device_map` says where modules lie; the model's own code then runs on one device after the other. `prepare_pippy`
runs micro-batches through stages, forward only.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from planner.export.around import lines_text
from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import called_paths, owners
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.plan.units import seconds_text
from profiler.tracing.sites import Site


def _make(request: Request) -> Made:
    plan, stages = request.plan, request.unit_paths
    device_map = {path: stage.device.name for paths, stage in zip(stages, plan.stages, strict=True) for path in paths}
    for name in _beside(request.model, device_map):
        device_map[name] = _device_at(request, name)
    meeting = _meetings(request, device_map)
    value = {"device_map": device_map, "split_points": [paths[0] for paths in stages[1:]], "num_chunks": plan.M}
    notes = (
        f"With a device_map one device computes at a time: about {seconds_text(one_after_the_other_s(plan))} for the "
        f"batch where the pipeline takes {seconds_text(plan.prediction.step_s)}; prepare_pippy is for inference.",
        *(
            (
                "With the device_map tensors of several devices meet outside of its modules, and accelerate moves only "
                f"what these are called with: move one to the other's device in {lines_text(meeting)}.",
            )
            if meeting
            else ()
        ),
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


def _meetings(request: Request, device_map: Mapping[str, str]) -> list[Site]:
    """Operations of no module in the map that read tensors of several devices.

    What a module in the map computes lies on its device, whatever it is called with, and what the model is called with
    on the first. Of several devices the result is taken to lie on the last.
    """
    sequence = request.sequence
    devices = [*dict.fromkeys(stage.device.name for stage in request.plan.stages)]
    at = dict.fromkeys(sequence.inputs, devices[0])
    for name in (*sequence.parameters, *sequence.buffers):
        for path in owners(sequence.aliases.get(name, (name,)), device_map):
            at[name] = device_map[path]
    meeting = []
    for site in sequence.sites():
        inside = owners(site.module_paths, device_map)
        found = {device_map[path] for path in inside} or {at[name] for name in site.reads if name in at}
        if len(found) > 1 and not inside and not site.moves:
            meeting.append(site)
        if found and (inside or not site.moves):
            at[site.name] = max(found, key=devices.index)
    return meeting


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
