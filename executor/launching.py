"""`launch`: run a training function in one local process per stage of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from executor.watch.accusation import timeout_for
from executor.watch.position import describe
from executor.world import PROCESS_GROUP_TIMEOUT_S, TIMEOUT_VARIABLE
from planner.plan.plan import Plan
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.machine.backend import backend_of
from profiler.machine.workers import run_workers
from profiler.quantities import check_seconds, shown


@fits_its_arguments
def launch(
    fn: Callable[..., Any], plan: Plan, args: Sequence[Any] = (), *, timeout_s: float | None = None
) -> list[Any]:
    """Call `fn(plan, *args)` on this machine, in one process for each rank of each replica of the plan.

        def train(plan):
            pipe = Pipeline(Model(), plan, loss_fn=cross_entropy)
            ...
            return losses

        losses = launch(train, plan)[0]

    Works from scripts and notebooks alike, without a `__main__` guard: `fn` travels by value where it must. The random
    numbers of torch, Python and numpy begin alike in all processes, at the caller's `torch.initial_seed()`: each builds
    the same model and shuffles alike, and `torch.manual_seed(7)` before decides how.

    Args:
        fn: what each process runs.
        plan: the plan.
        args: further arguments of `fn`.
        timeout_s: how long a process waits for another before all end; None: 20 predicted steps, at least 20 s and at
            most 60 s.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        ArgumentError: an argument means nothing, or `fn` uses what cannot go to another process.
        PlanError: a process raised one of our errors (a `ForeignPlanError`, say); of the same class, with the rank.
        ExecutionError: a process raised anything else, died or got stuck. Either way all are ended, and the message
            names the rank that failed first, where it was (step, stage, micro-batch, action) and the cause.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"launch got a {type(plan).__name__} as plan; call launch(fn, plan)")
    if not callable(fn):
        raise ArgumentError(f"fn is {shown(fn)}; pass a function of the plan, launch(fn, plan)")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ArgumentError(f"args is {shown(args)}; pass a tuple of fn's further arguments, launch(fn, plan, (x,))")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    threads = max((stage.device.threads for stage in plan.stages), default=1)
    limit_s = timeout_for(plan) if timeout_s is None else timeout_s
    on_cpu = all(backend_of(stage.device.name).is_host for stage in plan.stages)
    return run_workers(
        fn,
        [(plan, *args)] * (plan.ranks * plan.replicas),
        threads=max(threads, 1),
        timeout_s=max(PROCESS_GROUP_TIMEOUT_S, 2 * limit_s),
        environment={TIMEOUT_VARIABLE: str(limit_s)},
        seed=torch.initial_seed(),
        own_cores=on_cpu,
        describe=describe,
    )
