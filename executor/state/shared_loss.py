"""The loss of a step in every process: the sum of the replicas' in their order, each from its last stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from profiler.machine.backend import backend_of
from profiler.machine.channel import Pending, finish, start_receive, start_send
from profiler.machine.ring import Incoming, Outgoing, Slot
from profiler.machine.ring_meeting import Rings, Wanted, meet

LOSS_TAG = 0  # the first stage receives no micro-batch, to whose messages the lowest tags would belong
_STEPS_AHEAD = 2  # the last stage cannot end a step before the others have begun it
_LOSS_BYTES = 8


class SharedLoss:
    """Brings the loss from the last stage to all processes.

    Of one replica it travels as a message of its own, so that the last process need not wait until the first one is
    through with its backward passes, as a collective call would let it: through memory that the two share, or over
    sockets with a receive that is posted when the step begins. The latter takes 150 us of a step [measured]. NCCL
    carries messages in the order of their calls, so there and for several replicas it is a collective call.

    Args:
        layout: where the stages run.
        device: of this process.
        through_memory: whether processes of one machine use memory that they share; the same in all processes, which
            make it together.
    """

    def __init__(self, layout: Layout, device: torch.device, *, through_memory: bool) -> None:
        self._layout = layout
        self._device = device
        self._by_message = not layout.alone and layout.replicas == 1 and not backend_of(device).keeps_order
        self._expected: tuple[Tensor, Pending] | None = None
        rings = _met(layout) if self._by_message and through_memory else Rings()
        self._outgoing: dict[int, Outgoing] = {receiver: ring for (_, receiver), ring in rings.outgoing.items()}
        self._incoming: Incoming | None = next(iter(rings.incoming.values()), None)

    def interrupt(self) -> None:
        """From another thread: end all waits for shared memory, the present one and later ones, with an exception."""
        for ring in self._outgoing.values():
            ring.end()
        if self._incoming is not None:
            self._incoming.end()

    def begin(self) -> None:
        """Post the receive."""
        self._expected = None
        source = self._layout.last_processes[0]
        if self._by_message and self._layout.process != source and self._incoming is None:
            loss = torch.zeros(1, dtype=torch.float64)
            self._expected = loss, start_receive([loss], source=source, tag=LOSS_TAG)

    def of(self, own: Sequence[Tensor]) -> Tensor:
        """The loss of all replicas.

        Args:
            own: of the replicas whose last stage this process runs, scalars in float64.
        """
        if self._incoming is not None:
            losses = _view(self._incoming.arrived(LOSS_TAG)).clone()
            self._incoming.release()
        elif self._expected is not None:
            losses, pending = self._expected
            finish(pending)
        else:
            losses = torch.zeros(self._layout.replicas, device=self._device, dtype=torch.float64)
            for replica, loss in zip(self._layout.own_replicas, own, strict=False):  # none of a prediction
                losses[replica] = loss
            self._share(losses)
        total = losses[0]
        for replica in range(1, self._layout.replicas):
            total = total + losses[replica]
        return total

    def _share(self, losses: Tensor) -> None:
        layout = self._layout
        if self._by_message:
            for ring in self._outgoing.values():
                _view(ring.room(_LOSS_BYTES)).copy_(losses)
                ring.send(LOSS_TAG)
                ring.settle()
            others = [p for p in range(layout.processes) if p != layout.process and p not in self._outgoing]
            sent = [start_send([losses], to=process, tag=LOSS_TAG) for process in others]
            for pending in sent:
                finish(pending)
        elif not layout.alone and layout.replicas == 1:
            dist.broadcast(losses, src=layout.last_processes[0])
        elif not layout.alone:
            dist.all_reduce(losses)  # of each element all summands but one are 0


def _met(layout: Layout) -> Rings:
    """From the process of the last stage to each other one of its machine."""
    source = layout.last_processes[0]
    others = [process for process in range(layout.processes) if process != source]
    if layout.process == source:
        return meet({(source, process): Wanted(process, _STEPS_AHEAD, 0) for process in others}, {})
    return meet({}, {(source, layout.process): source})


def _view(slot: Slot) -> Tensor:
    """The loss in a slot, as a tensor of one number."""
    known = slot.views.get(LOSS_TAG)
    if known is None:
        known = slot.views[LOSS_TAG] = [slot.memory[:_LOSS_BYTES].view(torch.float64)]
    return known[0]
