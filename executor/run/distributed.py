"""Messages between processes, over `torch.distributed`.

Posting far ahead matters: gloo writes a message inside the sender's call if it knows of the receive. Otherwise a thread
of its own does so later, on a core that computes, and a step of short micro-batches took twice as long [measured].
A receive takes 25 us to post, so none is posted before its process would wait anyway, and then some at a time.

Where messages arrive in the order of their calls, the program says when each is posted: `executor.run.one_order`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.rank_order import RECEIVES
from executor.run.transport import Transfer
from profiler.machine.backend import backend_of
from profiler.machine.channel import End, Pending, end_at, finish, offer_core
from profiler.machine.device_kind import Backend

POSTED_AT_A_TIME = 4  # receives, of each message that is waited for


@dataclass(slots=True)
class _Inbox:
    """Receives of one channel: up to `ahead` of them are posted, at least `at_least` from the start."""

    at_least: int
    ahead: int
    expected: deque[Transfer] = field(default_factory=deque)
    posted: dict[int, tuple[list[Tensor], Pending]] = field(default_factory=dict)


class Distributed:
    """Between processes: messages are point-to-point calls of `torch.distributed`.

    Args:
        layout: where the stages run.
        skips: pairs of stages that are no neighbours, of which the first sends values to the second.
        backend: of this process's devices.
    """

    @classmethod
    def between(
        cls, layout: Layout, skips: Sequence[tuple[int, int]], devices: Mapping[int, torch.device]
    ) -> Distributed:
        """Between any processes that torch has joined."""
        device = devices[layout.stages[0]]
        made = cls(layout, skips, backend_of(device))
        made.meet(device)
        return made

    def __init__(self, layout: Layout, skips: Sequence[tuple[int, int]], backend: Backend) -> None:
        self._layout = layout
        self._backend = backend
        self._in_order = backend.keeps_order
        self._groups = _groups_by_channel(layout, skips, backend) if self._in_order else {}
        self._ends: dict[int, End] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._prepared: dict[int, tuple[list[Tensor], object]] = {}  # by tag: memory, and since when it is free
        self._unposted: list[_Inbox] = []
        self._sent: dict[int, deque[tuple[Pending, Sequence[Tensor]]]] = {}
        self.waiting_since_s: float | None = None

    def meet(self, device: torch.device) -> None:
        """Send a first message on each channel that has a communicator of its own, in the same order in all processes.

        The first message makes the communicator, and its call returns when the process at the other end has called,
        too. Receives that are posted ahead would wait so for one another: of three ranks the middle one for the last,
        whose first forward pass it has not sent yet.

        Args:
            device: of this process.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for ends, group in self._groups.items():
            sender, receiver = (self._layout.process_of[stage] for stage in ends)
            if sender == self._layout.process:
                finish(end_at(receiver, group).send([byte], 0))
            else:
                finish(end_at(sender, group).receive([byte], 0))

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """One for each channel where messages arrive in the order of their calls."""
        return list(self._groups.values())

    @property
    def slots_bytes(self) -> int:
        """Messages are tensors here."""
        return 0

    def interrupt(self) -> None:
        """All waits are in process groups."""

    def begin(self, receives: Sequence[Transfer]) -> None:
        """Note which receives will come; the first ones of each channel are posted before this process waits at all."""
        self._inboxes = {}
        self._prepared = {}
        self._sent = {}
        for transfer in receives:
            inbox = self._inboxes.get(transfer.channel)
            if inbox is None:
                inbox = self._inboxes[transfer.channel] = _Inbox(transfer.at_least, transfer.ahead)
            inbox.expected.append(transfer)
        self._unposted = [] if self._in_order else list(self._inboxes.values())

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Get their memory, and note since when it is free.

        A receive of NCCL waits for what its stream was given before. Posted after a pass, during which its message
        leaves, it would begin only when that pass ends.
        """
        for transfer in transfers:
            buffers = transfer.form.buffers()
            self._prepared[transfer.tag] = buffers, self._backend.moment(transfer.device)

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Post receives whose turn it is, where messages arrive in the order of their calls."""
        for transfer in transfers:
            self._post(self._inboxes[transfer.channel], 1)

    def _post_first(self) -> None:
        """Without them two processes might wait for each other: the order of actions counts on them."""
        while self._unposted:
            inbox = self._unposted.pop(0)
            self._post(inbox, inbox.at_least)

    def _post(self, inbox: _Inbox, at_most: int) -> None:
        room = at_most if self._in_order else inbox.ahead - len(inbox.posted)
        for _ in range(min(at_most, len(inbox.expected), room)):
            transfer = inbox.expected.popleft()
            inbox.posted[transfer.tag] = self._begun(transfer)
            offer_core()

    def _begun(self, transfer: Transfer) -> tuple[list[Tensor], Pending]:
        prepared = self._prepared.pop(transfer.tag, None)
        if prepared is None:
            buffers = transfer.form.buffers()
            return buffers, self._end(transfer).receive(buffers, transfer.tag)
        buffers, moment = prepared
        with self._backend.after(moment, transfer.device):
            return buffers, self._end(transfer).receive(buffers, transfer.tag)

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Start to send; before, wait for the oldest message on this channel if too many are under way."""
        sent = self._sent.setdefault(transfer.channel, deque())
        while len(sent) >= transfer.ahead:
            self._post_first()
            finish(sent.popleft()[0])
        pieces = transfer.form.pack(tensors)
        offer_core()
        sent.append((self._end(transfer).send(pieces, transfer.tag), pieces))

    def receive(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the message, and post next receives before."""
        if self._unposted:
            self._post_first()
        inbox = self._inboxes[transfer.channel]
        buffers, pending = inbox.posted.pop(transfer.tag)
        if inbox.expected and not self._in_order:
            self._post(inbox, POSTED_AT_A_TIME)
        self.waiting_since_s = time.perf_counter()
        finish(pending)
        return transfer.form.unpack(buffers)

    def end(self) -> None:
        """Wait until all messages are through."""
        for sent in self._sent.values():
            while sent:
                finish(sent.popleft()[0])

    def _end(self, transfer: Transfer) -> End:
        """The process at the other end, which is the same for all messages of a channel."""
        end = self._ends.get(transfer.channel)
        if end is None:
            action, other = transfer.action, transfer.other
            pair = (other, action.stage) if action.kind in RECEIVES else (action.stage, other)
            end = self._ends[transfer.channel] = end_at(self._layout.process_of[other], self._groups.get(pair))
        return end


def _groups_by_channel(
    layout: Layout, skips: Sequence[tuple[int, int]], backend: Backend
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """One communicator per pair of stages and direction: a posted receive must not hold up sends."""
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    stages = range(len(layout.process_of))
    for replica in range(layout.replicas):
        process_of = [layout.peers_of(process)[replica] for process in layout.process_of]
        forward = [*((k, k + 1) for k in stages[:-1]), *skips]
        for pair in [*forward, *((receiver, sender) for sender, receiver in forward)]:
            ends = sorted({process_of[stage] for stage in pair})
            if len(ends) == 2:
                group = dist.new_group(ends, backend=backend.process_group, pg_options=backend.message_options())
                if layout.process in ends:
                    groups[pair] = group
    return groups
