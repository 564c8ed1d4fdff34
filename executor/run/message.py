"""The form of a message: which tensors it moves, and in how many pieces.

A piece is one point-to-point call, which costs more than a short copy: several small tensors travel in one piece of
bytes, large ones each in a piece of their own memory, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from profiler.machine.ring import aligned

SMALL_BYTES = 64 * 1024  # copying them takes 5 us, a message of its own 15 us on each side, and a thread's wake-up


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

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Its extents in memory order."""
        return tuple(self.shape[dim] for dim in self.dim_order)

    @property
    def is_plain(self) -> bool:
        """Whether memory order is the order of its dimensions."""
        return self.dim_order == tuple(range(len(self.shape)))


class MessageForm:
    """How a list of tensors becomes pieces and comes back.

    Args:
        specs: of the tensors.
        device: where the pieces live.

    Attributes:
        size_bytes: of all tensors.
        slot_bytes: that they take where they lie side by side.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self._device = device
        self._specs = tuple(specs)
        self._extents = [spec.in_memory for spec in specs]
        self._orders = [None if spec.is_plain else spec.dim_order for spec in specs]
        self._inverse = [
            None if spec.is_plain else [spec.dim_order.index(dim) for dim in range(len(spec.shape))] for spec in specs
        ]
        small = [index for index, spec in enumerate(specs) if spec.size_bytes <= SMALL_BYTES]
        self._offsets: dict[int, int] = {}
        end = 0
        for index in small if len(small) > 1 else []:
            self._offsets[index] = end
            end += aligned(specs[index].size_bytes)
        self._small_bytes = end
        self.size_bytes = sum(spec.size_bytes for spec in specs)
        ends = accumulate((aligned(spec.size_bytes) for spec in specs), initial=0)
        *self._starts, self.slot_bytes = ends

    def buffers(self) -> list[Tensor]:
        """Memory to receive the pieces into."""
        pieces = [
            torch.empty(self._extents[index], dtype=spec.dtype, device=self._device)
            for index, spec in enumerate(self._specs)
            if index not in self._offsets
        ]
        if self._offsets:
            pieces.append(torch.empty(self._small_bytes, dtype=torch.uint8, device=self._device))
        return pieces

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The pieces to send; a large tensor is copied only where its layout is another."""
        pieces = []
        shared = None
        if self._offsets:
            shared = torch.empty(self._small_bytes, dtype=torch.uint8, device=self._device)
        for index, tensor in enumerate(tensors):
            order = self._orders[index]
            ordered = tensor if order is None else tensor.permute(order)
            if index in self._offsets:
                self._slot(shared, index).copy_(ordered)
            else:
                pieces.append(ordered.contiguous())
        if shared is not None:
            pieces.append(shared)
        return pieces

    def unpack(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the pieces' memory."""
        tensors = []
        whole = iter(pieces)
        for index in range(len(self._specs)):
            memory = self._slot(pieces[-1], index) if index in self._offsets else next(whole)
            inverse = self._inverse[index]
            tensors.append(memory if inverse is None else memory.permute(inverse))
        return tensors

    def laid_out(self, memory: Tensor) -> list[Tensor]:
        """The tensors side by side in memory of at least `slot_bytes`."""
        tensors = []
        for spec, start, extents, inverse in zip(self._specs, self._starts, self._extents, self._inverse, strict=True):
            own = memory[start : start + spec.size_bytes].view(spec.dtype).view(extents)
            tensors.append(own if inverse is None else own.permute(inverse))
        return tensors

    def _slot(self, shared: Tensor | None, index: int) -> Tensor:
        """A small tensor's place in the shared piece, in memory order."""
        assert shared is not None, "small tensors share a piece"
        spec, offset = self._specs[index], self._offsets[index]
        return shared[offset : offset + spec.size_bytes].view(spec.dtype).view(self._extents[index])
