"""Where the ranks of a plan are among the hosts of a cluster, and which of its messages go from one host to another.

Of equal devices each replica takes as many after each other as it has stages on them, or, where replicas are adjacent,
each rank as many as there are replicas. The plan says where each is, and processes are numbered in the order of their
devices, as torchrun numbers them:

    host          0                    1                         0                    1
    device        0     1     2        3     4     5             0     1     2        3     4     5
    replica 0     0 --> 1              .                         0           1 -.     .
    replica 1                 0 -----> 1                               0        `---> 1
                  the slowest of both is what boundary 0 takes   adjacent: rank 0 averages inside a host
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from profiler.device import Link


@dataclass(frozen=True, slots=True)
class Hosts:
    """Devices on several hosts.

    Attributes:
        link: between two devices of one host.
        between: between those of two.
        devices_per_host: so many after each other are in one.
        adjacent: whether the replicas of a rank are after each other, and not the ranks of a replica.
        ports: of a host to others.
    """

    link: Link
    between: Link
    devices_per_host: int
    adjacent: bool = False
    ports: int = 1

    def averaging(self, fewest: int, most: int) -> Link:
        """What replicas on several hosts average their gradients over.

        Each of those on a host begins a ring that leaves it by a port of its own, as NCCL lays them. All rings go
        through all replicas, so where two are on one host, together they are no faster than the link within.

        Args:
            fewest: so many replicas at least are on each of these hosts.
            most: so many at most.
        """
        far = self.between.side_by_side(min(self.ports, fewest))
        return far if most == 1 else slower_of(self.link, far)


@dataclass(frozen=True)
class Placement:
    """The devices of a plan.

    Attributes:
        members: by rank the position of its device in every replica.
        hosts: where they are; None where one link is between all.
    """

    members: tuple[tuple[int, ...], ...]
    hosts: Hosts | None

    def is_far(self, sender: int, receiver: int) -> bool:
        """Whether a message between two ranks leaves a host, in any replica."""
        return self._numbers[sender] != self._numbers[receiver]

    def averaging(self, rank: int) -> Link | None:
        """What the replicas of a rank average their gradients over, where they are on more than one host."""
        on_host = Counter(self._numbers[rank]).values()
        return None if self.hosts is None or len(on_host) == 1 else self.hosts.averaging(min(on_host), max(on_host))

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """By rank the number of its host in every replica."""
        per_host = math.inf if self.hosts is None else self.hosts.devices_per_host
        return [[int(device // per_host) for device in devices] for devices in self.members]


def faster_of(*links: Link) -> Link:
    """A link over which no message takes longer than over any of these."""
    return _of_all(links, min, max)


def slower_of(*links: Link) -> Link:
    """A link that is about as slow as the slowest of these for each message."""
    return _of_all(links, max, min)


def _of_all(links: Sequence[Link], time: Callable[..., float], rate: Callable[..., float]) -> Link:
    """Where all links' seconds are lines between two sizes, so are theirs; the smaller ones bend down between them."""
    known = {size for link in links for size, _ in link.measured}
    sizes = sorted({1, *known}) if known else []
    return Link(
        latency_s=time(one.latency_s for one in links),
        bytes_per_s=rate(one.bytes_per_s for one in links),
        error=max(one.error for one in links),
        measured=tuple((size, time(one.transfer_s(size) for one in links)) for size in sizes),
    )


def placed(classes: Sequence[int], members: Sequence[Sequence[int]], replicas: int, hosts: Hosts | None) -> Placement:
    """The placement of ranks on these classes of devices.

    Args:
        classes: of each rank.
        members: of each class, positions of its devices.
        replicas: R.
        hosts: see `Placement`. Without, the ranks of a replica are after each other.
    """
    stages, seen = Counter(classes), Counter[int]()
    found = []
    for which in classes:
        number = seen[which]
        seen[which] += 1
        if hosts is not None and hosts.adjacent:
            found.append(tuple(members[which][number * replicas : (number + 1) * replicas]))
        else:
            found.append(tuple(members[which][replica * stages[which] + number] for replica in range(replicas)))
    return Placement(tuple(found), hosts)
