"""Orders of passes as arrays: what `planner.plan` says of one order, without a look at each pass by itself.

Stages that make their own orders have thousands of passes each, and a search makes hundreds of such orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Indices
from planner.plan.held import Held
from planner.plan.order_text import LETTERS, order_of_text

_CODES = np.frombuffer(LETTERS.encode(), dtype=np.uint8)


def texts_of(orders: Indices, count: int) -> tuple[str, ...]:
    """Each stage's order of so many micro-batches as letters, as `planner.plan.order_text.order_text` has them.

    >>> texts_of(np.array([[0, 3, 1, 4, 6, 2, 5, 7, 8]]), 3)
    ('FIFIWFIWW',)
    """
    return tuple(row.tobytes().decode("ascii") for row in _CODES[orders // count])


def orders_of(texts: Sequence[str], count: int) -> Indices:
    """The passes that these letters mean, shape (K, 3 M).

    >>> orders_of(["FIFIWFIWW"], 3)
    array([[0, 3, 1, 4, 6, 2, 5, 7, 8]])
    """
    orders = np.empty((len(texts), len(LETTERS) * count), dtype=np.int64)
    for row, text in zip(orders, texts, strict=True):
        if len(text) != row.size:  # of another number of micro-batches
            row[:] = order_of_text(text, count)
            continue
        letters = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
        for kind, code in enumerate(_CODES):
            row[letters == code] = np.arange(kind * count, (kind + 1) * count)
    return orders


def held_in(order: Indices, count: int) -> tuple[Held, ...]:
    """What a stage holds at the moments that may need most, as `planner.plan.held.most_held` has it.

    >>> held_in(np.array([0, 3, 1, 4, 6, 2, 5, 7, 8]), 3)
    ((1, 1),)
    """
    forward, backward, weights = (np.cumsum(order // count == kind) for kind in range(len(LETTERS)))
    goes_back = order // count == 1
    computes = order < 2 * count  # passes of weights need no more than the one before
    before = backward - goes_back
    most_waiting = np.full(count + 1, -1)
    np.maximum.at(most_waiting, (forward - before)[computes], (before - weights)[computes])
    of_more = np.append(np.maximum.accumulate(most_waiting[::-1])[::-1][1:], -1)
    places = np.flatnonzero(most_waiting > of_more)
    return tuple(zip(places.tolist(), most_waiting[places].tolist(), strict=True))
