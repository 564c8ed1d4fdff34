"""Which transports there are, and which one carries a pipeline's messages; nobody else chooses.

A further one is one more file with one class (`executor.run.transport`), and its entry in `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from executor.layout import Layout
from executor.run.distributed import Distributed
from executor.run.in_process import InProcess
from executor.run.transport import MakeTransport, Transport

TRANSPORTS: Sequence[MakeTransport] = (InProcess.between, Distributed.between)
"""In order: the first that can carry the messages is taken."""


def transport_for(layout: Layout, skips: Sequence[tuple[int, int]], devices: Mapping[int, torch.device]) -> Transport:
    """The transport between the processes of a pipeline; see `MakeTransport` for the arguments."""
    made = (make(layout, skips, devices) for make in TRANSPORTS)
    return next(transport for transport in made if transport is not None)
