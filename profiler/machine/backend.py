"""Which kinds of device there are, and which one a device is of; nobody asks for the name of a kind but its own file.

    backend = backend_of(torch.device("cuda:1"))
    backend.stopwatch(device).lap(call)

A further kind is one more file with one class (`profiler.machine.device_kind`), and its entry in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from profiler.machine.cpu import Cpu
from profiler.machine.cuda import Cuda
from profiler.machine.device_kind import Backend

BACKENDS: Mapping[str, Backend] = {backend.type: backend for backend in (Cpu(), Cuda())}
HOST = torch.device(Cpu.type)
WITHOUT_DATA = "meta"
"""Tensors of this type have no data; they are counted as the host's."""


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device (KeyError for a type that no stage runs on, see `profiler.machine.local`)."""
    kind = torch.device(device).type
    return BACKENDS[Cpu.type if kind == WITHOUT_DATA else kind]


class HasDevice(Protocol):
    """A tensor, or what stands for one."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        ...


def device_of_first(tensors: Iterable[HasDevice]) -> torch.device:
    """Where the first of these tensors lies; the host if there is none."""
    return next((tensor.device for tensor in tensors), HOST)


def process_groups() -> str:
    """What torch's process groups are made of: a library for each kind of device that is here."""
    used = [backend for backend in BACKENDS.values() if backend.is_host or (backend.count() and _is_built(backend))]
    if len(used) == 1:
        return used[0].process_group
    return ",".join(f"{backend.type}:{backend.process_group}" for backend in used)


def ends_by_abort(libraries: str) -> bool:
    """Whether a wait ends when a process group that is made of these libraries is aborted."""
    return any(backend.ends_by_abort and backend.process_group in libraries for backend in BACKENDS.values())


def _is_built(backend: Backend) -> bool:
    return dist.is_backend_available(backend.process_group)
