"""Random numbers that depend on what is computed, not on where or how often.

Before an operation draws random numbers the generator is seeded with a key of (seed, step, micro-batch, draw), as
lingvo's GPipe does. Draws are counted in the whole graph. So dropout masks are the same for every number of stages,
however finely layers are cut, and when a layer is recomputed. A module that is
called as it is draws its seeds of Python's and numpy's generators from torch's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch

OF_THE_LOSS = -1
"""In the place of a draw's number: the loss may draw random numbers too."""


def key(seed: int, step: int, micro_batch: int, draw: int) -> int:
    """A 63-bit generator seed; close arguments give unrelated keys."""
    packed = struct.pack("<qqqq", seed, step, micro_batch, draw)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_all(generators: Iterable[torch.Generator], number: int) -> None:
    """Let the generators draw what follows from a number."""
    for generator in generators:
        generator.manual_seed(number)
