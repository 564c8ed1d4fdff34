"""The random generators that no graph and no key of ours knows: Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def python_and_numpy_states() -> tuple[Any, bytes, int]:
    """The states of the global generators, which models draw from."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]
