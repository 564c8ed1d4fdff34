"""Processes find out which of them can share memory, and make the rings between these.

    rings = meet({(0, 1): Wanted(1, 4, 2**22)}, {(1, 0): 1})    # all processes at once

Every process offers rings to those that it sends to, and tries to open those that it is offered. Who was started on the
same machine (name, boot and network) and opens the memory that is meant, shares it; any other pair has no ring.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from profiler.machine.ring import Address, Incoming, Outgoing
from profiler.machine.workers import usable_cores

Name: TypeAlias = tuple[int, int]  # of a ring, the same at both ends
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A ring to another process.

    Attributes:
        process: that receives.
        at_least: messages that may be under way, however long they are.
        ahead_bytes: of short messages as many as these hold.
    """

    process: int
    at_least: int
    ahead_bytes: int


@dataclass(slots=True)
class Rings:
    """The rings of one process.

    Attributes:
        outgoing: by name.
        incoming: by name.
        any: whether any process of the world has one.
        refused: why rings between processes of one machine could not be made, by their two processes.
    """

    outgoing: dict[Name, Outgoing] = field(default_factory=dict)
    incoming: dict[Name, Incoming] = field(default_factory=dict)
    any: bool = False
    refused: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Machine:
    """Where a process is, and what it computes with."""

    name: str
    cores: frozenset[int]
    threads: int


def meet(outgoing: Mapping[Name, Wanted], incoming: Mapping[Name, int]) -> Rings:
    """Make the rings; all processes of the world call this together, also those that want none.

    Args:
        outgoing: rings that this process would send through, by names that the receiver knows, too.
        incoming: rings that it would receive through: the process that sends.
    """
    here = _Machine(this_machine(), frozenset(usable_cores()), torch.get_num_threads())
    machines = _told(here)
    beside = [machine for machine in machines if machine.name == here.name]
    looks = sum(machine.threads for machine in beside) <= len({core for machine in beside for core in machine.cores})
    rings, rank = Rings(), dist.get_rank()
    offered: dict[Name, Address | str] = {}
    for name, wanted in outgoing.items():
        if machines[wanted.process].name == here.name:
            try:
                rings.outgoing[name] = Outgoing(wanted.at_least, wanted.ahead_bytes, looks=looks)
                offered[name] = rings.outgoing[name].address
            except OSError as problem:
                offered[name] = str(problem)
    offers = _told(offered)
    said: dict[Name, str] = {}  # of what this process was offered: why it cannot be
    for name, process in incoming.items():
        address = offers[process].get(name)
        if isinstance(address, str):
            said[name] = address
        elif address is not None:
            try:
                rings.incoming[name] = Incoming(address, looks=looks)
                said[name] = ""
            except OSError as problem:
                said[name] = str(problem)
    answers = _told({name: (incoming[name], reason) for name, reason in said.items()})
    rings.outgoing = {
        name: ring for name, ring in rings.outgoing.items() if answers[outgoing[name].process].get(name) == (rank, "")
    }
    for receiver, answer in enumerate(answers):
        for sender, reason in answer.values():
            rings.any = rings.any or not reason
            if reason:
                rings.refused[sender, receiver] = reason
    return rings


def this_machine() -> str:
    """What no two machines have in common: their name and boot, and the network that they are part of.

    Containers and network namespaces of one machine count as several.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()} {network.readlink()}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(8)}"  # a system without these; nothing is shared


def _told(own: T) -> list[T]:
    """What each process tells, in their order."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told
