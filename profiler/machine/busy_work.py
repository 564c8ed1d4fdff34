"""The main program of `profiler.machine.background_load`: work like a training worker's, without end."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

import torch
from torch.nn import functional

from profiler.machine.backend import HOST

ROWS = 512  # tokens of a micro-batch
WIDTH = 512  # with ROWS: operands and results of 1 to 4 MB, of the order of a layer's in a model that a CPU trains
READY = b"ready"


def main() -> None:
    """Say over the inherited socket that the work has begun, and work until the parent closes it or dies."""
    threads, descriptor = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    work = busy_work(HOST)
    work()
    connection.sendall(READY)
    while True:
        work()


def busy_work(device: torch.device, rows: int = ROWS) -> Callable[[], torch.Tensor]:
    """A feed-forward block, to be called: two matrix products and passes over memory between them."""
    inputs = torch.randn(rows, WIDTH, device=device)
    expansion = torch.randn(4 * WIDTH, WIDTH, device=device) / WIDTH**0.5
    projection = torch.randn(WIDTH, 4 * WIDTH, device=device) / WIDTH**0.5

    def work() -> torch.Tensor:
        hidden = functional.gelu(functional.linear(functional.layer_norm(inputs, [WIDTH]), expansion))
        return inputs + functional.linear(hidden, projection)

    return work


def _end_with_parent(connection: socket.socket) -> None:
    try:
        connection.recv(1)
    finally:  # also where the parent died before it had read that we are ready: then the connection is reset
        os._exit(0)
