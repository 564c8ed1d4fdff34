"""What the processes do together while a checkpoint is saved or loaded, and in whose words it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from executor.checkpoints.failures import causes_of, is_of_the_machine, unwritable
from executor.watch.failure import FirstCause


def is_first() -> bool:
    """Whether this process is rank 0, which writes what there is once."""
    return rank() == 0


def rank() -> int:
    """Of this process; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_all() -> None:
    """Go on when all processes have got so far."""
    if dist.is_initialized():
        dist.barrier()


def of_the_first(value: str | None) -> str:
    """The first process's value, in every process."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    assert values[0] is not None
    return values[0]


def gathered(value: Any) -> list[Any]:
    """All processes' values, in the first process; elsewhere its own."""
    if not dist.is_initialized():
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(value, parts if is_first() else None)
    return parts if is_first() else [value]


@contextmanager
def failures_named(place: Path) -> Iterator[None]:
    """Turn what the file system and torch raise into an error of ours; an end that was asked for stays one."""
    handled = sys.exception()
    try:
        yield
    except Exception as problem:
        if not is_of_the_machine(problem):
            raise
        raise unwritable(place, problem) from problem
    except CheckpointException as problem:  # torch derives it from BaseException
        if rank() in problem.failures:
            for cause in causes_of(problem.failures[rank()][0], handled):
                if isinstance(cause, KeyboardInterrupt | SystemExit):
                    raise cause from problem
        causes = {at: cause for at, (cause, _) in problem.failures.items()}
        at = min(causes, key=lambda at: (not is_of_the_machine(causes[at]), at))
        first = unwritable(place, causes[at])
        if at == rank():
            raise first from problem
        # Every rank raises, also those that could write.
        raise FirstCause.of(first, rank=at, world_size=dist.get_world_size(), position="").exception() from problem
