"""Copying rows of arrays, number by number.

`target[:] = source` would do the same; numba then compiles the words of its error, too, for 2 s [measured].
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.kernel.compiled import compiled

_Number = TypeVar("_Number", np.float64, np.intp, np.uint8)


@compiled
def copy_row(source: NDArray[_Number], target: NDArray[_Number]) -> None:
    """Copy an array of one axis into one that is as long, or longer."""
    for place in range(len(source)):
        target[place] = source[place]


@compiled
def copy_rows(source: NDArray[_Number], target: NDArray[_Number]) -> None:
    """The same for arrays of two axes."""
    for row in range(source.shape[0]):
        for column in range(source.shape[1]):
            target[row, column] = source[row, column]
