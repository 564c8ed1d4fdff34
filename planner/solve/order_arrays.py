"""Orders of passes as arrays: what `planner.plan` says of one order, without a look at each pass by itself.

Stages that make their own orders have thousands of passes each, and a search makes hundreds of such orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Indices
from planner.plan.order_text import LETTERS, order_of_text

_CODES = [np.frombuffer(letters.encode(), dtype=np.uint8) for letters in LETTERS]
KINDS = len(LETTERS[0])
"""Of passes."""


def texts_of(orders: Indices, count: int) -> tuple[str, ...]:
    """Each rank's order of so many micro-batches as letters, as `planner.plan.order_text.order_text` has them.

    >>> texts_of(np.array([[0, 3, 1, 4, 6, 2, 5, 7, 8]]), 3)
    ('FIFIWFIWW',)
    """
    codes = _CODES[orders.shape[1] // (KINDS * count) - 1]
    return tuple(row.tobytes().decode("ascii") for row in codes[orders // count])


def orders_of(texts: Sequence[str], count: int, chunks: int = 1) -> Indices:
    """The passes that these letters mean, shape (ranks, 3 * chunks * M).

    >>> orders_of(["FIFIWFIWW"], 3)
    array([[0, 3, 1, 4, 6, 2, 5, 7, 8]])
    """
    codes = _CODES[chunks - 1]
    orders = np.empty((len(texts), len(codes) * count), dtype=np.int64)
    for row, text in zip(orders, texts, strict=True):
        if len(text) != row.size:  # of another number of micro-batches
            row[:] = order_of_text(text, count, chunks)
            continue
        letters = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
        for place, code in enumerate(codes):
            row[letters == code] = np.arange(place * count, (place + 1) * count)
    return orders
