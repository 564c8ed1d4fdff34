"""What a transport is to us: it moves values between stages, within one process or to another.

    class Files:                       # in a file of its own; then an entry in `executor.run.transports`
        def send(self, transfer, tensors): ...

SEND hands a message over and returns at once; RECV waits for a receive that was posted ahead. What was sent is let go
as soon as its channel is known to be free: some messages later on the same channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.message import MessageForm
from executor.run.rank_order import RECEIVES
from planner.plan.actions import AHEAD_BYTES, SENDS_AHEAD, Action, receives_ahead
from planner.plan.schedules import ONE_CHUNK, Ring


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One SEND or RECV action with all that is known before it happens.

    Attributes:
        action: the SEND or RECV.
        form: of the message.
        device: where the receiving stage wants the tensors.
        channel: number of the pair of stages and direction, the same at both ends. Numbers are found faster than
            actions, whose hash Python computes.
        unlimited: whether all receives of this kind and stage may be posted at once, whatever their size.
        most: how many messages like this one can be under way on its channel, by the order of actions.
        ring: which rank runs which stages.
        borrows: of a RECV: whether nobody needs the tensors any more, or changes them before, when the next message of
            the channel is waited for, or the run ends; they may lie in memory of the transport then.
        other: stage at the other end.
        tag: of the message, the same at both ends.
        at_least: how many messages like this one may be under way on its channel, however long, seen from this end.
        ahead: how many may be.
    """

    action: Action
    form: MessageForm
    device: torch.device
    channel: int
    unlimited: bool = False
    most: int = field(default_factory=lambda: _MICRO_BATCHES)
    ring: Ring = ONE_CHUNK
    borrows: bool = False
    other: int = field(init=False)
    tag: int = field(init=False)
    at_least: int = field(init=False)
    ahead: int = field(init=False)

    def __post_init__(self) -> None:
        other = self.action.other_end.stage
        distance = abs(other - self.action.stage)
        at_least = min(receives_ahead(distance, self.ring) if self.action.kind in RECEIVES else SENDS_AHEAD, self.most)
        wanted = _MICRO_BATCHES if self.unlimited else max(at_least, AHEAD_BYTES // max(1, self.form.size_bytes))
        object.__setattr__(self, "other", other)
        object.__setattr__(self, "tag", _tag(self.channel, self.action.micro_batch))
        object.__setattr__(self, "at_least", at_least)
        object.__setattr__(self, "ahead", min(wanted, self.most, _MICRO_BATCHES))  # tags tell no more apart


class Transport(Protocol):
    """Moves lists of tensors from a SEND action to the RECV action at its other end.

    Attributes:
        waiting_since_s: when the last receive began to wait, by `time.perf_counter`; None where none ever waits.
    """

    waiting_since_s: float | None

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups of its own, in which a process may wait."""

    @property
    def slots_bytes(self) -> int:
        """Bytes of memory that it holds in addition to tensors."""

    def interrupt(self) -> None:
        """From another thread: end all other waits, the present one and later ones, with an exception."""

    def begin(self, receives: Sequence[Transfer]) -> None:
        """Get ready for these receives, in their order."""

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Get memory for receives that will be posted after the next pass, during which their messages leave."""

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Post these receives, which are the next of their channels; where a program says when."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors."""

    def receive(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the tensors of a RECV action."""

    def end(self) -> None:
        """Wait until everything sent has left."""


MakeTransport: TypeAlias = Callable[[Layout, Sequence[tuple[int, int]], Mapping[int, torch.device]], Transport | None]
"""Makes a transport, in all processes at once; None, in all, if it cannot carry the messages of this pipeline.

Of: where the stages run; pairs of stages that are no neighbours, of which the first sends values to the second; the
devices of the stages that this process runs.
"""

PIECES_PER_MESSAGE = 1024  # tags of a message's pieces count up from the message's own
_CHANNELS = 2048  # tags tell as many pairs of stages and directions apart
_MICRO_BATCHES = 1024


def _tag(channel: int, micro_batch: int) -> int:
    """Tag of a message's first piece, unique among those under way between two processes."""
    return (channel % _CHANNELS * _MICRO_BATCHES + micro_batch % _MICRO_BATCHES) * PIECES_PER_MESSAGE
