"""The loss of a step in every process: the sum of the replicas' in their order, each from its last stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from profiler.machine.backend import backend_of
from profiler.machine.channel import Pending, finish, start_receive, start_send

LOSS_TAG = 0  # the first stage receives no micro-batch, to whose messages the lowest tags would belong


class SharedLoss:
    """Brings the loss from the last stage to all processes.

    Of one replica it travels as a message of its own, whose receive is posted when the step begins: the last process
    need not wait until the first one is through with its backward passes, as a collective call would let it. NCCL
    carries messages in the order of their calls, so there and for several replicas it is a collective call.

    Args:
        layout: where the stages run.
        device: of this process.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._by_message = not layout.alone and layout.replicas == 1 and not backend_of(device).keeps_order
        self._expected: tuple[Tensor, Pending] | None = None

    def begin(self) -> None:
        """Post the receive."""
        self._expected = None
        if self._by_message and self._layout.process != self._layout.last_processes[0]:
            loss = torch.zeros(1, dtype=torch.float64)
            self._expected = loss, start_receive([loss], source=self._layout.last_processes[0], tag=LOSS_TAG)

    def of(self, own: Sequence[Tensor]) -> Tensor:
        """The loss of all replicas.

        Args:
            own: of the replicas whose last stage this process runs, scalars in float64.
        """
        if self._expected is not None:
            losses, pending = self._expected
            finish(pending)
        else:
            losses = torch.zeros(self._layout.replicas, device=self._device, dtype=torch.float64)
            if own:
                losses[list(self._layout.own_replicas)] = torch.stack(list(own))
            self._share(losses)
        total = losses[0]
        for replica in range(1, self._layout.replicas):
            total = total + losses[replica]
        return total

    def _share(self, losses: Tensor) -> None:
        layout = self._layout
        if self._by_message:
            others = [process for process in range(layout.processes) if process != layout.process]
            sent = [start_send([losses], to=process, tag=LOSS_TAG) for process in others]
            for pending in sent:
                finish(pending)
        elif not layout.alone and layout.replicas == 1:
            dist.broadcast(losses, src=layout.last_processes[0])
        elif not layout.alone:
            dist.all_reduce(losses)  # of each element all summands but one are 0
