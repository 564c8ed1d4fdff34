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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.state.pieces import Buffers, fill, give_to_all, in_buckets, places, rounds
from executor.state.tied import dense


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
        for piece in in_buckets([total for total, owner in added if owner is None]):
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


def _add_up(shares: Tensor, share: int) -> None:
    """Leave the sum of equal shares, added in their order, in the place of the first."""
    total = shares[:share]
    for other in shares.split(share)[1:] if share else ():
        total += other


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
