"""The largest share of what an optimizer steps, for every stage at once, by the rule of `planner.plan.shares`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.kernel.compiled import compiled


@compiled
def largest_shares(sizes: NDArray[np.float64], next_reader: NDArray[np.int64], replicas: int) -> NDArray[np.float64]:
    """Bytes of the largest share of layers [i, j), at [i, j].

    Args:
        sizes: of the parameters that are stepped, in the order in which they are shared out.
        next_reader: for each of them and each layer i the first layer from i on that reads it; L if there is none.
        replicas: R.
    """
    layers = next_reader.shape[1]
    shares = np.zeros((layers + 1, layers + 1))
    loads = np.zeros(replicas)
    for first in range(layers):
        for stop in range(first + 1, layers + 1):
            loads[:] = 0.0
            for number in range(len(sizes)):
                if next_reader[number, first] < stop:
                    loads[np.argmin(loads)] += sizes[number]
            shares[first, stop] = loads.max()
    return shares
