"""Devices, links and clusters: what stages run on and what lies between them.

Torch-free on purpose: plans carry these values, and `autoplan show` must answer without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from profiler.errors import ArgumentError
from profiler.field_types import DeviceBytes, Rate, RelativeError, Seconds
from profiler.quantities import MOST_DEVICES, MOST_THREADS, shown
from profiler.value import Value


class Device(Value):
    """Something that runs one stage.

    Attributes:
        name: the torch device string that the executor uses, `"cpu"` or `"cuda:1"`.
        kind: devices of equal kind run equally fast, so each kind is profiled once (`"cpu/1 thread"`, `"NVIDIA H200"`).
        memory_bytes: memory that a stage may fill.
        threads: threads that a CPU worker computes with; 0 for devices that are not CPUs.
    """

    name: str
    kind: str
    memory_bytes: DeviceBytes
    threads: int = Field(default=0, ge=0, le=MOST_THREADS)

    @classmethod
    def of(cls, kind: str, *, name: str = "cuda:0") -> Device:
        """A device that is not here, from its data sheet.

            >>> Device.of("H100").memory_bytes
            84943715696

        Args:
            kind: such as `"A100-40GB"`; see `profiler.datasheets.DATA_SHEETS`.
            name: torch device that it will be where the plan runs.

        Raises:
            ArgumentError: there is no data sheet of that kind.
        """
        from profiler.datasheets import data_sheet, full_name

        return cls(name=name, kind=full_name(kind), memory_bytes=data_sheet(kind).memory_bytes)


class Link(Value):
    """A point-to-point connection between two ranks: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Attributes:
        latency_s: seconds that an empty message takes.
        bytes_per_s: bandwidth.
        error: largest relative distance between the fitted line and a measured size (0 where nothing was fitted).
    """

    latency_s: Seconds
    bytes_per_s: Rate
    error: RelativeError = 0.0

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds that a message of `size_bytes` takes; 0 when there is nothing to send."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0

    @classmethod
    def of(cls, kind: str) -> Link:
        """A link that is not here, from what is printed about it, less what large messages do not reach.

            >>> Link.of("nvlink3").bytes_per_s
            240000000000.0

        Raises:
            ArgumentError: nothing is known about that kind; see `profiler.datasheets.LINKS`.
        """
        from profiler.datasheets import LINK_EFFICIENCY, link_sheet

        sheet = link_sheet(kind)
        return cls(latency_s=sheet.latency_s, bytes_per_s=LINK_EFFICIENCY * sheet.bytes_per_s)


class Cluster(Value):
    """Devices in pipeline order (stage k runs on `devices[k]`) and the link between neighbours.

    Attributes:
        devices: at least one device.
        link: None when it was not measured yet; a plan of one stage needs none.
    """

    devices: tuple[Device, ...] = Field(min_length=1, max_length=MOST_DEVICES)
    link: Link | None = None

    @classmethod
    def of(cls, devices: str, *, link: str | Link | None = None, devices_per_host: int = 8) -> Cluster:
        """Devices that are not here.

            >>> cluster = Cluster.of("2xA100-40GB, 2xV100-16GB", link="nvlink2")
            >>> [device.kind for device in cluster.devices]
            ['A100-40GB', 'A100-40GB', 'V100-16GB', 'V100-16GB']
            >>> Cluster.of("16xRTX4090:pcie4").link == Link.of("pcie4")
            True

        Args:
            devices: counts and kinds in pipeline order, separated by commas, see `Device.of`; after a colon perhaps the
                link.
            link: between neighbours, as `Link.of` or measured. By default the slowest of those that such devices
                usually have, for as many as fit on one host.
            devices_per_host: names repeat (`cuda:0`, ...) from one host to the next.

        Raises:
            ArgumentError: the text is no such list, a kind is not known, the link is no link, there are two of them, or
                none for devices on several hosts, or no device fits on a host.
        """
        if not isinstance(devices, str):
            raise ArgumentError(f"{shown(devices)} is no list of devices; pass a text such as '8xA100-40GB'")
        if not (link is None or isinstance(link, str | Link)):
            raise ArgumentError(f"link={link!r}; pass link='nvlink3', say, or a Link")
        if isinstance(devices_per_host, bool) or not isinstance(devices_per_host, int) or devices_per_host < 1:
            raise ArgumentError(f"devices_per_host={devices_per_host!r}; pass how many devices a host has, at least 1")
        listed, colon, named = devices.partition(":")
        if colon and link is not None:
            raise ArgumentError(f"{shown(devices)} names a link, and link is {shown(link)}; leave one of them out")
        kinds = _listed_kinds(listed)
        if colon:
            link = named.strip()
        elif link is None and len(kinds) > 1:
            link = _usual_link(kinds, devices_per_host)
        placed = (Device.of(kind, name=f"cuda:{index % devices_per_host}") for index, kind in enumerate(kinds))
        return cls(devices=tuple(placed), link=Link.of(link) if isinstance(link, str) else link)


def _listed_kinds(text: str) -> list[str]:
    """`2xT4, L4` is T4, T4, L4."""
    kinds: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,6})\s*x\s*)?(\S+)\s*", part, re.IGNORECASE)
        if match is None or (match[1] and int(match[1]) < 1):
            raise ArgumentError(f"{shown(part.strip())} is not a count and a kind of device, such as 8xA100-40GB")
        kinds.extend([match[2]] * int(match[1] or 1))
        if len(kinds) > MOST_DEVICES:
            raise ArgumentError(
                f"{shown(text)} names more than {MOST_DEVICES} devices, the most that can be planned for"
            )
    return kinds


def _usual_link(kinds: Sequence[str], devices_per_host: int) -> Link:
    """The slowest link that such devices usually have in a host."""
    from profiler.datasheets import data_sheet

    if len(kinds) > devices_per_host:
        raise ArgumentError(
            f"{len(kinds)} devices without a link between them, and a host has {devices_per_host}; name the link "
            "between hosts, such as '64xH100:ndr', or link='ndr' in Python"
        )
    links = [Link.of(data_sheet(kind).link) for kind in dict.fromkeys(kinds)]
    return min(links, key=lambda link: link.bytes_per_s)
