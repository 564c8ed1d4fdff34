"""Devices, links and clusters: what stages run on and what lies between them.

Torch-free on purpose: plans carry these values, and `autoplan show` must answer without importing torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import not_
from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator

from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.field_types import DeviceBytes, Rate, RelativeError, Seconds, Share
from profiler.quantities import MOST_BYTES, MOST_DEVICES, MOST_SECONDS, MOST_THREADS, shown
from profiler.text import counted
from profiler.value import Value

SHORTEST_S = 1e-12
"""What a message takes at least for its bytes, where larger ones were measured to be no slower [chosen]."""
MOST_MEASURED = 1024
"""Sizes that a link may say the seconds of [chosen]."""
MessageBytes: TypeAlias = Annotated[int, Field(ge=1, le=MOST_BYTES)]
MessageSeconds: TypeAlias = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


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
    @fits_its_arguments
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

    Where no line is near what was measured, `measured` says that instead. Between two sizes a message takes what lies
    on the line between them, below the smallest one what that takes, and above the largest what that takes and the rest
    at `bytes_per_s`.

    Where a message is copied by the thread that else computes, both ends lose a share of its seconds; only in the rest
    is it under way while they compute.

    Attributes:
        latency_s: seconds that an empty message takes.
        bytes_per_s: bandwidth.
        error: largest relative distance between the fitted line and a measured size; of a link from what is printed
            about it the one to expect (0 where nothing is said).
        measured: sizes in bytes, ascending, and seconds of each, which need not grow with them; empty where the line
            is near enough. Files leave it out then.
        sender_share: share of a message's seconds in which the end that sends it copies it and does not compute; 0
            where something else does that, and in files that leave it out.
        receiver_share: the same of the end that receives it. Both together are less than 1.
    """

    latency_s: Seconds
    bytes_per_s: Rate
    error: RelativeError = 0.0
    measured: tuple[tuple[MessageBytes, MessageSeconds], ...] = Field(
        default=(), max_length=MOST_MEASURED, exclude_if=not_
    )
    sender_share: Share = Field(default=0.0, exclude_if=not_)
    receiver_share: Share = Field(default=0.0, exclude_if=not_)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        sizes = [size for size, _ in self.measured]
        for below, above in pairwise(sizes):
            if below >= above:
                raise ValueError(f"measured has {below} bytes before {above}; sizes ascend")
        return self

    @model_validator(mode="after")
    def _is_under_way(self) -> Self:
        if self.sender_share + self.receiver_share >= 1:
            raise ValueError(
                f"sender_share is {self.sender_share} and receiver_share {self.receiver_share}; both together are less "
                "than 1"
            )
        return self

    @property
    def copied(self) -> tuple[float, float]:
        """Shares of a message's seconds in which its sender and its receiver copy it."""
        return self.sender_share, self.receiver_share

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds that a message of `size_bytes` takes; 0 when there is nothing to send."""
        if not size_bytes:
            return 0.0
        if not self.measured:
            return self.latency_s + size_bytes / self.bytes_per_s
        place = bisect_left(self.measured, size_bytes, key=lambda point: point[0])
        if place == 0:
            return self.measured[0][1]
        size, seconds = self.measured[place - 1]
        if place == len(self.measured):
            return seconds + (size_bytes - size) / self.bytes_per_s
        next_size, next_s = self.measured[place]
        return seconds + (next_s - seconds) * (size_bytes - size) / (next_size - size)

    def line_to(self, size_bytes: float) -> Link:
        """The link without its table: a line from an empty message to what one of `size_bytes` takes.

        Where sums of messages of many sizes are needed, as for all-reduce. Itself where it has no table.
        """
        if not self.measured or not size_bytes:
            return self.model_copy(update={"measured": ()})
        latency_s = min(self.latency_s, self.measured[0][1])
        rest_s = max(self.transfer_s(size_bytes) - latency_s, SHORTEST_S)
        return self.model_copy(update={"measured": (), "latency_s": latency_s, "bytes_per_s": size_bytes / rest_s})

    def slowed(self, ratio: float) -> Link:
        """A link on which each message takes `ratio` times as long."""
        return self.model_copy(
            update={
                "latency_s": self.latency_s * ratio,
                "bytes_per_s": self.bytes_per_s / ratio,
                "measured": tuple((size, seconds * ratio) for size, seconds in self.measured),
            }
        )

    def side_by_side(self, count: int) -> Link:
        """So many of these links, among which each message is divided."""
        return self.model_copy(
            update={
                "bytes_per_s": self.bytes_per_s * count,
                "measured": tuple((size * count, seconds) for size, seconds in self.measured),
            }
        )

    @classmethod
    @fits_its_arguments
    def of(cls, kind: str) -> Link:
        """A link that is not here, from what is printed about it, less what large messages do not reach.

            >>> Link.of("nvlink3").bytes_per_s
            240000000000.0

        Raises:
            ArgumentError: nothing is known about that kind; see `profiler.datasheets.LINKS`.
        """
        from profiler.datasheets import ERROR, LINK_EFFICIENCY, link_sheet

        sheet = link_sheet(kind)
        return cls(latency_s=sheet.latency_s, bytes_per_s=LINK_EFFICIENCY * sheet.bytes_per_s, error=ERROR)


class Cluster(Value):
    """Devices in pipeline order (stage k runs on `devices[k]`) and what lies between them.

    Attributes:
        devices: at least one device.
        link: between neighbours in one host; None when it was not measured yet; a plan of one stage needs none.
        between: between devices of unlike hosts; None where `link` is between all devices.
        devices_per_host: so many devices after each other are in one host; None where nothing is said of hosts, and one
            has all devices.
        ports: of a host to others. Replicas of a rank that are on one host average gradients over as many of them as
            they are.
    """

    devices: tuple[Device, ...] = Field(min_length=1, max_length=MOST_DEVICES)
    link: Link | None = None
    between: Link | None = None
    devices_per_host: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    ports: int = Field(default=1, ge=1, le=MOST_DEVICES)

    @model_validator(mode="after")
    def _hosts_known(self) -> Self:
        if self.between is not None and (self.link is None or self.devices_per_host is None):
            raise ValueError("between is a link, and link or devices_per_host is missing; say both, or leave it out")
        return self

    @property
    def has_several_hosts(self) -> bool:
        """Whether the devices are on more than one host."""
        return self.devices_per_host is not None and self.devices_per_host < len(self.devices)

    @property
    def has_unlike_links(self) -> bool:
        """Whether a message takes another link from one host to another than inside one."""
        return self.has_several_hosts and self.between not in (None, self.link)

    @classmethod
    @fits_its_arguments
    def of(
        cls,
        devices: str,
        *,
        link: str | Link | None = None,
        between: str | Link | None = None,
        devices_per_host: int | None = None,
    ) -> Cluster:
        """Devices that are not here.

            >>> cluster = Cluster.of("2xA100-40GB, 2xV100-16GB", link="nvlink2")
            >>> [device.kind for device in cluster.devices]
            ['A100-40GB', 'A100-40GB', 'V100-16GB', 'V100-16GB']
            >>> Cluster.of("16xRTX4090:pcie4").link == Link.of("pcie4")
            True
            >>> Cluster.of("8x8xH100-80GB", between="ndr") == Cluster.of("64xH100:nvlink4/ndr")
            True

        Args:
            devices: counts and kinds in pipeline order, separated by commas, see `Device.of`; before a count perhaps
                the number of hosts that have as many each; after a colon perhaps the link, and after a slash the one
                between hosts.
            link: between neighbours, as `Link.of` or measured. By default the slowest of those that such devices
                usually have, for as many as fit on one host.
            between: between hosts, likewise; `link` by default. Of InfiniBand each device has a port of its own, as in
                DGX and HGX systems, of others a host has one; `"4xhdr"` says four a host.
            devices_per_host: names repeat (`cuda:0`, ...) from one host to the next; 8 where the text does not say it.

        Raises:
            ArgumentError: the text is no such list, a kind is not known, a link is no link, there are two of them, or
                none for devices on several hosts, or no device fits on a host.
        """
        if not isinstance(devices, str):
            raise ArgumentError(f"{shown(devices)} is no list of devices; pass a text such as '8xA100-40GB'")
        for name, given in (("link", link), ("between", between)):
            if not (given is None or isinstance(given, str | Link)):
                raise ArgumentError(f"{name}={given!r}; pass {name}='nvlink3', say, or a Link")
        each = 1 if devices_per_host is None else devices_per_host
        if isinstance(each, bool) or not isinstance(each, int) or each < 1:
            raise ArgumentError(f"devices_per_host={devices_per_host!r}; pass how many devices a host has, at least 1")
        listed, colon, named = devices.partition(":")
        inside, slash, outside = named.partition("/")
        for mark, words, name, given in ((colon, inside, "link", link), (slash, outside, "between", between)):
            if mark and given is not None:
                raise ArgumentError(
                    f"{shown(devices)} names a {name}, {shown(words)}, and {name} is {shown(given)}; leave one out"
                )
        kinds, on_host = _listed_kinds(listed)
        if on_host is not None and devices_per_host not in (None, on_host):
            raise ArgumentError(
                f"{shown(devices)} has {counted(on_host, 'device')} a host, and devices_per_host={each}"
            )
        per_host = on_host or devices_per_host or USUALLY_ON_A_HOST
        found, far = inside.strip() if colon else link, outside.strip() if slash else between
        if found is None and len(kinds) > 1:
            found = _usual_link(kinds, per_host if far is None and on_host is None else len(kinds))
        if on_host is not None and len(kinds) > on_host and far is None:
            raise ArgumentError(
                f"{shown(devices)} are {len(kinds) // on_host} hosts, with 0 links between them; name one, such as "
                f"between='ndr' or {shown(listed.strip() + ':nvlink4/ndr')}"
            )
        ports = 1
        if isinstance(far, str):
            far, ports = _ports(far, per_host)
        if found is None:
            far, ports = None, 1  # one device
        return cls(
            devices=tuple(Device.of(kind, name=f"cuda:{index % per_host}") for index, kind in enumerate(kinds)),
            link=Link.of(found) if isinstance(found, str) else found,
            between=far,
            devices_per_host=per_host if far is not None or on_host or len(kinds) > per_host else None,
            ports=ports,
        )


USUALLY_ON_A_HOST = 8
"""Devices in a host where nothing else is said [chosen: DGX and HGX systems]."""


def _listed_kinds(text: str) -> tuple[list[str], int | None]:
    """`2xT4, L4` is T4, T4, L4; and of `2x8xT4` also that a host has 8."""
    kinds: list[str] = []
    on_host: set[int | None] = set()
    for part in text.split(","):
        if part.strip().isdecimal():
            raise ArgumentError(f"{shown(part.strip())} says how many devices, and not of which kind: 8xA100-40GB, say")
        match = re.fullmatch(r"\s*(?:(?:(\d{1,6})\s*x\s*)?(\d{1,6})\s*x\s*)?(\S+)\s*", part, re.IGNORECASE)
        if match is None or (match[1] and int(match[1]) < 1) or (match[2] and int(match[2]) < 1):
            raise ArgumentError(f"{shown(part.strip())} is not a count and a kind of device, such as 8xA100-40GB")
        count = int(match[1] or 1) * int(match[2] or 1)
        on_host.add(int(match[2]) if match[1] else None)
        if len(kinds) + count > MOST_DEVICES:
            raise ArgumentError(
                f"{shown(text)} names more than {MOST_DEVICES} devices, the most that can be planned for"
            )
        kinds.extend([match[3]] * count)
    if len(on_host) > 1:
        raise ArgumentError(f"{shown(text)} has unlike numbers of devices on its hosts; give one number for all")
    return kinds, on_host.pop()


def _ports(text: str, devices_per_host: int) -> tuple[Link, int]:
    """Of `4xhdr`, or of a name alone: the link, and how many of it a host has to others."""
    from profiler.datasheets import link_sheet

    match = re.fullmatch(r"\s*(?:(\d{1,4})\s*x\s*)?(\S+)\s*", text, re.IGNORECASE)
    if match is None or int(match[1] or 1) < 1:
        raise ArgumentError(f"{shown(text.strip())} is not a link between hosts, such as ndr or 4xhdr")
    usual = devices_per_host if link_sheet(match[2]).of_each_device else 1
    return Link.of(match[2]), int(match[1] or usual)


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
