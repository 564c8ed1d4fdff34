"""What lies between two measured micro-batch sizes: the line through both, and on it bytes rounded up to whole ones.

    share = (6 - 4) / (8 - 4)                   # 6 samples, between 4 and 8
    on_line(0.1, 0.3, share)                    # seconds
    whole_bytes(on_line(100, 201, share))       # bytes: 151, for 150.5

This is said here alone: for numbers, for arrays, and for the planner's compiled search, which compiles both functions.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ROUNDING_BYTES = 1e-6
"""Part of a byte by which a whole number may lie above itself on a line, and is not rounded up: the line's own rounding
[chosen]."""

_Amount = TypeVar("_Amount", float, NDArray[np.float64])


def on_line(below: _Amount, above: _Amount, share: float) -> _Amount:
    """Where between two measured amounts one lies; `share` is 0 at `below` and 1 at `above`."""
    return (1 - share) * below + share * above


def whole_bytes(size_bytes: _Amount) -> _Amount:
    """Bytes on a line rounded up, as floating-point numbers."""
    whole: _Amount = np.ceil(size_bytes - ROUNDING_BYTES)
    return whole
