"""Many tensors as few flat messages of a bounded size: what replicas sum, exchange and share at a time.

    buffers = Buffers()
    for piece in in_buckets(gradients):         # neighbours of one type, or parts of a large one
        going = buffers.going(sum(part.numel() for part in piece), piece[0])
        fill(going, piece)                      # `places` says where each part lies in it

Messages of parameters whole would take the memory of all of them once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from planner.plan.shares import BUCKET_BYTES


class Buffers:
    """What goes out and what comes in, in memory that all pieces of one exchange take turns in.

    Memory for each of its own would be mapped anew for each, and what carries a message may be the last to let it go.
    """

    def __init__(self) -> None:
        self._held: list[Tensor | None] = [None, None]

    def going(self, elements: int, like: Tensor) -> Tensor:
        """A flat tensor for what goes out, of a tensor's type and device."""
        return self._taken(0, elements, like)

    def coming(self, elements: int, like: Tensor) -> Tensor:
        """The same for what comes in."""
        return self._taken(1, elements, like)

    def _taken(self, number: int, elements: int, like: Tensor) -> Tensor:
        held, needed = self._held[number], elements * like.element_size()
        if held is None or held.nbytes < needed or held.device != like.device:
            self._held[number] = None  # before there is another one
            held = self._held[number] = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return held[:needed].view(like.dtype)


def fill(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the tensors into a flat one, one after the other."""
    for place, tensor in zip(places(flat, tensors), tensors, strict=True):
        place.copy_(tensor)


def give_to_all(parts: Tensor, found: Tensor, replicas: int, group: dist.ProcessGroup | None) -> None:
    """Give all replicas the first of so many equal parts; what they give is found one after the other.

    As `all_gather` does, for which gloo makes one more copy of all of it.
    """
    first, *others = parts.chunk(replicas)
    for other in others:
        other.copy_(first)
    dist.all_to_all_single(found, parts, group=group)


def rounds(of_replicas: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Tensors that belong to a replica each, in rounds of one type, in which all have equal parts of a bucket at most.

    Args:
        of_replicas: the tensors of each; all processes have equally large ones.
    """
    most_bytes = BUCKET_BYTES // len(of_replicas)
    for dtype in sorted({tensor.dtype for owned in of_replicas for tensor in owned}, key=str):
        alike = [[tensor for tensor in owned if tensor.dtype == dtype] for owned in of_replicas]
        yield from zip_longest(*(pieces(owned, most_bytes) for owned in alike), fillvalue=())


def in_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Their `pieces`, of a bucket at most."""
    return pieces(tensors, BUCKET_BYTES)


def pieces(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Neighbours of one type and device, or parts of them, together of so many bytes at most.

    How they are cut follows from their shapes alone: in each process alike, however they lie in memory.
    """
    piece: list[Tensor] = []
    held = 0
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        unlike = piece and (tensor.dtype, tensor.device) != (piece[0].dtype, piece[0].device)
        for part in _parts(tensor, max(1, most_bytes // tensor.element_size())):
            if piece and (unlike or held + part.nbytes > most_bytes):
                yield piece
                piece, held, unlike = [], 0, False
            piece.append(part)
            held += part.nbytes
    if piece:
        yield piece


def _parts(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """The tensor in parts of so many elements at most, in their order."""
    if tensor.numel() <= most:
        yield tensor
    elif rows := most // (tensor.numel() // tensor.shape[0]):
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _parts(row, most)


def places(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Where each tensor lies in the flat one."""
    begin = 0
    for tensor in tensors:
        yield flat[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
