"""Joining the process group of all ranks, and leaving it so that the process comes to a good end."""

from __future__ import annotations

import importlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from profiler.machine.backend import HOST, backend_of, process_groups


def join_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Meet the other ranks at a store; as `torch.distributed.init_process_group`."""
    # Imported later, as tracing does, it has the group for default arguments: destroyed, its threads would go on.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group(process_groups(), store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_group() -> None:
    """At the exit of Python: gloo's threads end while there is a Python that they can let go of tensors in.

    Left to themselves they ended 4 of 85 trainings of two processes under torchrun, which had gone well, with SIGABRT
    or SIGSEGV; none of 108 since [measured], and one of some thousand workers. Groups on other devices stay: to destroy
    them may wait for ranks that are gone.
    """
    if dist.is_initialized() and dist.get_backend() == backend_of(HOST).process_group:
        dist.destroy_process_group()
