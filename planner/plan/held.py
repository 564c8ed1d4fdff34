"""How many micro-batches a rank holds while it goes through an order of passes: most at once, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import lru_cache
from operator import ge
from typing import TypeAlias, TypeVar

from planner.plan.orders import Order, PassKind, pass_of

Held: TypeAlias = tuple[int, int]
"""Micro-batches in flight, and those that wait for the gradients of their parameters, at one moment."""
Moment: TypeAlias = tuple[int, tuple[Held, ...]]
"""Which chunk of a rank computes, and what each chunk holds meanwhile."""


@lru_cache(maxsize=4096)
def most_under_way(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[int, ...]:
    """By chunk of a rank, how many micro-batches have gone forward and not yet back, at most."""
    now, most = [0] * chunks, [0] * chunks
    change = {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.WEIGHTS: 0}
    for number in order(rank, ranks, micro_batches, chunks):
        kind, chunk, _ = pass_of(number, micro_batches, chunks)
        now[chunk] += change[kind]
        most[chunk] = max(most[chunk], now[chunk])
    return tuple(most)


@lru_cache(maxsize=4096)
def moments_of(
    order: Callable[[int, int, int, int], Order], rank: int, ranks: int, micro_batches: int, chunks: int
) -> tuple[Moment, ...]:
    """Those of which no other one of the same chunk has as many micro-batches in flight in every chunk."""
    now = [0] * chunks
    seen: list[set[tuple[int, ...]]] = [set() for _ in range(chunks)]
    for number in order(rank, ranks, micro_batches, chunks):
        kind, chunk, _ = pass_of(number, micro_batches, chunks)
        now[chunk] += kind is PassKind.FORWARD
        seen[chunk].add(tuple(now))
        now[chunk] -= kind is PassKind.BACKWARD
    return tuple(
        (chunk, tuple((flying, 0) for flying in held)) for chunk, moments in enumerate(seen) for held in _most(moments)
    )


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


_Counts = TypeVar("_Counts", bound=tuple[int, ...])


def _most(moments: Set[_Counts]) -> tuple[_Counts, ...]:
    """Those of which no other one has as many of everything."""
    return tuple(
        one for one in sorted(moments) if not any(one != other and all(map(ge, other, one)) for other in moments)
    )
