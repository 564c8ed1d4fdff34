"""The devices of this machine: from what a user passes as `devices` to a `Cluster`.

local_devices()                    # all CUDA devices, or two CPU workers where there are none
local_devices(4)                   # four of them
local_devices(["cuda:1", "cpu"])   # these, in pipeline order
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from profiler.device import Cluster, Device
from profiler.errors import ArgumentError
from profiler.quantities import MOST_DEVICES, MOST_THREADS, shown

Devices: TypeAlias = int | Sequence[torch.device | str | Device] | Cluster | None

DEFAULT_CPU_WORKERS = 2
WHAT_TO_PASS = "pass a count, a list of devices such as ['cpu', 'cuda:1'], or a Cluster"


def local_devices(devices: Devices = None, *, threads: int = 1) -> Cluster:
    """Resolve what a user passes as `devices`.

    Args:
        devices: a count; torch devices, their names or `Device` values in pipeline order; a `Cluster`, which is
            returned as it is; None for all CUDA devices or, where there are none, two CPU workers. A count means CUDA
            devices where there are any, else CPU workers.
        threads: threads that each CPU worker computes with.

    Returns:
        The devices in pipeline order. CPU workers share the machine's memory equally.

    Raises:
        ArgumentError: no devices, more than there are, or something else than devices; threads that cannot be.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"threads={shown(threads)}; a CPU worker computes with at least 1 thread")
    if threads > MOST_THREADS:
        raise ArgumentError(f"threads={shown(threads)}; a CPU worker computes with at most {MOST_THREADS} threads")
    if isinstance(devices, Cluster):
        return devices
    if devices is None:
        return _cluster(_names(torch.cuda.device_count() or DEFAULT_CPU_WORKERS), threads)
    if isinstance(devices, bool | str) or not isinstance(devices, int | Sequence):
        raise ArgumentError(f"devices={shown(devices)} is a {type(devices).__name__}; {WHAT_TO_PASS}")
    if isinstance(devices, int):
        return _cluster(_names(devices), threads)
    if not devices:
        raise ArgumentError(f"devices holds 0 devices, at least 1 is needed; {WHAT_TO_PASS}")
    return _cluster(devices, threads)


def torch_device(device: Device) -> torch.device:
    """The torch device of a local device.

    Raises:
        ArgumentError: this machine has no such device.
    """
    return _here(device.name)


def context_bytes(device: Device) -> int:
    """Memory of a local device that a process occupies before it holds any tensor; 0 on CPUs.

    On a CUDA device its context, and what cuBLAS allocates for itself at the first product and keeps. What other
    processes hold on the device counts too, for it is not there to be used.
    """
    place = torch_device(device)
    if place.type != "cuda":
        return 0
    torch.cuda.init()
    workspaces = _product_workspaces(place)
    free, total = torch.cuda.mem_get_info(place)
    return int(total - free - torch.cuda.memory_reserved(place) + workspaces)


def _product_workspaces(place: torch.device) -> int:
    """Bytes that stay allocated behind a first product, forward and backward: each thread of autograd's has its own."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(place)
    factor = torch.ones(64, 64, device=place, requires_grad=True)
    torch.addmm(factor[0], factor, factor).sum().backward()
    del factor
    torch.cuda.synchronize(place)
    return torch.cuda.memory_allocated(place) - before


def _names(count: int) -> list[str]:
    """Names of `count` devices."""
    there = torch.cuda.device_count()
    if count < 1:
        raise ArgumentError(f"devices={shown(count)}, at least 1 is needed; {WHAT_TO_PASS}")
    if count > MOST_DEVICES:
        raise ArgumentError(f"devices={shown(count)}, at most {MOST_DEVICES} can be planned for; {WHAT_TO_PASS}")
    if not there:
        return ["cpu"] * count
    if count > there:
        raise ArgumentError(
            f"devices={count}, but this machine has {there} CUDA devices; ask for at most {there}, or for CPU workers "
            f"with devices=['cpu'] * {count}"
        )
    return [f"cuda:{index}" for index in range(count)]


def _cluster(devices: Sequence[Any], threads: int) -> Cluster:
    cpu_workers = sum(1 for device in devices if not isinstance(device, Device) and _here(device).type == "cpu")
    return Cluster(
        devices=tuple(
            device if isinstance(device, Device) else _described(_here(device), threads, cpu_workers)
            for device in devices
        )
    )


def _here(name: Any) -> torch.device:
    """A device that this machine has."""
    if not isinstance(name, str | torch.device):
        raise ArgumentError(f"devices holds a {type(name).__name__}, {shown(name)}; {WHAT_TO_PASS}")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ArgumentError(f"{shown(name)} is not a torch device; {WHAT_TO_PASS}") from problem
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device {shown(str(device))} cannot run a stage; stages run on 'cpu' and 'cuda' devices")
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ArgumentError(
            f"device {str(device)!r} is not on this machine, which has {there} CUDA devices; {WHAT_TO_PASS}"
        )
    return device


def _described(device: torch.device, threads: int, cpu_workers: int) -> Device:
    if device.type == "cpu":
        kind = f"cpu/{threads} thread{'s' if threads > 1 else ''}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(name="cpu", kind=kind, memory_bytes=memory // cpu_workers, threads=threads)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return Device(name=f"cuda:{index}", kind=properties.name, memory_bytes=properties.total_memory)
