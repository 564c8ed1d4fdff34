"""The states of random generators: of Python and numpy, which no key of ours knows, and of devices."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from profiler.machine.backend import backend_of


def python_and_numpy_states() -> tuple[Any, bytes, int]:
    """The states of the global generators, which models draw from."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


@contextlib.contextmanager
def preserved(devices: Iterable[torch.device]) -> Iterator[None]:
    """What operations on these devices draw inside leaves no trace: the caller's random states survive."""
    generators = [backend_of(device).generator(device) for device in set(devices)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
