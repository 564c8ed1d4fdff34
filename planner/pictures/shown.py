"""What a picture of a plan shows, as a data frame: for programs, and for pictures of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas

from planner.pictures.layers import layer_costs_of
from planner.plan.simulator import simulate_plan

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from profiler.record import Profile


def timeline_frame(plan: Plan) -> pandas.DataFrame:
    """One row a box of `plot_timeline`: lane, action, stage, micro-batch, and when it starts and ends."""
    return pandas.DataFrame(
        [
            {
                "lane": event.lane,
                "action": str(event.action.kind),
                "stage": event.action.stage,
                "micro_batch": event.action.micro_batch,
                "start_s": event.start_s,
                "end_s": event.end_s,
            }
            for event in simulate_plan(plan).events
        ]
    )


def memory_frame(plan: Plan) -> pandas.DataFrame:
    """One row a bar of `plot_memory`: bytes by class, all of them, and the device's limit."""
    rows = [
        {
            **{f"{name}_bytes": size for name, size in memory.model_dump().items()},
            "total_bytes": memory.total,
            "device_bytes": plan.stages[row].device.memory_bytes,
        }
        for row, memory in enumerate(plan.device_memories)
    ]
    return pandas.DataFrame(rows).rename_axis("rank" if plan.chunks > 1 else "stage").reset_index()


def balance_frame(plan: Plan) -> pandas.DataFrame:
    """One row a bar of `plot_balance`: seconds of the largest micro-batch on each rank."""
    size = max(plan.micro_batch_sizes)
    names = ("forward_s", "recompute_s", "backward_s")
    rows = []
    for rank in range(plan.ranks):
        times = [stage.times_at(size) for stage in plan.stages_of(rank)]
        sums = {name: sum(getattr(entry, name) for entry in times) for name in names}
        rows.append({"rank": rank, "micro_batch_size": size, **sums, "total_s": sum(sums.values())})
    return pandas.DataFrame(rows)


def layers_frame(plan: Plan, profile: Profile) -> pandas.DataFrame:
    """One row a bar of `plot_layers`: the stage, seconds, what crosses after the layer, and whether there is a cut.

    Raises:
        ArgumentError: the profile is of another model.
    """
    costs = layer_costs_of(plan, profile)
    stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(stage.first_layer, stage.stop_layer)]
    cuts = {stage.stop_layer - 1 for stage in plan.stages[:-1]}
    names = ("micro_batch_size", "forward_s", "recompute_s", "backward_s", "output_bytes")
    return pandas.DataFrame(
        [
            {
                "layer": cost.layer,
                "stage": stage_of[cost.layer],
                **{name: getattr(cost, name) for name in names},
                "cut_after": cost.layer in cuts,
            }
            for cost in costs
        ]
    )
