"""How many micro-batches a rank holds while it goes through an order of passes: most at once, moment by moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from planner.plan.orders import Order, PassKind

if TYPE_CHECKING:  # to show a plan nobody counts, and numpy takes time to load
    import numpy as np
    from numpy.typing import NDArray

    Indices: TypeAlias = NDArray[np.int64]

Held: TypeAlias = tuple[int, int]
"""Micro-batches in flight, and those that wait for the gradients of their parameters, at one moment."""
Moment: TypeAlias = tuple[int, tuple[Held, ...]]
"""Which chunk of a rank computes, and what each chunk holds meanwhile."""


@lru_cache(maxsize=4096)
def most_under_way(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[int, ...]:
    """By chunk of a rank, how many micro-batches have gone forward and not yet back, at most."""
    _, flying = _in_flight(order(rank, ranks, micro_batches, chunks), micro_batches, chunks)
    return tuple(flying.max(axis=0).tolist())


@lru_cache(maxsize=4096)
def moments_of(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[Moment, ...]:
    """Those of which no other one of the same chunk has as many micro-batches in flight in every chunk."""
    import numpy as np

    computing, flying = _in_flight(order(rank, ranks, micro_batches, chunks), micro_batches, chunks)
    found: list[Moment] = []
    for chunk in range(chunks):
        own = np.unique(flying[computing == chunk], axis=0)
        found += [(chunk, tuple((many, 0) for many in row)) for row in own[are_most(own)].tolist()]
    return tuple(found)


def _in_flight(order: Order, micro_batches: int, chunks: int) -> tuple[Indices, Indices]:
    """Which chunk computes in each pass, shape (passes,), and what each has in flight, shape (passes, chunks).

    While a micro-batch goes back through a chunk, it is still in flight there.
    """
    import numpy as np

    kind, computing = np.divmod(np.array(order) // micro_batches, chunks)
    own = computing[:, None] == np.arange(chunks)
    goes_back = own & (kind == PassKind.BACKWARD)[:, None]
    goes_on = own & (kind == PassKind.FORWARD)[:, None]
    return computing, np.cumsum(goes_on, axis=0) - np.cumsum(goes_back, axis=0) + goes_back


def are_most(rows: Indices) -> NDArray[np.bool_]:
    """Of which of these different rows no other one has as much of everything.

    >>> import numpy as np
    >>> are_most(np.array([[1, 2], [0, 3], [1, 3]])).tolist()
    [False, False, True]
    """
    import numpy as np

    most = np.zeros(len(rows), dtype=np.bool_)
    left = np.argsort(-rows.sum(axis=1), kind="stable")  # nothing has as much of everything as the first of these
    while len(left):
        first = left[0]
        most[first] = True
        left = left[(rows[left] > rows[first]).any(axis=1)]
    return most


@lru_cache(maxsize=4096)
def held_by(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int
) -> tuple[Held, ...]:
    """What a stage that is its rank's only one holds in that order, see `most_held`."""
    return most_held(order(rank, ranks, micro_batches, 1), micro_batches)


def most_held(order: Order, micro_batches: int) -> tuple[Held, ...]:
    """What a stage holds at once, where another moment has not as many of both.

    While the gradients of inputs are made, a micro-batch is still in flight. Layer by layer it then keeps what it
    waits with in place of what it kept; what it has more of on the way, the ledger counts for a moment. So the passes
    of weights, which have nothing for a moment, need no more than the one before.

    >>> from planner.plan.orders import zb_h1_order
    >>> most_held(zb_h1_order(1, 3, 8, 1), 8)
    ((2, 1),)
    """
    flying = waiting = 0
    most_waiting: dict[int, int] = {}  # by micro-batches in flight
    for number in order:
        if number >= 2 * micro_batches:
            waiting -= 1
            continue
        goes_back = number >= micro_batches
        flying += not goes_back
        most_waiting[flying] = max(most_waiting.get(flying, 0), waiting)
        flying, waiting = flying - goes_back, waiting + goes_back
    held: list[Held] = []
    for flying in sorted(most_waiting, reverse=True):
        if not held or most_waiting[flying] > held[-1][1]:
            held.append((flying, most_waiting[flying]))
    return tuple(reversed(held))
