"""Random numbers that depend on what is computed, not on where or how often.

Before a layer draws random numbers the generator is seeded with a key of (seed, step, micro-batch, layer), as lingvo's
GPipe does by operation. So dropout masks are the same for every number of stages that the same layers are cut into, and
when a layer is recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator, Sequence

import torch

from profiler.machine.backend import backend_of


def key(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """A 63-bit generator seed; close arguments give unrelated keys."""
    packed = struct.pack("<qqqq", seed, step, micro_batch, layer)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operations on the device draw from."""
    return backend_of(device).generator(device)


@contextlib.contextmanager
def preserved(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """The caller's random states survive: training by a plan does not disturb how data is shuffled."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
