"""How waits for messages of torch's process groups are ended, so that the thread that waits raises.

    gloo    a receive that nobody answers times out: gloo then breaks all connections of its group
    NCCL    the group is aborted: the kernel that spins until its message comes ends, and what it received is garbage

A group that is None is that of all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from profiler.machine.backend import ends_by_abort

ABORT_S = 5.0  # that aborts may take
_NEVER = 2**30  # tag of a message that nobody sends


def by_abort(group: dist.ProcessGroup | None) -> bool:
    """Whether waits in a group end by `abort`; a group that its user has destroyed has none."""
    with contextlib.suppress(Exception):
        return ends_by_abort(dist.get_backend_config(group))
    return False


def abort(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Abort groups, all at once.

    What an abort frees, it may free only when the device is idle; and there the kernel of another group spins until
    its own abort comes (pytorch issue 119797). One after the other they took a minute, and the process ended with
    SIGABRT [measured on an H100].
    """
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _abort(group: dist.ProcessGroup | None) -> None:
    with contextlib.suppress(Exception):  # a library beside it in the same group that knows no abort
        (group or dist.group.WORLD).abort()  # type: ignore[union-attr]


def break_connections(group: dist.ProcessGroup | None) -> None:
    """End all waits in a group of gloo's."""
    others: list[int] = []
    with contextlib.suppress(Exception):  # its user has destroyed it
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    if others:
        with contextlib.suppress(Exception):
            work = dist.irecv(torch.zeros(1), others[0], group, _NEVER)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
