"""How many micro-batches a rank holds while it goes through an order of passes, at the moments that may need most."""

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
        kind: of the pass; a backward one needs no less than a forward one with as many.
    """

    flying: int
    waiting: int = 0
    kind: PassKind = PassKind.BACKWARD


Moment: TypeAlias = tuple[int, tuple[Held, ...]]
"""Which chunk of a rank computes, and what each chunk holds meanwhile."""


@lru_cache(maxsize=4096)
def most_under_way(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[int, ...]:
    """By chunk of a rank, how many micro-batches have gone forward and not yet back, at most."""
    moments = moments_of(order, rank, ranks, micro_batches, chunks)
    return tuple(max(held[chunk].flying for _, held in moments) for chunk in range(chunks))


@lru_cache(maxsize=4096)
def moments_of(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[Moment, ...]:
    """`moments_in` the order of a rank."""
    import numpy as np

    return moments_in(np.array(order(rank, ranks, micro_batches, chunks)), micro_batches, chunks)


def moments_in(order: Indices, micro_batches: int, chunks: int = 1) -> tuple[Moment, ...]:
    """What the chunks of a rank hold at the moments of which no other one of the same chunk has as much of everything.

    While a micro-batch goes back, it is still in flight. Layer by layer it then keeps what it waits with in place of
    what it kept; what it has more of on the way, the ledger counts for a moment.

    >>> import numpy as np
    >>> for chunk, held in moments_in(np.array([0, 2, 1, 6, 3, 10, 4, 8, 7, 11, 5, 9]), 2, 2):
    ...     print(chunk, held[0].kind.name, [(one.flying, one.waiting) for one in held])
    0 WEIGHTS [(1, 1), (1, 0)]
    0 BACKWARD [(2, 0), (1, 0)]
    1 BACKWARD [(2, 0), (1, 0)]
    1 FORWARD [(2, 0), (1, 1)]
    1 WEIGHTS [(2, 0), (1, 1)]
    """
    import numpy as np

    places, kinds = order // micro_batches, len(PassKind)
    now = places[:, None] == np.arange(kinds * chunks)
    forward, back, weights = np.split(np.cumsum(now, axis=0), kinds, axis=1)
    _, goes_back, makes_weights = np.split(now, kinds, axis=1)
    flying = forward - back + goes_back
    waiting = (back - weights - goes_back + makes_weights) * weights[-1:].any()
    rows, computing = np.column_stack((flying, waiting, places // chunks)), places % chunks
    return tuple(moment for chunk in range(chunks) for moment in _most_of(chunk, rows[computing == chunk]))


def held_in(order: Indices, micro_batches: int) -> tuple[Held, ...]:
    """The same of a stage that is its rank's only one.

    >>> import numpy as np
    >>> [(held.kind.name, held.flying, held.waiting) for held in held_in(np.array([0, 3, 1, 4, 6, 2, 5, 7, 8]), 3)]
    [('WEIGHTS', 0, 2), ('BACKWARD', 1, 1)]
    """
    return tuple(held for _, (held,) in moments_in(order, micro_batches))


def _most_of(chunk: int, rows: Indices) -> list[Moment]:
    """Of the moments at which a chunk computes those of which no other one has as much of everything.

    Args:
        chunk: which.
        rows: what each chunk has in flight, what waits in each, and the kind of the pass.
    """
    import numpy as np

    own = np.unique(rows, axis=0)
    kinds = own[:, -1:]
    is_backward, is_weights = kinds == PassKind.BACKWARD, kinds == PassKind.WEIGHTS
    own = own[are_most(np.hstack((own[:, :-1], is_backward, is_weights, ~is_weights)))]
    chunks = own.shape[1] // 2
    return [
        (chunk, tuple(Held(flying, waiting, PassKind(kind)) for flying, waiting in zip(*held, strict=True)))
        for row in own.tolist()
        for *held, (kind,) in [(row[:chunks], row[chunks:-1], row[-1:])]
    ]


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
