"""Random numbers that depend on what is computed, not on where or how often.

Before an operation draws random numbers the generator is seeded with a key of (seed, step, micro-batch, draw), as
lingvo's GPipe does. Draws are counted in the whole graph. So dropout masks are the same for every number of stages,
however finely layers are cut, and when a layer is recomputed. A module that is
called as it is draws its seeds of Python's and numpy's generators from torch's. Draws of backward passes have keys of
their own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from profiler.errors import ExecutionError
from profiler.observe.random_states import Generator, KeptStates, python_and_numpy_states

OF_THE_LOSS = -1
"""In the place of a draw's number: the loss may draw random numbers too."""
OF_PARAMETERS = -2
"""And so may hooks on parameters."""


def key(*numbers: int) -> int:
    """A 63-bit generator seed of seed, step, micro-batch and draw, and in a backward pass which part of that draw.

    Close arguments give unrelated keys.
    """
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_all(generators: Iterable[torch.Generator], number: int) -> None:
    """Let the generators draw what follows from a number."""
    for generator in generators:
        generator.manual_seed(number)


class BackwardDraws:
    """The random generators other than torch's: seeded in a backward pass, and after it as they were.

    Within `with` a backward pass runs. That raises an `ExecutionError` if it has drawn from Python's or numpy's
    generators and nobody knew that it would.
    """

    def __init__(self) -> None:
        self._kept = KeptStates()
        self._begin: tuple[object, ...] | None = None

    def __enter__(self) -> None:
        """Begin; nothing is kept before somebody's code comes."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End."""
        if self._begin is None:
            return
        self._kept.put_back()
        begin, self._begin = self._begin, None
        if kind is None and begin != python_and_numpy_states():
            raise ExecutionError(
                "the backward pass draws from Python's or numpy's random generator by a name that its code does not "
                "show, so that its numbers would not follow from the seed; draw from torch's (torch.rand), or by "
                "random.random() and numpy.random.rand() as such"
            )

    def seed(self, generators: Sequence[Generator]) -> None:
        """Let these generators draw what follows from torch's own; look at Python's and numpy's until the end."""
        if self._begin is None:
            self._begin = python_and_numpy_states()
        self._kept.seed(generators)


@dataclass(slots=True)
class Keyed:
    """Seeds the generators for the draws of one micro-batch, see `profiler.observe.draws`.

    Args:
        generators: torch's own.
        seed: of all random numbers.
        step: in which the micro-batch runs.
        micro_batch: its position in the mini-batch.
        backward: of the stage.
    """

    generators: Sequence[torch.Generator]
    seed: int
    step: int
    micro_batch: int
    backward: BackwardDraws

    def __call__(self, draw: int) -> None:
        """In the forward pass."""
        seed_all(self.generators, key(self.seed, self.step, self.micro_batch, draw))

    def in_backward(self, draw: int, part: int, others: Sequence[Generator]) -> None:
        """In the backward pass, other generators than torch's too."""
        seed_all(self.generators, key(self.seed, self.step, self.micro_batch, draw, part))
        self.backward.seed(others)
