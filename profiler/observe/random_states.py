"""The random generators that no graph knows: Python's, numpy's, and those that a module holds.

A layer that is recomputed, or runs in another process, must draw the same numbers. Torch's own generators are seeded
before each layer; from these come the seeds of all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch

from profiler.machine.backend import backend_of

Generator: TypeAlias = random.Random | np.random.RandomState | np.random.Generator | torch.Generator

OF_PYTHON_AND_NUMPY: tuple[Generator, ...] = (random._inst, np.random.mtrand._rand)
_SEEDS = 2**32  # numpy's legacy generators take seeds below


def is_generator(value: Any) -> TypeGuard[Generator]:
    """Whether it draws numbers that a seed decides."""
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def state_of(generator: Any) -> Callable[[], object] | None:
    """What gives a random generator its present state again; None of anything else."""
    if not is_generator(generator):
        return None
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def generators_in(values: Iterable[Any]) -> tuple[Generator, ...]:
    """The random generators among values and the items of lists, tuples, sets and dicts, each once."""
    found: dict[int, Generator] = {}
    for value in values:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        for item in (value, *items):
            if is_generator(item):
                found[id(item)] = item
    return tuple(found.values())


def key_of(generator: Generator) -> object:
    """Equal for a generator that would draw the same numbers."""
    if isinstance(generator, torch.Generator):
        held = generator.get_state()
        return bytes((ctypes.c_ubyte * held.nbytes).from_address(held.data_ptr()))  # by no operation: a trace sees it
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    state = generator.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


def python_and_numpy_states() -> tuple[object, ...]:
    """The states of the global generators, which models draw from."""
    return tuple(map(key_of, OF_PYTHON_AND_NUMPY))


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that layers on the device draw from: its own, and the host's (`torch.rand(()) < 0.1`)."""
    return tuple(dict.fromkeys((backend_of(device).generator(device), torch.default_generator)))


@contextlib.contextmanager
def preserved(devices: Iterable[torch.device]) -> Iterator[None]:
    """What operations on these devices draw inside leaves no trace: the caller's random states survive."""
    generators = dict.fromkeys(generator for device in devices for generator in generators_of(device))
    restore = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for put_back in restore:
            assert put_back is not None, "they are generators"
            put_back()


_DRAW_ON: ContextVar[bool] = ContextVar("_DRAW_ON", default=False)


@contextlib.contextmanager
def drawing_on() -> Iterator[None]:
    """Within, no generator is seeded from another: each draws on from where it is, as in a call of the model itself."""
    token = _DRAW_ON.set(True)
    try:
        yield
    finally:
        _DRAW_ON.reset(token)


def next_seed() -> int | None:
    """A seed for others, drawn from torch's own generator on the host; None while each draws on."""
    return None if _DRAW_ON.get() else int(torch.randint(_SEEDS, ()).item())


@contextlib.contextmanager
def seeded(generators: Sequence[Generator], seed: int) -> Iterator[Callable[[], bool]]:
    """Within, the generators draw numbers that follow from the seed alone; afterwards they are as they were.

    Args:
        generators: whichever.
        seed: below 2^32. Each of them gets one of its own, by its position.

    Yields:
        What tells whether a number has been drawn since.
    """
    restore = [state_of(generator) for generator in generators]
    for position, generator in enumerate(generators):
        _seed(generator, (seed + position) % _SEEDS)
    begin = [key_of(generator) for generator in generators]
    try:
        yield lambda: begin != [key_of(generator) for generator in generators]
    finally:
        for put_back in restore:
            assert put_back is not None, "they are generators"
            put_back()


class KeptStates:
    """Random generators that are seeded for a while, whenever that begins."""

    def __init__(self) -> None:
        self._restore: dict[int, Callable[[], object]] = {}

    def seed(self, generators: Sequence[Generator]) -> None:
        """Let them draw what follows from torch's own generator."""
        if not generators:
            return
        number = next_seed() or 0
        for position, generator in enumerate(generators):
            put_back = state_of(generator)
            assert put_back is not None, "they are generators"
            self._restore.setdefault(id(generator), put_back)
            _seed(generator, (number + position) % _SEEDS)

    def put_back(self) -> None:
        """Let all be as they were before they were seeded first."""
        for put_back in self._restore.values():
            put_back()
        self._restore.clear()


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)
