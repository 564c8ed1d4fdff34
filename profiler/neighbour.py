"""The main program of a neighbour process, see `profiler.neighbours`: work like a training worker's, without end."""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch.nn import functional

ROWS = 512  # tokens of a micro-batch
WIDTH = 512  # with ROWS: operands and results of 1 to 4 MB, of the order of a layer's in a model that a CPU trains
READY = b"ready\n"


def main() -> None:
    """Say that the work has begun, and work until the parent closes our standard input or dies."""
    torch.set_num_threads(int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    inputs = torch.randn(ROWS, WIDTH)
    expansion = torch.randn(4 * WIDTH, WIDTH) / WIDTH**0.5
    projection = torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5
    _work(inputs, expansion, projection)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while True:
        _work(inputs, expansion, projection)


def _work(inputs: torch.Tensor, expansion: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """One feed-forward block: two matrix products and passes over memory between them."""
    hidden = functional.gelu(functional.linear(functional.layer_norm(inputs, [WIDTH]), expansion))
    return inputs + functional.linear(hidden, projection)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
