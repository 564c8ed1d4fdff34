"""`plan.export`: a plan as another engine takes it, by one registry with a row for each target.

    made = plan.export("torchgpipe", model)
    print(made)                                    # what moved to block borders, what that costs, and the text to paste
    pipeline = GPipe(made.module, **made.value)

First what the engine would train wrongly is refused (`refusing`), then cuts and recompute become such as it can have
(`moving`), and then its row writes them down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isclose
from typing import Final

from torch import nn

from planner.export import deepspeed, hugging_face, megatron, torch_pipelining, torchgpipe, torchtitan
from planner.export.moving import Form, moved
from planner.export.refusing import refuse_what_goes_wrong
from planner.export.target import Export, Move, Request, Target
from planner.export.units import Units, units_of
from planner.plan.of_model import check_model, traced_as_planned
from planner.plan.plan import Plan
from planner.plan.units import seconds_text
from planner.planned_for import ROUNDING, in_order_of_processes
from profiler.arguments import meant
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError
from profiler.quantities import shown
from profiler.record import Profile
from profiler.tracing.sequence import LayerSequence

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        torch_pipelining.TARGET,
        torchgpipe.TARGET,
        torchtitan.TARGET,
        megatron.TARGET,
        deepspeed.TARGET,
        hugging_face.TARGET,
    )
}
"""By name, in the order in which help lists them."""


def export(
    plan: Plan,
    target: str,
    model: nn.Module,
    *,
    profile: Profile | None = None,
    devices: Cluster | Sequence[Device] | None = None,
) -> Export:
    """The plan for another engine.

    Args:
        plan: what is to run there.
        target: a key of `TARGETS`.
        model: that the plan was made for.
        profile: what the plan was made from, which a plan made in this process knows itself. Needed where cuts must
            move to the borders of modules.
        devices: what it was made for, likewise. Needed with the profile where links are not the profile's.

    Raises:
        ArgumentError: there is no such target, or a cut must move and there is no profile, or by the profile's link the
            plan takes another time than it says.
        ForeignPlanError: the plan was made for another model, from another profile or for other devices.
        InfeasibleError: the engine cannot run the plan, or would train wrongly by it; the message says why, and what to
            do.
    """
    row = known_target(target).row_for(plan, model)
    sequence = traced_as_planned(model, plan)
    check_model(model, sequence, plan)
    refuse_what_goes_wrong(plan, sequence, row)
    units = None if row.unit_paths is None else units_of(sequence, model, row.unit_paths)
    row.check(Request(plan, model, sequence, units))
    profile = plan.profile if profile is None else profile
    there = moved(plan, _form(row, plan, sequence, units), profile, devices)
    refuse_what_goes_wrong(there.plan, sequence, row)  # a cut that moved may part what was together
    made = row.make(Request(there.plan, model, sequence, units))
    return Export(
        target=row.name,
        plan=there.plan,
        original=plan,
        original_s=there.original_s,
        value=made.value,
        text=made.text,
        files=made.files,
        notes=(*made.notes, *_placement_notes(row, there.plan, plan.cluster if devices is None else devices, profile)),
        module=made.module,
        moves=tuple(
            Move(index, old.first_layer, new.first_layer, new.module_paths[0])
            for index, (old, new) in enumerate(zip(plan.stages, there.plan.stages, strict=True))
            if old.first_layer != new.first_layer
        ),
    )


def _placement_notes(
    row: Target, plan: Plan, devices: Cluster | Sequence[Device] | None, profile: Profile | None
) -> list[str]:
    """Where processes belong, if the engine numbers them otherwise than their devices are on the hosts.

    Args:
        row: the engine's.
        plan: as it runs it.
        devices: that the plan was made for, where that is known.
        profile: what it was made from, likewise.
    """
    planned = [*chain.from_iterable(plan.positions)]
    if row.one_process or planned == sorted(planned):
        return []
    costs = "stages would be on other devices than planned"
    if profile is not None and isinstance(devices, Cluster) and len({device.kind for device in devices.devices}) == 1:
        step_s, not_fitting = in_order_of_processes(plan, profile, devices)
        if not not_fitting and isclose(step_s, plan.prediction.step_s, rel_tol=ROUNDING):
            return []
        costs = f"a step would take {seconds_text(step_s)} by our prediction"
        if not_fitting:
            costs = f"rank {not_fitting[0]} would not fit in its device's memory"
    return [
        f"Processes 0 to {len(planned) - 1} of {row.engine} belong on devices {', '.join(map(str, planned))} of the "
        f"cluster that was planned for; numbered from host to host, as torchrun does it, {costs}."
    ]


def known_target(name: str) -> Target:
    """The row of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = meant(str(name).lower(), TARGETS, cutoff=0.4)
    raise ArgumentError(f"there is no target {shown(name)}{near}; there are {', '.join(TARGETS)}")


def _form(row: Target, plan: Plan, sequence: LayerSequence, units: Units | None) -> Form:
    positions = None if units is None else _places(row, plan, sequence, units)
    between = "layers" if row.unit_paths is None else row.between
    return Form(positions, row.recompute, units, row.name, between)


def _places(row: Target, plan: Plan, sequence: LayerSequence, units: Units) -> frozenset[int]:
    """One position for each number of units before it: the plan's own cut, or the last before the next unit."""
    own = {stage.stop_layer for stage in plan.stages}
    chosen: dict[int, int] = {}
    possible = row.borders(units)
    for position, count in units.before.items():
        crosses = sum(value.requires_grad for value in sequence.boundaries[position])
        if count not in possible or (row.tensors_between is not None and crosses > row.tensors_between):
            continue
        if chosen.get(count) not in own:
            chosen[count] = position
    return frozenset(chosen.values())
