"""What the balancer is asked, a profile, devices and settings in one value; and what it chooses from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.hosts import Hosts, Placement, placed
from planner.cost.layer_costs import CostModel, Floats, LayerArrays
from planner.cost.ledger_rows import Basis, Replicas
from planner.cost.messages import Carrier, carrier_of
from planner.cost.parameter_ranges import ParameterRanges
from planner.cost.time_ledger import EndFigures
from planner.cost.transfers import boundary_s
from planner.plan.actions import AHEAD_BYTES
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import ONE_CHUNK, Ring, ScheduleName
from planner.rules import FREE, Rules
from planner.settings import Settings
from profiler.device import Cluster, Device, Link
from profiler.precision import recipe_of
from profiler.quantities import MOST_MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that are equal for the planner.

    Attributes:
        device: one of them, with the memory limit in force.
        members: positions of all of them among the given devices.
        pinned: whether a rule pins layers to it; it is then alone in its class.
        alike: how many of them are equal indeed, where similar ones are taken for equal; all if empty.
    """

    device: Device
    members: tuple[int, ...]
    pinned: bool
    alike: tuple[int, ...] = ()

    def capacity(self, replicas: int) -> int:
        """How many stages they can run, each on one device in every replica, which are equal."""
        return sum(count // replicas for count in self.alike or (len(self.members),))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule, R and M.

    Attributes:
        schedule: order of the actions.
        replicas: R.
        split: how a replica's share of the mini-batch is cut.
        ring: ranks, and chunks of each, where there are several.
    """

    schedule: ScheduleName
    replicas: int
    split: MicroBatches
    ring: Ring = ONE_CHUNK


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a plan follows from.

    Attributes:
        costs: costs of the layers.
        parameters: bytes of the parameters of every range of layers.
        devices: with the memory limits in force; their order says nothing.
        classes: equal devices together, in order of their first member.
        link: between neighbours; may be None for one stage alone.
        ring: between replicas; None where that is `link`.
        hosts: where the devices are; None where one link is between all.
        devices_per_host: likewise where one link is between all devices of several hosts; None where nothing is said.
        least_replicas: fewest R where it is chosen.
        optimizer: name of the optimizer.
        settings: what the caller asks.
        rules: masks over the layers.
        short_messages: whether more messages may be under way the shorter they are, as the executor has it. Without,
            memory grows with the messages, so that a bound can be had.
        patience: what a search without a time limit may take in vain, in parts of what is usual.
        dispensable: whether there is a plan already that this one's is compared with: then the search ends without any
            when time is up.
        below_s: a plan whose step takes as long is of no use.
    """

    costs: CostModel
    parameters: ParameterRanges
    devices: tuple[Device, ...]
    classes: tuple[DeviceClass, ...]
    link: Link | None
    optimizer: str
    settings: Settings
    rules: Rules
    short_messages: bool = True
    patience: float = 1.0
    dispensable: bool = False
    below_s: float = math.inf
    ring: Link | None = None
    hosts: Hosts | None = None
    devices_per_host: int | None = None
    least_replicas: int = 1

    @property
    def layers(self) -> int:
        """L, number of layers."""
        return len(self.costs.profile.layers)

    @property
    def cluster(self) -> Cluster:
        """The devices, with their limits of memory, and the links between them."""
        if self.hosts is None:
            return Cluster(devices=tuple(self.devices), link=self.link, devices_per_host=self.devices_per_host)
        hosts = self.hosts
        return Cluster(
            devices=tuple(self.devices),
            link=hosts.link,
            between=hosts.between,
            devices_per_host=hosts.devices_per_host,
            ports=hosts.ports,
        )

    def at_boundaries(self, size: int) -> LayerArrays:
        """What crosses boundaries; it does not depend on the device, so the first one's rows say it."""
        return self.costs.layers(self.devices[0].kind, size)

    def messages_s(self, size: int, *, far: bool = False) -> tuple[Floats, Floats]:
        """What outputs and their gradients take across boundary i; `far` from one host to another."""
        if (size, far) not in self._messages_s:
            link = self.hosts.between if far and self.hosts is not None else self.link
            self._messages_s[size, far] = boundary_s(link, self.at_boundaries(size))
        return self._messages_s[size, far]

    @cached_property
    def _messages_s(self) -> dict[tuple[int, bool], tuple[Floats, Floats]]:
        return {}

    def basis(self, device_kind: str, candidate: Candidate) -> Basis:
        """What the memory of stages on that kind of device follows from."""
        return Basis(
            self.costs,
            self.parameters,
            device_kind,
            self.costs.optimizer(device_kind, self.optimizer),
            candidate.schedule,
            candidate.split,
            AHEAD_BYTES if self.short_messages else 0,
            candidate.ring,
            replicas=self.as_replicas(candidate.replicas),
            carrier=self.carrier(next(device for device in self.devices if device.kind == device_kind)),
        )

    def carrier(self, device: Device) -> Carrier:
        """What carries the messages of a stage on that device."""
        return carrier_of(device, hosts=self.hosts is not None)

    def as_replicas(self, number: int) -> Replicas:
        """So many replicas, as the settings have them."""
        return Replicas(number, self.settings.shard_optimizer)

    def shares(self, replicas: int) -> int:
        """Parts of the optimizer's state with so many replicas."""
        return self.as_replicas(replicas).shares

    def end_figures(self, device_kind: str, replicas: int, averaging: Link | None = None) -> EndFigures:
        """What the end of a step on that kind of device follows from; of replicas on several hosts over that link."""
        recipe = recipe_of(self.costs.profile.sample.precision)
        share = 1.0 if recipe is None else recipe.gradient_share
        optimizer = self.costs.optimizer(device_kind, self.optimizer)
        link = averaging or self.ring or self.link
        if link is not None and link.measured:
            link = link.line_to(float(self.parameters.trainable[0, -1]) * max(1.0, share) / replicas)
        return EndFigures(optimizer, link, replicas, share, self.shares(replicas))

    @property
    def links(self) -> tuple[Link, ...]:
        """All that messages may go over."""
        both = () if self.hosts is None else (self.hosts.link, self.hosts.between)
        return both or tuple(link for link in (self.link,) if link is not None)

    def placement(self, classes: Sequence[int], replicas: int) -> Placement:
        """Where ranks on these classes of devices are."""
        key = (*classes,), replicas
        if key not in self._placements:
            self._placements[key] = placed(classes, [group.members for group in self.classes], replicas, self.hosts)
        return self._placements[key]

    @cached_property
    def _placements(self) -> dict[tuple[tuple[int, ...], int], Placement]:
        return {}

    def most_stages(self, replicas: int, count: int) -> int:
        """The largest K with R replicas and M micro-batches; 0 when there is none."""
        able = sum(group.capacity(replicas) for group in self.classes)
        per_rank, chunks = count // self.settings.micro_batches_per_stage, self.settings.chunks
        most = chunks * min(self.settings.max_stages // chunks, self.layers // chunks, able, per_rank)
        if chunks > 1 and most < 2 * chunks:
            return 0
        if self.settings.stages is None:
            return most
        return self.settings.stages if self.settings.stages <= most else 0

    def candidates(self) -> Iterator[Candidate]:
        """Every schedule, R and M that the settings allow and whose micro-batch sizes the profile covers.

        Of very many M some, see `planner.solve.counts`.
        """
        yield from self._candidates

    @cached_property
    def _candidates(self) -> tuple[Candidate, ...]:
        return tuple(self._list_candidates())

    def _list_candidates(self) -> Iterator[Candidate]:
        settings = self.settings
        for replicas in self.replicas():
            share = settings.batch_size // replicas
            for count in self.counts_tried(share):
                split = MicroBatches(share, count)
                if self.most_stages(replicas, count) and self.covers(split.smallest) and self.covers(split.largest):
                    yield from (Candidate(schedule, replicas, split) for schedule in settings.schedules)

    def replicas(self) -> list[int]:
        """Every R that the settings allow and the batch can be shared among."""
        settings = self.settings
        every = range(self.least_replicas, len(self.devices) + 1) if settings.replicas is None else (settings.replicas,)
        return [replicas for replicas in every if settings.batch_size % replicas == 0]

    def counts_tried(self, share: int) -> Sequence[int]:
        """M that plans are looked for with, for so many samples: of very many some."""
        shares = [self.settings.batch_size // replicas for replicas in self.replicas()]
        return counts_tried(self.settings, share, every_one_to(shares))

    def counts_beside(self, candidate: Candidate) -> list[Candidate]:
        """The same with each M that was left out between the next ones that were tried, ascending."""
        share, own = candidate.split.batch_size, candidate.split.count
        tried = self.counts_tried(share)
        place = bisect_left(tried, own)
        first, last = tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)]
        between = [count for count in counts_between(self.settings, share) if first < count < last and count != own]
        splits = [MicroBatches(share, count) for count in between]
        return [
            replace(candidate, split=split)
            for split in splits
            if self.covers(split.smallest) and self.covers(split.largest)
        ]

    def covers(self, size: int) -> bool:
        """Whether the settings allow micro-batches of so many samples, and the profile knows them on all devices."""
        allowed = self.settings.micro_batch_sizes
        if allowed is not None and size not in allowed:
            return False
        return all(self.costs.covers(kind, size) for kind in self._kinds)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(device.kind for device in self.devices)


EVERY, LEAST_EVERY = 4096, 256
"""M that are tried without leaving any out: so many in all, and up to so many for each R at least [chosen: 3 s]."""
APART = 1 / 64
"""Relative distance of those beyond [chosen]."""


def every_one_to(shares: Iterable[int]) -> int:
    """Up to which M each one is tried, for all these numbers of samples."""
    left, ascending = EVERY, sorted(shares)
    for number, share in enumerate(ascending):
        if share * (len(ascending) - number) > left:
            return max(LEAST_EVERY, left // (len(ascending) - number))
        left -= share
    return EVERY


def counts_between(settings: Settings, share: int) -> Sequence[int]:
    """All M that the settings allow for so many samples."""
    if settings.micro_batches is not None:
        return [settings.micro_batches] if settings.micro_batches <= share else []
    return range(1, min(share, MOST_MICRO_BATCHES) + 1)


def counts_tried(settings: Settings, share: int, every: int) -> Sequence[int]:
    """Each up to `every`; beyond it some, among them the first and the last one of each two sizes of micro-batches."""
    counts = counts_between(settings, share)
    if len(counts) <= every or settings.micro_batch_sizes is not None:
        return counts
    most = counts[-1]
    steps = math.ceil(math.log(most / every) / math.log1p(APART))
    spread = {round(every * (most / every) ** (step / steps)) for step in range(steps + 1)}
    ends = {share // size + after for size in range(share // most, share // every + 1) for after in (0, 1)}
    return [*range(1, every), *sorted(spread | {count for count in ends if every <= count <= most})]


def device_classes(devices: Sequence[Device], rules: Rules) -> tuple[DeviceClass, ...]:
    """Equal devices together; one that layers are pinned to is alone."""
    pinned = {int(device) for device in rules.pinned if device != FREE}
    groups: dict[tuple[str, int, int], list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault((device.kind, device.memory_bytes, position if position in pinned else FREE), []).append(
            position
        )
    return tuple(
        DeviceClass(devices[members[0]], tuple(members), alone != FREE) for (_, _, alone), members in groups.items()
    )
