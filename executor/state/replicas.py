"""Replicas: pipelines side by side, whose gradients are summed at the end of a step.

The loss of a micro-batch is weighted by its share of the whole mini-batch, so the sum over replicas is the mean over
all samples. It is taken in the order of the replicas, whatever their number: then a process that runs all of them one
after the other, the reference, gets the same bits. `all_reduce` adds in an order of its own; here each process sums
its share of the elements over all replicas, and the shares are gathered. That moves as many bytes as a ring.

    replica 0   a0 b0 c0          a = a0 + a1 + a2 -----> a b c
    replica 1   a1 b1 c1   ---->  b = b0 + b1 + b2 -----> a b c
    replica 2   a2 b2 c2          c = c0 + c1 + c2 -----> a b c
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.state.tied import dense
from planner.plan.shares import BUCKET_BYTES


class GradientSum:
    """Sums the gradients of a step over the replicas.

    Args:
        parameters: of this process, or what collects their gradients.
        layout: of this process.
        group: what `group_of_peers` made.
        owners: for each of them the replica that alone needs the sum; None where all do.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: Layout,
        group: dist.ProcessGroup | None,
        owners: Sequence[int | None] = (),
    ) -> None:
        trained = [parameter.requires_grad for parameter in parameters]
        self._parameters = list(compress(parameters, trained))
        self._owners = list(compress(owners or [None] * len(trained), trained))
        self._layout = layout
        self._group = group
        self._earlier: list[Tensor | None] = []
        self._totals: list[Tensor | None] = []

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """Gradients are those of earlier steps and of this one after the block, and as they were if it raises.

        Within one replica micro-batches are added to what earlier steps left, in place, since a copy would take the
        memory of all gradients once more. What they have added so far can then not be taken back, and the error has a
        note that says so.
        """
        self._earlier = [parameter.grad for parameter in self._parameters]
        if self._layout.replicas > 1:  # which must not be summed again
            self._clear()
        try:
            yield
        except BaseException as problem:
            self._take_back(problem)
            raise
        finally:
            self._earlier, self._totals = [], []

    def _take_back(self, problem: BaseException) -> None:
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        changed = sum(earlier is not None for earlier in self._earlier)
        if changed and self._layout.replicas == 1:
            problem.add_note(
                f"{changed} of {len(self._earlier)} parameters had a gradient before this step, and may hold a part of "
                "the step's now; set them to zero, and repeat the steps since the last optimizer step"
            )

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def add_replica(self) -> None:
        """A process that runs all replicas has done one more."""
        if self._layout.replicas > 1 and self._layout.alone:
            totals = self._totals or [None] * len(self._parameters)
            self._totals = [
                _sum_of(total, dense(parameter.grad)) for total, parameter in zip(totals, self._parameters, strict=True)
            ]
            self._clear()

    def end(self) -> None:
        """Leave the sum over all replicas, and what earlier steps left, in `.grad`."""
        if self._layout.replicas == 1:
            return
        if not self._layout.alone:
            self._totals = [dense(parameter.grad) for parameter in self._parameters]
            self._complete()
            self._sum_all()
            for position, owner in enumerate(self._owners):
                if owner not in {None, self._layout.replica}:
                    self._totals[position] = self._earlier[position] = None
        for parameter, earlier, total in zip(self._parameters, self._earlier, self._totals, strict=True):
            parameter.grad = _sum_of(earlier, total)

    def _complete(self) -> None:
        """Have gradients for the same parameters as the other replicas, so that all take part in the same sums.

        Data decide what a batch reaches, as with experts. One that is missing is all negative zeros: whatever these are
        added to stays the same in every bit. What no replica has a gradient for gets none.
        """
        if not self._parameters:
            return
        counts = torch.tensor([total is not None for total in self._totals], dtype=torch.int32)
        counts = counts.to(self._parameters[0].device)
        dist.all_reduce(counts, group=self._group)
        for position, (parameter, count) in enumerate(zip(self._parameters, counts.tolist(), strict=True)):
            if count and self._totals[position] is None:
                self._totals[position] = torch.zeros_like(parameter, requires_grad=False).neg_()

    def _sum_all(self) -> None:
        """Sum what this step has added, wherever it is needed."""
        added = [(total, owner) for total, owner in zip(self._totals, self._owners, strict=True) if total is not None]
        buffers = Buffers()
        for piece in pieces([total for total, owner in added if owner is None], BUCKET_BYTES):
            self._sum(piece, buffers)
        owned = [[total for total, owner in added if owner == replica] for replica in range(self._layout.replicas)]
        for given in rounds(owned):
            self._sum_for_owners(given, buffers)

    def _sum(self, tensors: Sequence[Tensor], buffers: Buffers) -> None:
        """Sum the tensors over the replicas, in place."""
        replicas = self._layout.replicas
        share = -(-sum(tensor.numel() for tensor in tensors) // replicas)
        going, coming = buffers.going(share * replicas, tensors[0]), buffers.coming(share * replicas, tensors[0])
        fill(going, tensors)
        dist.all_to_all_single(coming, going, group=self._group)
        _add_up(coming, share)
        give_to_all(coming, going, replicas, self._group)
        for place, tensor in zip(places(going, tensors), tensors, strict=True):
            tensor.copy_(place)

    def _sum_for_owners(self, given: Sequence[Sequence[Tensor]], buffers: Buffers) -> None:
        """Sum the tensors over the replicas, in place, those of each on itself alone."""
        elements = [sum(tensor.numel() for tensor in owned) for owned in given]
        own, share = given[self._layout.replica], elements[self._layout.replica]
        every = [tensor for owned in given for tensor in owned]
        going, coming = buffers.going(sum(elements), every[0]), buffers.coming(share * len(given), every[0])
        fill(going, every)
        dist.all_to_all_single(coming, going, [share] * len(elements), elements, group=self._group)
        _add_up(coming, share)
        for place, tensor in zip(places(coming, own), own, strict=True):
            tensor.copy_(place)


def _sum_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Of two gradients, of which each may be missing."""
    return second if first is None else first if second is None else first + second


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


def _add_up(shares: Tensor, share: int) -> None:
    """Leave the sum of equal shares, added in their order, in the place of the first."""
    total = shares[:share]
    for other in shares.split(share)[1:] if share else ():
        total += other


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


def group_of_peers(layout: Layout) -> dist.ProcessGroup | None:
    """The processes that run the same stages; every process makes the groups of all."""
    if layout.alone or layout.replicas == 1:
        return None
    own = None
    for first in layout.first_replica:
        peers = layout.peers_of(first)
        group = dist.new_group(list(peers))
        if layout.process in peers:
            own = group
    return own
