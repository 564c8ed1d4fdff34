"""For torchtitan: which modules each part of the model has, the schedule and the micro-batches, as TOML.

The modules are those that torchtitan's own split knows: children of the model, and what its lists hold. Schedules that
torch has under the same name are named; of others the passes come as a CSV file. Of these torchtitan has stages round
and round the ranks, and no other placement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from planner.export.around import hooks_around, lines_text, operations_around
from planner.export.refusing import OURS, calls_of, refuse_other_calls
from planner.export.target import Made, Recompute, Request, Target
from planner.export.torch_pipelining import passes_of
from planner.export.units import listed_paths
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from profiler.errors import InfeasibleError

SCHEDULE_FILE = "schedule.csv"


def _schedule(plan: Plan) -> dict[str, str]:
    """Options that name the schedule; torch's 1F1B needs as many micro-batches as stages.

    Those that torch has are the same pass by pass, but for the order in which micro-batches go back.
    """
    same = SCHEDULES[plan.schedule].elsewhere.get("torchtitan")
    if same is not None and plan.M >= plan.K:
        return {"pipeline_parallel_schedule": same}
    return {"pipeline_parallel_schedule": "PipelineScheduleMulti", "pipeline_parallel_schedule_csv": SCHEDULE_FILE}


def _make(request: Request) -> Made:
    plan = request.plan
    schedule = _schedule(plan)
    value: dict[str, dict[str, Any]] = {
        "parallelism": {
            "pipeline_parallel_degree": plan.ranks,
            "data_parallel_replicate_degree": plan.replicas,
            "module_fqns_per_model_part": [list(paths) for paths in request.unit_paths],
            **schedule,
            "pipeline_parallel_microbatch_size": request.micro_batch_size,
        },
        "training": {"local_batch_size": plan.batch_size // plan.replicas, "global_batch_size": plan.batch_size},
        "activation_checkpoint": {"mode": "full" if request.recomputes else "none"},
    }
    notes = [
        "The model's forward must go on without the modules that its part lacks (torchtitan sets them to None), and "
        "hand on one tensor.",
        "Versions without TOML take the same names as options, such as --parallelism.pipeline_parallel_degree.",
    ]
    done = operations_around(request)
    if done:
        notes.append(f"What the model does around its modules runs in each part; let one alone do {lines_text(done)}.")
    files = {"torchtitan.toml": _toml(value)}
    if "pipeline_parallel_schedule_csv" in schedule:
        files[SCHEDULE_FILE], on_passes = passes_of(plan, request.sequence)
        notes += [f"{SCHEDULE_FILE} has the passes; give its path as torchtitan finds it.", *on_passes]
    return Made(value, files["torchtitan.toml"], files, tuple(notes))


def _check(request: Request) -> None:
    """Its split renumbers lists, and gives each module to one part; what the model never calls matters in lists.

    The model's own forward pass runs in each part, and so do its hooks.
    """
    if hooks_around(request):
        raise InfeasibleError(
            f"torchtitan would call the model's own forward hooks and pre-hooks in each of {request.plan.K} parts; put "
            f"them on the module that runs first or last, or {OURS}"
        )
    called = [path for path in request.all_units if calls_of(request.sequence, path)]
    refuse_other_calls(request, "torchtitan", [*called, *request.blocks])


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of strings, whole numbers, and lists of lists of strings, which TOML writes as JSON does."""
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])
        for name, table in tables.items()
    )


TARGET = Target(
    name="torchtitan",
    engine="torchtitan",
    make=_make,
    schedules=tuple(name for name, record in SCHEDULES.items() if not record.folds),
    unit_paths=listed_paths,
    between="the model's children and the members of its lists",
    tensors_between=1,
    recompute=Recompute.BLOCKS,
    averages_replicas=True,
    check=_check,
)
