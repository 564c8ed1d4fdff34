"""Messages between stages of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.transport import Transfer


class InProcess:
    """Between stages of one process: a message is a list of references, moved to the receiver's device."""

    groups: Sequence[dist.ProcessGroup] = ()
    slots_bytes = 0
    waiting_since_s: float | None = None

    @classmethod
    def between(
        cls, layout: Layout, skips: Sequence[tuple[int, int]], devices: Mapping[int, torch.device]
    ) -> InProcess | None:
        """Where one process runs all stages."""
        return cls() if layout.alone else None

    def __init__(self) -> None:
        self._messages: dict[int, list[Tensor]] = {}

    def interrupt(self) -> None:
        """Nothing waits in one process."""

    def begin(self, receives: Sequence[Transfer]) -> None:
        """Drop what an aborted step left."""
        self._messages.clear()

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Nothing is posted in one process."""

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Nothing is posted in one process."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Move the message to the receiver's device."""
        device = transfer.device
        moved = [tensor if tensor.device == device else tensor.to(device, non_blocking=True) for tensor in tensors]
        self._messages[transfer.tag] = moved

    def receive(self, transfer: Transfer) -> list[Tensor]:
        """The message, which leaves the mailbox."""
        return self._messages.pop(transfer.tag)

    def end(self) -> None:
        """Nothing is under way in one process."""
        self._messages.clear()
