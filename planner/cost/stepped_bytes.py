"""What one replica's optimizer steps at most, for every stage at once, by the rule of `planner.plan.shares`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.plan.shares import order_of_sharing


def largest_shares(
    layers: int, readers: Mapping[str, Sequence[int]], sizes: Mapping[str, int], shares: int
) -> NDArray[np.float64]:
    """Bytes of the largest share of layers [i, j), at [i, j]; where a smaller range has a larger one, that counts.

    A parameter lies in [i, j) if one of its readers does: for each reader u those with i after the reader before it,
    and not after u, and with j after u. They are a block of the matrices of what each share has so far.

    Args:
        layers: L.
        readers: of each parameter, ascending.
        sizes: of each, as the optimizer steps it; 0 of one that is not trained.
        shares: R.
    """
    loads = np.zeros((shares, layers + 1, layers + 1))
    names = [name for name in readers if sizes[name]]
    for position in order_of_sharing([sizes[name] for name in names]):
        name = names[position]
        for before, reader in pairwise((-1, *readers[name])):
            block = loads[:, before + 1 : reader + 1, reader + 1 :]
            fewest = block.argmin(axis=0)[None]
            np.put_along_axis(block, fewest, np.take_along_axis(block, fewest, axis=0) + sizes[name], axis=0)
    found: NDArray[np.float64] = np.maximum.accumulate(loads.max(axis=0), axis=1)
    return np.triu(np.maximum.accumulate(found[::-1], axis=0)[::-1])
