"""Orders of passes as arrays: what `planner.plan` says of one order, without a look at each pass by itself.

Stages that make their own orders have thousands of passes each, and a search makes hundreds of such orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Indices
from planner.plan.held import Held, Moment, most_of
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


def moments_of_order(order: Indices, count: int, chunks: int) -> tuple[Moment, ...]:
    """What the chunks of a rank hold at the moments of which no other one of the same chunk has as much of everything.

    Passes of weights need no more than the one before, as in `planner.plan.held.most_held`.

    >>> moments = moments_of_order(np.array([0, 2, 1, 6, 3, 10, 4, 8, 7, 11, 5, 9]), 2, 2)
    >>> [(chunk, [(one.flying, one.waiting) for one in held]) for chunk, held in moments if held[0].goes_back]
    [(0, [(2, 0), (1, 0)]), (1, [(2, 0), (1, 0)])]
    >>> [(chunk, [(one.flying, one.waiting) for one in held]) for chunk, held in moments if not held[0].goes_back]
    [(1, [(2, 0), (1, 1)])]
    """
    places = order // count
    done = np.cumsum(places[:, None] == np.arange(KINDS * chunks), axis=0).reshape(-1, KINDS, chunks)
    goes_back = (places[:, None] == np.arange(chunks, 2 * chunks)).astype(np.int64)
    flying = done[:, 0] - done[:, 1] + goes_back
    waiting = done[:, 1] - done[:, 2] - goes_back
    rows = np.column_stack((flying, waiting, goes_back.any(axis=1)))[places < 2 * chunks]
    computing = places[places < 2 * chunks] % chunks
    return tuple(moment for chunk in range(chunks) for moment in most_of(chunk, rows[computing == chunk]))


def held_in(order: Indices, count: int) -> tuple[Held, ...]:
    """What a stage holds at the moments that may need most, as `planner.plan.held.most_held` has it.

    >>> held_in(np.array([0, 3, 1, 4, 6, 2, 5, 7, 8]), 3)
    (Held(flying=1, waiting=1, goes_back=True),)
    """
    return tuple(held for _, (held,) in moments_of_order(order, count, 1))
