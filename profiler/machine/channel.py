"""Point-to-point messages between ranks: the calls that the executor sends with and that links are measured with.

Each message has a tag of its own, so that receives can be posted long before the sends (gloo matches tags; NCCL
matches by order, and both sides post in the same order). The process group is called directly: `dist.isend` and
`dist.irecv` check again for each tensor what is known here, which took half of a short message's time [measured].

Gloo reads and writes in a thread of its own. Where it wakes up on the core of a thread that is just inside of gloo, it
finds the connection locked and tries again and again until the system takes the core from it, 4 ms later: steps of
2.5 ms took up to 7 [measured]. So the executor tells gloo's threads not to push another off its core, and offers them
the core when nothing is locked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

Pending = list[dist.Work]
GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")  # names of gloo's threads and of torch's for collective calls


def push_nobody_off() -> None:
    """Let the threads that gloo has in this process wait for a core; call it when the process groups are made."""
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            if (task / "comm").read_text().strip() in GLOO_THREADS:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def offer_core() -> None:
    """Let gloo's thread have this core if it waits for it; otherwise this takes less than a microsecond."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


@dataclass(frozen=True, slots=True)
class End:
    """The other end of messages, looked up once.

    Attributes:
        group: process group that carries them.
        rank: of the other end, within the group.
    """

    group: dist.ProcessGroup
    rank: int

    def send(self, tensors: Sequence[Tensor], tag: int) -> Pending:
        """Begin to send contiguous tensors; they must stay unchanged until `finish`.

        Args:
            tensors: contiguous tensors of any dtype.
            tag: of the first tensor; the others count up from it.
        """
        return [self.group.send([tensor], self.rank, tag + offset) for offset, tensor in enumerate(tensors)]

    def receive(self, buffers: Sequence[Tensor], tag: int) -> Pending:
        """Begin to receive into contiguous buffers; they must not be touched until `finish`."""
        return [self.group.recv([buffer], self.rank, tag + offset) for offset, buffer in enumerate(buffers)]


def end_at(rank: int, group: dist.ProcessGroup | None = None) -> End:
    """The end at a rank of the world.

    Args:
        rank: of the other end.
        group: process group; None for the default one.
    """
    if group is not None:
        return End(group, dist.get_group_rank(group, rank))
    world = dist.group.WORLD
    assert world is not None, "the processes have joined"
    return End(world, rank)


def start_send(tensors: Sequence[Tensor], *, to: int, tag: int) -> Pending:
    """Begin to send to a rank, see `End.send`."""
    return end_at(to).send(tensors, tag)


def start_receive(buffers: Sequence[Tensor], *, source: int, tag: int) -> Pending:
    """Begin to receive from a rank, see `End.receive`."""
    return end_at(source).receive(buffers, tag)


def finish(pending: Pending) -> None:
    """Wait until every message of `pending` is through."""
    for work in pending:
        work.wait()
    pending.clear()
