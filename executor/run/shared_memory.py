"""Messages between processes of one machine, through memory that they share; `Distributed` carries all others.

A message is copied into a slot by its SEND, and out of it by its RECV, into memory of the receiver's own: the sender
keeps nothing, and no tensor of a training step lives in a slot, however long its schedule keeps it. Without backward
passes a stage reads it where it lies, and the slot goes back when the stage waits for the next one. Each channel has a
ring (`profiler.machine.ring`), in which messages come in the order in which they were sent.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.distributed import Distributed
from executor.run.message import MessageForm
from executor.run.rank_order import RECEIVES
from executor.run.transport import Transfer
from planner.plan.actions import AHEAD_BYTES, room_between
from profiler.machine.backend import backend_of
from profiler.machine.ring import Incoming, Outgoing, Slot
from profiler.machine.ring_meeting import Rings, Wanted, meet

_FORMS_KEPT = 64  # views of a slot: forms of messages differ by sizes of micro-batches only

_Pair = tuple[int, int]  # sending and receiving stage


class SharedMemory:
    """Between processes some of which share memory.

    Args:
        rings: of this process, by sending and receiving stage.
        others: carries messages that have no ring.
    """

    @classmethod
    def between(
        cls, layout: Layout, skips: Sequence[tuple[int, int]], devices: Mapping[int, torch.device]
    ) -> SharedMemory | None:
        """Where any two processes of the world that exchange messages compute on one machine's cores."""
        rings = meet(*_rings_wanted(layout, skips, devices))
        if rings.refused and layout.process == 0:
            (first, second), why = next(iter(rings.refused.items()))
            warnings.warn(
                f"ranks {first} and {second} are on one machine, but cannot share memory ({why}); they talk over "
                "sockets, which takes longer",
                stacklevel=2,
            )
        return cls(rings, Distributed.between(layout, skips, devices)) if rings.any else None

    def __init__(self, rings: Rings, others: Distributed) -> None:
        self._others = others
        self._rings = rings
        self._outgoing: dict[int, Outgoing | None] = {}
        self._incoming: dict[int, Incoming | None] = {}
        self._borrowed: dict[int, Incoming] = {}  # the ring whose last slot is still read, by channel
        self.waiting_since_s: float | None = None

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Those of the other transport."""
        return self._others.groups

    @property
    def slots_bytes(self) -> int:
        """Of the rings that this process sends through; the receiver's are the sender's."""
        return sum(ring.size_bytes for ring in self._rings.outgoing.values())

    def interrupt(self) -> None:
        """End all waits for rings."""
        for outgoing in self._rings.outgoing.values():
            outgoing.end()
        for incoming in self._rings.incoming.values():
            incoming.end()

    def begin(self, receives: Sequence[Transfer]) -> None:
        """Rings need no receives ahead of time."""
        for transfer in receives:
            if transfer.channel not in self._incoming:
                self._incoming[transfer.channel] = self._rings.incoming.get(_pair(transfer))
        self._others.begin([transfer for transfer in receives if self._incoming[transfer.channel] is None])

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Rings have their memory."""
        self._others.prepare([transfer for transfer in transfers if self._incoming[transfer.channel] is None])

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Rings need no receives ahead of time."""
        self._others.post([transfer for transfer in transfers if self._incoming[transfer.channel] is None])

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Copy the message into a slot; before, wait until one is free."""
        channel = transfer.channel
        if channel not in self._outgoing:
            self._outgoing[channel] = self._rings.outgoing.get(_pair(transfer))
        ring = self._outgoing[channel]
        if ring is None:
            self._others.send(transfer, tensors)
            return
        form = transfer.form
        slot = ring.room(form.slot_bytes, transfer.most)
        for view, tensor in zip(_views(slot, form), tensors, strict=True):
            view.copy_(tensor)
        ring.send(transfer.tag)

    def receive(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the message, and copy it out of its slot, unless it may stay there."""
        ring = self._incoming[transfer.channel]
        if ring is None:
            received = self._others.receive(transfer)
            self.waiting_since_s = self._others.waiting_since_s
            return received
        self.waiting_since_s = time.perf_counter()
        if transfer.borrows:
            if transfer.channel in self._borrowed:
                ring.release()
            self._borrowed[transfer.channel] = ring
            return list(_views(ring.arrived(transfer.tag), transfer.form))
        slot = ring.arrived(transfer.tag)
        received = [view.clone() for view in _views(slot, transfer.form)]
        ring.release()
        return received

    def end(self) -> None:
        """What lies in a slot has left, once its receiver has opened it; what was read there goes back."""
        for borrowed in self._borrowed.values():
            borrowed.release()
        self._borrowed.clear()
        for ring in self._rings.outgoing.values():
            ring.settle()
        self._others.end()


def _views(slot: Slot, form: MessageForm) -> list[Tensor]:
    """The tensors of a message in a slot's memory."""
    views = slot.views.get(form)
    if views is None:
        if len(slot.views) >= _FORMS_KEPT:
            slot.views.clear()
        views = slot.views[form] = form.laid_out(slot.memory)
    return views


def _pair(transfer: Transfer) -> _Pair:
    stage, other = transfer.action.stage, transfer.other
    return (other, stage) if transfer.action.kind in RECEIVES else (stage, other)


def _rings_wanted(
    layout: Layout, skips: Sequence[tuple[int, int]], devices: Mapping[int, torch.device]
) -> tuple[dict[_Pair, Wanted], dict[_Pair, int]]:
    """Those that this process would send and receive through."""
    outgoing: dict[_Pair, Wanted] = {}
    incoming: dict[_Pair, int] = {}
    on_host = all(backend_of(device).is_host for device in devices.values())
    stages = range(len(layout.process_of))
    forward = [*((stage, stage + 1) for stage in stages[:-1]), *skips] if on_host else []
    for sender, receiver in [*forward, *((receiver, sender) for sender, receiver in forward)]:
        source, target = layout.process_of[sender], layout.process_of[receiver]
        if layout.process == source != target:
            at_least = room_between(sender, receiver, layout.ring)
            outgoing[sender, receiver] = Wanted(target, at_least, AHEAD_BYTES)
        elif layout.process == target != source:
            incoming[sender, receiver] = source
    return outgoing, incoming
