"""How many micro-batches a rank holds while it goes through an order of passes: most at once, moment by moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from planner.plan.orders import Order, PassKind

if TYPE_CHECKING:  # to show a plan nobody counts, and numpy takes time to load
    import numpy as np
    from numpy.typing import NDArray

    Indices: TypeAlias = NDArray[np.int64]


class Held(NamedTuple):
    """What a stage holds at one moment, at which it or another stage of its rank computes.

    Attributes:
        flying: micro-batches in flight.
        waiting: those that wait for the gradients of their parameters.
        goes_back: whether the pass is a backward one, which needs no less than a forward pass with as many.
    """

    flying: int
    waiting: int = 0
    goes_back: bool = True


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
    """Those of which no other one of the same chunk has as many micro-batches in flight in every chunk, and goes back.

    A backward pass has no less for a moment than a forward pass.
    """
    import numpy as np

    passes = order(rank, ranks, micro_batches, chunks)
    computing, flying = _in_flight(passes, micro_batches, chunks)
    goes_back = np.array(passes) >= chunks * micro_batches
    rows = np.column_stack((flying, np.zeros_like(flying), goes_back))
    return tuple(moment for chunk in range(chunks) for moment in most_of(chunk, rows[computing == chunk]))


def most_of(chunk: int, rows: Indices) -> list[Moment]:
    """Of the moments at which a chunk computes those of which no other one has as much of everything.

    Args:
        chunk: which.
        rows: what each chunk has in flight, what waits in each, and whether a micro-batch goes back.
    """
    import numpy as np

    own = np.unique(rows, axis=0)
    *both, goes_back = np.split(own[are_most(own)], [half := own.shape[1] // 2, 2 * half], axis=1)
    return [
        (chunk, tuple(Held(flying, waiting, back) for flying, waiting in zip(*held, strict=True)))
        for *held, (back,) in zip(*(part.tolist() for part in both), goes_back.astype(np.bool_).tolist(), strict=True)
    ]


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
    """What a stage holds at once, where another moment has not as many of both and goes back.

    While the gradients of inputs are made, a micro-batch is still in flight. Layer by layer it then keeps what it
    waits with in place of what it kept; what it has more of on the way, the ledger counts for a moment. So the passes
    of weights need no more than the one before: of a layer they have its temporaries alone, which any pass has.

    >>> from planner.plan.orders import zb_h1_order
    >>> most_held(zb_h1_order(1, 3, 8, 1), 8)
    (Held(flying=2, waiting=1, goes_back=True),)
    """
    import numpy as np

    flying = waiting = 0
    seen: set[Held] = set()
    for number in order:
        if number >= 2 * micro_batches:
            waiting -= 1
            continue
        goes_back = number >= micro_batches
        flying += not goes_back
        seen.add(Held(flying, waiting, goes_back))
        flying, waiting = flying - goes_back, waiting + goes_back
    return tuple(held for _, (held,) in most_of(0, np.array([*seen], dtype=np.int64)))
