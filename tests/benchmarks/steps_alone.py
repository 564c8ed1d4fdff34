"""Seconds of a plan's steps, taken while nobody else computes on the machine, or nearly so."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pandas
import torch
import torch.distributed as dist

from executor import Pipeline, launch
from planner import Plan
from profiler.tracing.sample import call_arguments
from tests.benchmarks.others_load import OthersLoad
from tests.benchmarks.test_schedule_gains import subject

TRIES, NEARLY_ALONE = 3, 0.08
WARM_UP = 3
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Taken:
    """What one process had.

    Attributes:
        steps_s: seconds of each step, before the optimizer's.
        others: how many cores others used meanwhile.
        measured: what the pipeline says of its steps.
    """

    steps_s: list[float]
    others: float
    measured: pandas.DataFrame


def steps_alone(plan: Plan, name: str, count: int) -> Taken:
    """So many steps of the slowest process, of the try in which others used least of the machine."""
    tries = []
    for _ in range(TRIES):
        ranks = launch(_taken, plan, (name, count), timeout_s=TIMEOUT_S)
        slowest_s = [max(each) for each in zip(*(rank.steps_s for rank in ranks), strict=True)]
        tries.append(Taken(slowest_s, ranks[0].others, ranks[0].measured))
        if tries[-1].others <= NEARLY_ALONE:
            break
    return min(tries, key=lambda one: one.others)


def _taken(plan: Plan, name: str, count: int) -> Taken:
    model, _ = subject(name)
    args, kwargs = call_arguments(model.sample)
    pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn, compare_first_step=False, replan=None)
    for _ in range(WARM_UP):
        pipe.step(*args, target=model.target, **kwargs)
    steps_s = []
    dist.barrier()
    own_s = time.process_time()
    with OthersLoad() as others:
        for _ in range(count):
            model.model.zero_grad()
            dist.barrier()
            begun_s = time.perf_counter()
            pipe.step(*args, target=model.target, **kwargs)
            steps_s.append(time.perf_counter() - begun_s)
    everyones_s = torch.tensor(time.process_time() - own_s)
    dist.all_reduce(everyones_s)
    return Taken(steps_s, others.cores(everyones_s.item()), pipe.measured())
