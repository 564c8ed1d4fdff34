"""Which transports there are, and which one carries a pipeline's messages; nobody else chooses.

A further one is one more file with one class (`executor.run.transport`), and its entry in `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from executor.layout import Layout
from executor.run.distributed import Distributed
from executor.run.in_process import InProcess
from executor.run.shared_memory import SharedMemory
from executor.run.transport import MakeTransport, Transport

TRANSPORTS: Mapping[str, MakeTransport] = {
    "in process": InProcess.between,
    "shared memory": SharedMemory.between,
    "gloo": Distributed.between,
}
"""By name, in order: the first that can carry the messages is taken."""

TransportName: TypeAlias = Literal["auto", "gloo"]
"""What a user may ask for: "auto" for the first that can, or messages between processes over sockets only."""


def transport_for(
    layout: Layout,
    skips: Sequence[tuple[int, int]],
    devices: Mapping[int, torch.device],
    wanted: TransportName = "auto",
) -> Transport:
    """The transport between the processes of a pipeline; see `MakeTransport` for the arguments."""
    left_out = () if wanted == "auto" else ("shared memory",)
    made = (make(layout, skips, devices) for name, make in TRANSPORTS.items() if name not in left_out)
    return next(transport for transport in made if transport is not None)
