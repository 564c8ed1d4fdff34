"""The devices of this machine: from what a user passes as `devices` to a `Cluster`.

local_devices()                    # all CUDA devices, or two CPU workers where there are none
local_devices(4)                   # four of them
local_devices(["cuda:1", "cpu"])   # these, in pipeline order
local_devices("8xA100-80GB")       # not here: from data sheets, see `Cluster.of`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from profiler.device import Cluster, Device
from profiler.errors import ArgumentError
from profiler.machine.backend import BACKENDS, HOST, backend_of
from profiler.quantities import MOST_DEVICES, MOST_THREADS, shown

Devices: TypeAlias = int | str | Sequence[torch.device | str | Device] | Cluster | None

DEFAULT_CPU_WORKERS = 2
WHAT_TO_PASS = "pass a count, a list of devices such as ['cpu', 'cuda:1'], '8xA100-80GB', or a Cluster"


def local_devices(
    devices: Devices = None, *, threads: int = 1, link: str | None = None, between: str | None = None
) -> Cluster:
    """Resolve what a user passes as `devices`.

    Args:
        devices: a count; torch devices, their names or `Device` values in pipeline order; a `Cluster`, which is
            returned as it is; None for all CUDA devices or, where there are none, two CPU workers. A count means CUDA
            devices where there are any, else CPU workers. A text names devices with commas between them, or, as for
            `Cluster.of`, such that are not here.
        threads: threads that each CPU worker computes with.
        link: of devices that are not here, between those of a host, as for `Cluster.of`; links that are here are
            measured.
        between: likewise, between hosts.

    Returns:
        The devices in pipeline order. CPU workers share the memory of the machine, or of the container, equally.

    Raises:
        ArgumentError: no devices, more than there are, or something else than devices; threads that cannot be; a link
            between devices that are here.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"threads={shown(threads)}; a CPU worker computes with at least 1 thread")
    if threads > MOST_THREADS:
        raise ArgumentError(f"threads={shown(threads)}; a CPU worker computes with at most {MOST_THREADS} threads")
    if isinstance(devices, str):
        names = [name.strip() for name in devices.split(",")]
        if not any(_is_torch_device(name) for name in names):
            return _not_here(devices, link, between)
        devices = names
    for name, given in (("link", link), ("between", between)):
        if given is not None:
            raise ArgumentError(
                f"{name} is {shown(given)}, and links between devices of this machine are measured; leave it out, or "
                "name devices that are not here, such as 8xA100-80GB"
            )
    if isinstance(devices, Cluster):
        return devices
    if devices is None:
        return _cluster(_accelerators() or [HOST.type] * DEFAULT_CPU_WORKERS, threads)
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
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


def context_bytes(device: Device, operations: int) -> int:
    """Memory of a local device that a process occupies before it holds any tensor.

    What other processes hold on the device counts too, for it is not there to be used.

    Args:
        device: of this machine.
        operations: of the model that the process has traced.
    """
    place = torch_device(device)
    return backend_of(place).context_bytes(place, operations)


def described(device: torch.device, threads: int, sharing: int) -> Device:
    """What the planner is told of a torch device, which `sharing` CPU workers have together if it is one."""
    return backend_of(device).described(device, threads, sharing)


def _not_here(devices: str, link: str | None, between: str | None) -> Cluster:
    """From data sheets."""
    try:
        return Cluster.of(devices, link=link, between=between)
    except ArgumentError as problem:
        raise ArgumentError(f"{problem}; devices of this machine have names such as 'cpu' and 'cuda:1'") from problem


def _is_torch_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _kinds_text() -> str:
    return " and ".join(repr(kind) for kind in BACKENDS)


def _names(count: int) -> list[str]:
    """Names of `count` devices."""
    if count < 1:
        raise ArgumentError(f"devices={shown(count)}, at least 1 is needed; {WHAT_TO_PASS}")
    if count > MOST_DEVICES:
        raise ArgumentError(f"devices={shown(count)}, at most {MOST_DEVICES} can be planned for; {WHAT_TO_PASS}")
    names = _accelerators()
    if not names:
        return [HOST.type] * count
    if count > len(names):
        raise ArgumentError(
            f"devices={count}, but this machine has {len(names)} {names[0].partition(':')[0].upper()} devices; "
            f"ask for at most {len(names)}, or for CPU workers with devices=['cpu'] * {count}"
        )
    return names[:count]


def _accelerators() -> list[str]:
    """Names of all devices of the first kind other than the host's cores that this machine has."""
    for backend in BACKENDS.values():
        if not backend.is_host and backend.count():
            return [f"{backend.type}:{index}" for index in range(backend.count() or 0)]
    return []


def _cluster(devices: Sequence[Any], threads: int) -> Cluster:
    cpu_workers = sum(1 for device in devices if not isinstance(device, Device) and backend_of(_here(device)).is_host)
    return Cluster(
        devices=tuple(
            device if isinstance(device, Device) else described(_here(device), threads, cpu_workers)
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
    if device.type not in BACKENDS:
        raise ArgumentError(f"device {shown(str(device))} cannot run a stage; stages run on {_kinds_text()} devices")
    there = BACKENDS[device.type].count()
    if there is not None and (device.index or 0) >= there:
        raise ArgumentError(
            f"device {str(device)!r} is not on this machine, which has {there} {device.type.upper()} devices; "
            f"{WHAT_TO_PASS}"
        )
    return device
