"""What of a time limit a search has: the rest is for making its plan, which takes seconds where stages are many."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

from planner.plan.actions import make_schedule
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES, ScheduleName, one_chunk_schedules
from planner.plan.simulator import Durations, simulate
from planner.solve.deadline import Deadline
from planner.solve.equal_groups import best_plan
from planner.solve.own_links import step_s
from planner.solve.problem import Problem

LEAST_SHARE = 0.25
"""Of a time limit, that the search has at least [chosen]."""
STAGES_TRIED, MICRO_BATCHES_TRIED, TIMES_TRIED = 8, 64, 5
"""Of the steps that say how fast plans are simulated here and now [chosen: 10 ms each]."""
MAKING_SHARE = 2.0
"""Seconds of making a plan in parts of simulating that many passes [fitted: 64 to 128 stages, 1,024 micro-batches]."""


def best_in_time(problem: Problem, spent_s: float) -> Plan | None:
    """The fastest plan that is found within the time limit, that of making it included.

    To make the plan with most passes may take longer than the limit, though the fastest one has far fewer. So the first
    search has what that would leave, a share of the limit at least, and what its plan has left goes to another search
    if that is more. With 1,024 devices and 8 s they have 1.8 and 5.1 s.

    Args:
        problem: with a time limit or without.
        spent_s: seconds of it that are over.
    """
    limit_s = problem.settings.time_limit_s
    if limit_s is None:
        return best_plan(problem)
    began_s = time.monotonic() - spent_s
    pass_s = simulated_pass_s() * MAKING_SHARE
    share_s = max(limit_s - spent_s - pass_s * _most_passes(problem), limit_s * LEAST_SHARE)
    best: Plan | None = None
    while True:
        settings = replace(problem.settings, time_limit_s=share_s)
        best = _faster(best, best_plan(replace(problem, settings=settings)))
        own_s = 0.0 if best is None else pass_s * _passes(best.schedule, best.K, best.M)
        left_s = limit_s - (time.monotonic() - began_s) - own_s
        proven = best is not None and best.prediction.gap == 0
        if left_s <= share_s or proven or Deadline(None).interrupted:
            return best
        share_s = left_s


def _faster(one: Plan | None, other: Plan | None) -> Plan | None:
    """The faster one of two plans of a problem; what none is below is the larger one of what both say."""
    if one is None or other is None:
        return one or other
    best = min(one, other, key=step_s)
    lower_bound_s = max(one.prediction.lower_bound_s, other.prediction.lower_bound_s)
    gap = best.prediction.step_s / lower_bound_s - 1
    found = best.prediction.model_copy(update={"lower_bound_s": lower_bound_s, "gap": max(0.0, gap)})
    return best.model_copy(update={"prediction": found})


def _passes(schedule: ScheduleName, stages: int, count: int) -> int:
    """Of a step, in all stages."""
    return (3 if SCHEDULES[schedule].splits_backward else 2) * stages * count


def _most_passes(problem: Problem) -> int:
    """Of the longest step."""
    every = (
        _passes(one.schedule, problem.most_stages(one.replicas, one.split.count), one.split.count)
        for one in problem.candidates()
    )
    return max(every, default=0)


def making_s(problem: Problem) -> float:
    """Seconds after a search, about, in which the plan with most passes is made and simulated."""
    return simulated_pass_s() * MAKING_SHARE * _most_passes(problem)


def simulated_pass_s() -> float:
    """Seconds of simulating one pass of a step, by the clock: others may be computing, too.

    The median of some: after a model was traced one garbage collection took 30 times as long as the step [measured],
    and the search, which is left what making the plan does not take, was given a tenth of its time.
    """
    stages, count = STAGES_TRIED, MICRO_BATCHES_TRIED
    each = ((1.0,) * count,) * stages
    seconds = []
    for _ in range(TIMES_TRIED):
        began_s = time.monotonic()
        schedule = make_schedule(
            one_chunk_schedules()[0], stages=stages, micro_batches=count, recompute=[False] * stages
        )
        simulate(schedule, Durations(each, each, each, each, each), events=False)
        seconds.append(time.monotonic() - began_s)
    return median(seconds) / (2 * stages * count)
