"""What rank 0 tells all others: a few bytes, fewer still where they are those of the time before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from profiler.machine.channel import End, Pending, end_at, finish

_AS_BEFORE = -1
_FIRST_TAG = 16  # like the loss these travel on tags of the first stage, which receives no micro-batch


class Words:
    """Texts of one subject, from rank 0 to all others.

    A header of fixed size comes first, since a receive must know how much there is to come.

    Args:
        subject: a small number; texts of several subjects do not mix.
        layout: of this process.
        group: the process group to talk in, which carries tensors on the CPU; None for the default one.
    """

    def __init__(self, subject: int, layout: Layout, group: dist.ProcessGroup | None) -> None:
        self._tag = _FIRST_TAG + 2 * subject
        self._is_teller = layout.process == 0
        others = range(1, layout.processes) if self._is_teller else (0,)
        self._ends: list[End] = [end_at(other, group) for other in others]
        self._last: bytes | None = None
        self._under_way: list[tuple[Pending, Tensor]] = []

    def tell(self, text: bytes) -> None:
        """Begin to tell all others; on rank 0."""
        self.finish()
        is_new = text != self._last
        header = torch.tensor([len(text) if is_new else _AS_BEFORE])
        self._under_way += [(end.send([header], self._tag), header) for end in self._ends]
        if is_new and text:
            body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._under_way += [(end.send([body], self._tag + 1), body) for end in self._ends]
        self._last = text

    def hear(self) -> bytes:
        """Wait for what rank 0 tells; on all others."""
        header = torch.empty(1, dtype=torch.int64)
        finish(self._ends[0].receive([header], self._tag))
        length = int(header)
        if length != _AS_BEFORE:
            body = torch.empty(length, dtype=torch.uint8)
            if length:
                finish(self._ends[0].receive([body], self._tag + 1))
            self._last = body.numpy().tobytes()
        assert self._last is not None, "rank 0 said so before"
        return self._last

    def finish(self) -> None:
        """Wait until all have heard what this rank has told."""
        while self._under_way:
            finish(self._under_way.pop()[0])
