"""What single keywords mean for these devices; a value that cannot mean anything is refused.

All raise `ArgumentError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from profiler.errors import ArgumentError
from profiler.quantities import MOST_BYTES, check_count, shown
from profiler.text import are, counted

if TYPE_CHECKING:
    from profiler.device import Device


def choice_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """The value, if it is one of these words."""
    if value not in choices:
        raise ArgumentError(f"{name} is {shown(value)}; choose one of {', '.join(repr(choice) for choice in choices)}")
    return value


def memory_limits_of(devices: Sequence[Device], limit: Any) -> tuple[int, ...]:
    """Bytes that each device may fill, at most its own."""
    names = [device.name for device in devices]
    if isinstance(limit, Mapping):
        unknown = sorted(set(limit) - set(names))
        if unknown:
            raise ArgumentError(f"memory_limit names {unknown[0]!r}; the devices are {', '.join(dict.fromkeys(names))}")
        limits = [limit.get(name) for name in names]
    elif isinstance(limit, Sequence) and not isinstance(limit, str):
        if len(limit) != len(devices):
            raise ArgumentError(
                f"memory_limit has {counted(len(limit), 'entry')} for {counted(len(devices), 'device')}; give "
                "one for each"
            )
        limits = list(limit)
    else:
        limits = [limit] * len(devices)
    for entry in limits:
        if isinstance(entry, str):
            raise ArgumentError(f"memory_limit is {shown(entry)}; give bytes, such as 24 * 2**30 for 24 GiB")
        if entry is not None:
            check_count("memory_limit", entry, most=MOST_BYTES)
    return tuple(
        device.memory_bytes if entry is None else min(entry, device.memory_bytes)
        for device, entry in zip(devices, limits, strict=True)
    )


def pinned_of(devices: Sequence[Device], pinned: Any) -> tuple[tuple[str, int], ...]:
    """Paths of modules and the positions of the devices that run them."""
    if not isinstance(pinned, Mapping):
        raise ArgumentError(f"pinned is {shown(pinned)}; give a mapping from module paths to devices")
    return tuple((path, _position(devices, path, which)) for path, which in pinned.items())


def _position(devices: Sequence[Device], path: str, which: object) -> int:
    names = [device.name for device in devices]
    if isinstance(which, int) and not isinstance(which, bool):
        if not 0 <= which < len(devices):
            raise ArgumentError(
                f"{path!r} is pinned to device {shown(which)}, and there {are(len(devices))} "
                f"{counted(len(devices), 'device')}"
            )
        return which
    if names.count(str(which)) != 1:
        raise ArgumentError(
            f"{path!r} is pinned to {which!r}, which names {names.count(str(which))} of the devices "
            f"{', '.join(dict.fromkeys(names))}; give the name of one, or its position"
        )
    return names.index(str(which))
