"""A plan with other seconds than it predicts, and what its step takes then.

longer = scaled_plan(plan, [PassRatios.alike(1.0)] * plan.K, link=1.5)      # all messages half as long again
simulated_step_s(longer) / plan.prediction.step_s - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from planner.kernel.makespan import B, W, makespan_s, walked_s
from planner.measured_ratios import SENDS, PassRatios
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.plan.simulator import Durations, plan_optimizer_s, simulate_plan
from planner.plan.stage import SkipTimes, Stage, StageTimes
from planner.solve.order_arrays import orders_of

_Times = TypeVar("_Times", StageTimes, SkipTimes)


def scaled_plan(
    plan: Plan, ratios: Sequence[PassRatios], link: float, optimizer: Sequence[float] | None = None
) -> Plan:
    """The same plan with other seconds; what it predicts of the step stays.

    Args:
        plan: the plan.
        ratios: of each stage how many times as long its passes take.
        link: the same of messages and all-reduce.
        optimizer: of each stage the same of its optimizer; by default as long.
    """
    of_stages = zip(plan.stages, ratios, optimizer or [1.0] * plan.K, strict=True)
    stages = tuple(_scaled_stage(stage, by, link, of_optimizer) for stage, by, of_optimizer in of_stages)
    skips = tuple(
        skip.model_copy(update={"times": tuple(_sent(entry, link) for entry in skip.times)}) for skip in plan.skips
    )
    return plan.model_copy(update={"stages": stages, "skips": skips})


def simulated_step_s(plan: Plan) -> float:
    """Seconds of the plan's step, the simulator's number, a hundred times as soon where nothing skips stages.

    With 64 stages and 512 micro-batches that is after 30 ms, and with skips after 2.5 s [measured].
    """
    if plan.skips:
        return simulate_plan(plan, events=False).step_s
    own = Durations.of(plan)
    rows = [own.forward_s, own.recompute_s, own.backward_s, own.send_forward_s, own.send_backward_s, own.weight_s]
    seconds = np.array(rows)  # as `planner.kernel.makespan` has them
    if SCHEDULES[plan.schedule].splits_backward:
        seconds[B] -= seconds[W]
    if plan.orders:
        passes_s = walked_s(orders_of(plan.orders, plan.M, plan.chunks), seconds, plan.ring)
    else:
        passes_s = makespan_s(plan.schedule, seconds, plan.chunks)
    return passes_s + plan_optimizer_s(plan)


def _scaled_stage(stage: Stage, by: PassRatios, link: float, optimizer: float) -> Stage:
    times = []
    for entry in stage.times:
        weight_s = by.weight * entry.weight_s
        seconds = {
            "forward_s": by.forward * entry.forward_s,
            "recompute_s": by.recompute * entry.recompute_s,
            "backward_s": weight_s + by.other * (entry.backward_s - entry.weight_s),
            "weight_s": weight_s,
        }
        times.append(_sent(entry.model_copy(update=seconds), link))
    ends = {"all_reduce_s": stage.all_reduce_s * link, "optimizer_s": stage.optimizer_s * optimizer}
    return stage.model_copy(update={"times": tuple(times), **ends})


def _sent(entry: _Times, link: float) -> _Times:
    return entry.model_copy(update={what: getattr(entry, what) * link for what in SENDS})
