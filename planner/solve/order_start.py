"""A plan of another schedule with orders of its own: with the same stages, devices and segments.

The search of `planner.solve.own_order_plans` keeps or recomputes a stage as a whole; that of 1F1B knows segments, which
need less memory. So its plan is one to start from, where there is little: with the gradients of parameters at once
after those of inputs it holds no more than before, and takes no longer but for what taking them apart costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from planner.cost.stage_memory import StageMoments, stage_moments
from planner.kernel.any_order import any_order_s
from planner.kernel.turns import ways
from planner.plan.held import Held, held_in
from planner.plan.schedules import SCHEDULES, Ring, ScheduleName
from planner.solve.balance import Balance, evaluate_s, fits, passes_seconds
from planner.solve.deadline import Deadline
from planner.solve.order_arrays import texts_of
from planner.solve.own_order_plans import chunk_bytes, room_arrays, room_of
from planner.solve.own_orders import best_orders
from planner.solve.problem import Problem


def split_of(problem: Problem, plan: Balance, schedule: ScheduleName, deadline: Deadline) -> Balance | None:
    """The plan with its backward passes split; None if it does not fit then.

    Args:
        problem: that it solves.
        plan: with one stage a rank.
        schedule: one that splits them, with its own order or with one that it makes.
        deadline: when to take what there is.
    """
    if SCHEDULES[schedule].made_for_plan:
        return with_own_orders(problem, plan, schedule, deadline)
    candidate = replace(plan.candidate, schedule=schedule, ring=Ring(len(plan.stages), 1))
    if not fits(problem, candidate, plan.stages):
        return None
    return Balance(candidate, plan.stages, evaluate_s(problem, candidate, plan.stages), 0.0)


def with_own_orders(problem: Problem, plan: Balance, schedule: ScheduleName, deadline: Deadline) -> Balance | None:
    """The plan with the fastest orders found that fit; None if there are none.

    Args:
        problem: that it solves.
        plan: with one stage a rank.
        schedule: one that makes orders.
        deadline: when to take what there is.
    """
    candidate = replace(plan.candidate, schedule=schedule, ring=Ring(len(plan.stages), 1))
    split = candidate.split
    memories = [
        partial(
            stage_moments,
            problem.costs,
            problem.parameters,
            device := problem.classes[stage.device_class].device,
            schedule,
            split,
            problem.costs.optimizer(device.kind, problem.optimizer),
            number=len(plan.stages) - index,
            first=stage.first,
            stop=stage.stop,
            segments=stage.segments,
            ring=candidate.ring,
            replicas=problem.as_replicas(candidate.replicas),
            carrier=problem.carrier(device),
        )
        for index, stage in enumerate(plan.stages)
    ]
    limits = [problem.classes[stage.device_class].device.memory_bytes for stage in plan.stages]

    def bytes_of(index: int, held: Sequence[Held]) -> StageMoments:
        return memories[index](held=held)

    rooms = [
        room_of([chunk_bytes(partial(bytes_of, index), split.count)], limits[index])
        for index in range(len(plan.stages))
    ]
    seconds = passes_seconds(problem, candidate, plan.stages)
    least_s = any_order_s(seconds, np.array([max(1, *room.most()) for room in rooms]), ways(candidate.ring))
    found = best_orders(seconds, room_arrays(rooms, candidate.ring), least_s, deadline)
    if found is None:
        return None
    held = [held_in(order, split.count) for order in found[1]]
    if any(bytes_of(index, each).largest.total > limits[index] for index, each in enumerate(held)):
        return None
    texts = texts_of(found[1], split.count)
    return Balance(candidate, plan.stages, evaluate_s(problem, candidate, plan.stages, texts), 0.0, texts)
