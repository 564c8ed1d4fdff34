"""Which transports there are, and which one carries a pipeline's messages; nobody else chooses.

A further one is one more file with one class (`executor.run.transport`), and its entry in `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from executor.layout import Layout
from executor.run.distributed import Distributed
from executor.run.in_process import InProcess
from executor.run.shared_memory import SharedMemory
from executor.run.transport import MakeTransport, Transport
from profiler.machine.backend import HOST, backend_of

TRANSPORTS: Sequence[MakeTransport] = (InProcess.between, SharedMemory.between, Distributed.between)
"""In order: the first that can carry the messages is taken."""

ANY = "auto"
LIBRARY = backend_of(HOST).process_group
CHOICES = (ANY, LIBRARY)
"""What a user may ask for: any transport, or the library that carries tensors of the host, and no shared memory."""


def transport_for(
    layout: Layout,
    skips: Sequence[tuple[int, int]],
    devices: Mapping[int, torch.device],
    wanted: str = ANY,
) -> Transport:
    """The transport between the processes of a pipeline; see `MakeTransport` for the arguments.

    `wanted` is one of `CHOICES`, the same in all processes.
    """
    left_out = SharedMemory.between if wanted == LIBRARY else None
    made = (make(layout, skips, devices) for make in TRANSPORTS if make != left_out)
    return next(transport for transport in made if transport is not None)
