"""Random numbers that depend on what is computed, not on where or how often.

Before a layer draws random numbers the generator is seeded with a key of (seed, step, micro-batch, layer), as lingvo's
GPipe does by operation. So dropout masks are the same for every number of stages, and when a layer is recomputed. A
module that is called as it is draws its seeds of Python's and numpy's generators from torch's.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence

import torch

from profiler.machine.backend import backend_of


def key(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """A 63-bit generator seed; close arguments give unrelated keys."""
    packed = struct.pack("<qqqq", seed, step, micro_batch, layer)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that layers on the device draw from: its own, and the host's (`torch.rand(()) < 0.1`)."""
    return tuple(dict.fromkeys((backend_of(device).generator(device), torch.default_generator)))


def seed_all(generators: Iterable[torch.Generator], number: int) -> None:
    """Let the generators draw what follows from a number."""
    for generator in generators:
        generator.manual_seed(number)


@contextlib.contextmanager
def preserved(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """The caller's random states survive: training by a plan does not disturb how data is shuffled."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
