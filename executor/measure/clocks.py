"""Clocks of several machines: what to add to another process's time to get that of process 0."""

from __future__ import annotations

import platform
import time

import torch
import torch.distributed as dist

from executor.layout import Layout
from profiler.machine.channel import finish, start_receive, start_send

_ROUNDS = 8
_TAG = 1022 * 2**21  # after all tags of messages between stages, see executor.run.transport


def clock_offset_s(layout: Layout, device: torch.device) -> float:
    """Seconds to add to this process's `time.perf_counter` to get that of process 0; every process calls this.

    Processes of one machine share their clock. For others, of several round trips the shortest counts, and the other
    clock is read in its middle (Cristian, 1989).
    """
    if layout.alone:
        return 0.0
    names: list[str] = [""] * layout.processes
    dist.all_gather_object(names, platform.node())
    remote = [process for process, name in enumerate(names) if name != names[0]]
    if layout.process == 0:
        for process in remote:
            _answer(process, device)
        return 0.0
    return _asked(device) if layout.process in remote else 0.0


def _answer(process: int, device: torch.device) -> None:
    question = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_ROUNDS):
        finish(start_receive([question], source=process, tag=_TAG))
        finish(start_send([torch.full_like(question, time.perf_counter())], to=process, tag=_TAG))


def _asked(device: torch.device) -> float:
    answer = torch.zeros(1, dtype=torch.float64, device=device)
    trips = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        finish(start_send([torch.zeros_like(answer)], to=0, tag=_TAG))
        finish(start_receive([answer], source=0, tag=_TAG))
        ended = time.perf_counter()
        trips.append((ended - begun, answer.item() - (begun + ended) / 2))
    return min(trips)[1]
