"""Joining the other processes that train: those that `launch` or torchrun started."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from executor.connect.listening import keep_gloo_inside, listener_at
from executor.layout import Layout
from executor.watch.accusation import timeout_for
from planner.plan.plan import Plan
from profiler.errors import ExecutionError, ForeignPlanError
from profiler.machine.backend import HOST, backend_of
from profiler.machine.descriptors import hold_standard_descriptors
from profiler.machine.groups import join_group, leave_group
from profiler.text import counted

TIMEOUT_VARIABLE = "GPIPE_AUTOPLAN_TIMEOUT_S"  # how `launch` tells its workers how long to wait for each other
# Torch's own time-out: longer than it takes to write any checkpoint, since who watches over the ranks knows better
# which wait has become too long, and why.
PROCESS_GROUP_TIMEOUT_S = 600.0


def wait_limit(plan: Plan, timeout_s: float | None) -> float:
    """Seconds that a rank waits for another: what the caller says, or `launch`, or what follows from the plan."""
    announced = os.environ.get(TIMEOUT_VARIABLE)
    if timeout_s is None:
        return timeout_for(plan) if announced is None else float(announced)
    return timeout_s


def join() -> tuple[int, int]:
    """Rank and world size of this process; joins the world that torchrun announces in the environment.

    A process on its own is rank 0 of 1 and runs all stages.

    Raises:
        ExecutionError: the others cannot be reached.
    """
    hold_standard_descriptors()
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not dist.is_initialized():
        try:
            _initialize(world_size, timedelta(seconds=PROCESS_GROUP_TIMEOUT_S))
        except (RuntimeError, OSError, KeyError, ValueError) as problem:
            raise ExecutionError(
                f"{world_size} processes are announced, but they do not meet: {type(problem).__name__}: {problem}; "
                "start them with launch or torchrun"
            ) from problem
    return (dist.get_rank(), world_size) if dist.is_initialized() else (0, 1)


def check_world_size(plan: Plan, world_size: int) -> None:
    """Refuse a plan for another number of processes.

    Raises:
        ForeignPlanError: neither as many processes run as the plan needs nor one.
    """
    needed = plan.ranks * plan.replicas
    if world_size not in (1, needed):
        stages = counted(plan.K, "stage")
        stages += f", {plan.chunks} on each rank" if plan.chunks > 1 else ""
        pipelines = f" in {plan.replicas} replicas" if plan.replicas > 1 else ""
        raise ForeignPlanError(
            f"the plan has {stages}{pipelines}, but {world_size} processes run; start {needed} processes, or one"
        )


def group_on_host(layout: Layout) -> dist.ProcessGroup | None:
    """A group that carries tensors on the CPU; None if the default one does, or there is nobody to carry them to."""
    if layout.alone or f"{HOST.type}:" in dist.get_backend_config():
        return None
    group: dist.ProcessGroup = dist.new_group(backend=backend_of(HOST).process_group)
    return group


def _initialize(world_size: int, timeout: timedelta) -> None:
    """Meet at torchrun's store, each restart under keys of its own.

    After a restart the agent's store still holds the addresses of the processes that are gone: with these, gloo came
    back in 3 of 19 restarts, with keys of their own in 11 of 11. [measured]
    """
    rank = int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the agent holds the store, not rank 0
    holds = rank == 0 and not hosted
    listener = listener_at(host, port) if holds else None
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=holds,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )
    keep_gloo_inside(host)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    join_group(PrefixStore(f"gpipe-autoplan/{restart}", store), rank, world_size, timeout)
    atexit.register(leave_group)
