"""Orders in which unlike devices may stand: all where they are few, else some of those that promise most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from planner.solve.chunk_plans import ChunkPlans

MOST_ORDERS = 60
"""Orders of unlike devices that are tried; the bound is for all."""


def device_orders(plans: ChunkPlans) -> list[tuple[int, ...]]:
    """Orders of devices, as classes by rank; all of them where they are few.

    The first one takes the devices with most memory, those with most of it first, which earlier stages need as a rule.
    Of many there are besides the fastest devices and chosen ones by chance, both with most memory first and last.
    """
    classes, ranks = plans.problem.classes, plans.ranks
    every = [number for number, count in enumerate(_able(plans)) for _ in range(count)]
    if len(every) < ranks:
        return []

    def roomiest(some: Iterable[int]) -> list[int]:
        return sorted(some, key=lambda number: -classes[number].device.memory_bytes)

    orders = {tuple(roomiest(every)[:ranks]): None}
    few = all_orders(plans)
    if few is not None:
        return [*(orders | dict.fromkeys(few))]
    seconds = (plans.forward_s[0] + plans.backward_s[0])[:, -1]
    chosen = [every, sorted(every, key=lambda number: seconds[number])[:ranks]]
    chance = random.Random(0)
    for _ in range(MOST_ORDERS // 4):
        able_ones = roomiest(every)[: chance.randint(ranks, len(every))]
        chosen += [chance.sample(able_ones, ranks)]
    for some in chosen:
        first = roomiest(some)[:ranks]
        orders |= dict.fromkeys([tuple(first), tuple(reversed(first)), tuple(some[:ranks])])
    return [*orders][:MOST_ORDERS]


def all_orders(plans: ChunkPlans) -> list[tuple[int, ...]] | None:
    """All orders of devices there are, None where they are many: those that are tried prove nothing of the others."""
    few = [*itertools.islice(arrangements(_able(plans), plans.ranks), MOST_ORDERS)]
    return few if len(few) < MOST_ORDERS else None


def _able(plans: ChunkPlans) -> list[int]:
    """Ranks that each class of devices could run."""
    return [min(plans.ranks, group.capacity(plans.candidate.replicas)) for group in plans.problem.classes]


def arrangements(available: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """All different orders of so many of several kinds, the smallest first.

    >>> [*arrangements([2, 1], 2)]
    [(0, 0), (0, 1), (1, 0)]

    Args:
        available: how many there are of each kind.
        length: how many are taken.
    """
    left, order = [*available], list[int]()
    if sum(left) < length:
        return
    while True:
        while len(order) < length:
            kind = next(kind for kind, number in enumerate(left) if number)
            order.append(kind)
            left[kind] -= 1
        yield tuple(order)
        larger = None
        while order and larger is None:
            last = order.pop()
            left[last] += 1
            larger = next((kind for kind in range(last + 1, len(left)) if left[kind]), None)
        if larger is None:
            return
        order.append(larger)
        left[larger] -= 1
