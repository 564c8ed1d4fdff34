"""`launch`: run a training function in one local process per stage of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.plan import Plan
from profiler.errors import ArgumentError
from profiler.workers import run_workers

SHORTEST_TIMEOUT_S = 60.0
STEPS_UNTIL_TIMEOUT = 20.0  # a message that takes this many predicted steps will not come any more


def launch(fn: Callable[..., Any], plan: Plan, args: Sequence[Any] = ()) -> list[Any]:
    """Call `fn(plan, *args)` in K processes on this machine, rank k for stage k.

        def train(plan):
            pipe = Pipeline(Model(), plan, loss_fn=cross_entropy)
            ...
            return losses

        losses = launch(train, plan)[0]

    Works from scripts and notebooks alike, without a `__main__` guard: `fn` travels by value where it must.

    Args:
        fn: what each process runs.
        plan: the plan.
        args: further arguments of `fn`.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        PlanError: a process raised one of our errors (a `ForeignPlanError`, say); of the same class, with the rank.
        ExecutionError: a process raised anything else or died. Either way all are ended, and the message names the
            rank that failed first.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"launch got a {type(plan).__name__} as plan; call launch(fn, plan)")
    threads = max((stage.device.threads for stage in plan.stages), default=1)
    timeout_s = max(SHORTEST_TIMEOUT_S, STEPS_UNTIL_TIMEOUT * plan.prediction.step_s)
    on_cpu = all(stage.device.name.startswith("cpu") for stage in plan.stages)
    return run_workers(fn, [(plan, *args)] * plan.K, threads=max(threads, 1), timeout_s=timeout_s, own_cores=on_cpu)
