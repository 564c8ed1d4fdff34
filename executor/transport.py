"""How values travel between stages: within one process, or between ranks over `torch.distributed`.

Both walk the same action lists. SEND hands a message over and returns at once; RECV waits for a receive that was
posted ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.schedule import Action, ActionKind
from profiler.channel import Pending, finish, start_receive, start_send

# Gradients are received this many micro-batches ahead; the planner counts the buffers.
GRADIENTS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor under way: it travels in its own memory order and arrives in it.

    Attributes:
        shape: of the tensor.
        dim_order: its dimensions from the outermost to the innermost in memory.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Contiguous memory for it, with the dimensions in memory order."""
        return torch.empty([self.shape[dim] for dim in self.dim_order], dtype=self.dtype, device=device)

    def unpacked(self, memory: Tensor) -> Tensor:
        """The tensor in that memory."""
        return memory.permute([self.dim_order.index(dim) for dim in range(len(self.shape))])

    def packed(self, tensor: Tensor) -> Tensor:
        """Contiguous memory with the tensor's elements in memory order; a copy only where its layout is another."""
        return tensor.permute(self.dim_order).contiguous()


MessageSpec = Callable[[Action], Sequence[TensorSpec]]  # what a SEND action sends or a RECV action receives


class Transport(Protocol):
    """Moves lists of tensors from a SEND action to the RECV action at its other end."""

    def begin(self, actions: Iterable[Action], spec: MessageSpec) -> None:
        """Get ready for the receives among `actions`, in their order."""

    def ready(self, action: Action) -> bool:
        """Whether a RECV action can be carried out now, or will complete when waited for."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors."""

    def receive(self, action: Action) -> list[Tensor]:
        """Wait for the tensors of a RECV action."""

    def end(self) -> None:
        """Wait until everything sent has left."""


class InProcess:
    """All stages in one process: a message is a list of references, moved to the receiver's device.

    Args:
        devices: by stage.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        self._devices = devices
        self._messages: dict[Action, list[Tensor]] = {}

    def begin(self, actions: Iterable[Action], spec: MessageSpec) -> None:
        """Drop what an aborted step left."""
        self._messages.clear()

    def ready(self, action: Action) -> bool:
        """Whether the message was sent."""
        return action in self._messages

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Move the message to the receiver's device."""
        target = action.other_end
        device = self._devices[target.stage]
        self._messages[target] = [tensor.to(device, non_blocking=True) for tensor in tensors]

    def receive(self, action: Action) -> list[Tensor]:
        """The message, which leaves the mailbox."""
        return self._messages.pop(action)

    def end(self) -> None:
        """Nothing is under way in one process."""
        self._messages.clear()


@dataclass(slots=True)
class _Posted:
    buffers: list[Tensor]
    pending: Pending


@dataclass(slots=True)
class _Inbox:
    """Receives of one direction: `ahead` of them are posted at any time."""

    ahead: int
    expected: deque[Action] = field(default_factory=deque)
    posted: dict[Action, _Posted] = field(default_factory=dict)


class Distributed:
    """One stage per rank; messages are point-to-point calls of `torch.distributed`.

    Args:
        stage: of this rank, equal to its rank.
        device: where receive buffers live.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self._groups = _groups_by_direction() if device.type == "cuda" else {}
        self._spec: MessageSpec = lambda _: ()
        self._inboxes: dict[ActionKind, _Inbox] = {}
        self._sent: deque[tuple[Pending, Sequence[Tensor]]] = deque()

    def begin(self, actions: Iterable[Action], spec: MessageSpec) -> None:
        """Post the first receives of each direction."""
        self._spec = spec
        self._inboxes = {
            # Stage inputs are kept until the backward pass anyway, so all their buffers may exist from the start.
            ActionKind.RECV_F: _Inbox(ahead=2**31),
            ActionKind.RECV_B: _Inbox(ahead=GRADIENTS_AHEAD),
        }
        for action in actions:
            if action.kind in self._inboxes:
                self._inboxes[action.kind].expected.append(action)
        for inbox in self._inboxes.values():
            self._post(inbox)

    def _post(self, inbox: _Inbox) -> None:
        while inbox.expected and len(inbox.posted) < inbox.ahead:
            action = inbox.expected.popleft()
            buffers = [spec.empty(self._device) for spec in self._spec(action)]
            source = action.other_end.stage
            pending = start_receive(
                buffers, source=source, tag=_tag(action), group=self._groups.get((source, self._stage))
            )
            inbox.posted[action] = _Posted(buffers, pending)

    def ready(self, action: Action) -> bool:
        """Always: waiting is how a rank gets on."""
        return True

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to send; what earlier messages held is let go once they are through."""
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            finish(self._sent.popleft()[0])
        target = action.other_end
        packed = [spec.packed(tensor) for spec, tensor in zip(self._spec(action), tensors, strict=True)]
        pending = start_send(
            packed, to=target.stage, tag=_tag(target), group=self._groups.get((self._stage, target.stage))
        )
        self._sent.append((pending, packed))

    def receive(self, action: Action) -> list[Tensor]:
        """Wait for the message, and post the next receive before."""
        inbox = self._inboxes[action.kind]
        posted = inbox.posted.pop(action)
        self._post(inbox)
        finish(posted.pending)
        specs = self._spec(action)
        return [spec.unpacked(memory) for spec, memory in zip(specs, posted.buffers, strict=True)]

    def end(self) -> None:
        """Wait until all messages are through."""
        while self._sent:
            finish(self._sent.popleft()[0])


VALUES_PER_MESSAGE = 1024  # tags of a message's tensors count up from the message's own


def _tag(receive: Action) -> int:
    """Tag of a message's first tensor, unique within a step between two ranks."""
    direction = int(receive.kind is ActionKind.RECV_B)
    return (2 * receive.micro_batch + direction) * VALUES_PER_MESSAGE


def _groups_by_direction() -> dict[tuple[int, int], dist.ProcessGroup]:
    """For NCCL, one communicator per pair and direction: a posted receive must not hold up sends."""
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for rank in range(dist.get_world_size() - 1):
        for pair in ((rank, rank + 1), (rank + 1, rank)):
            groups[pair] = dist.new_group(sorted(pair))
    return groups
