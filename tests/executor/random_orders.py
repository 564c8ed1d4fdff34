"""Random orders for schedule zb, whose plans have orders of their own."""

import random
from itertools import pairwise


def random_orders(stages: int, micro_batches: int, chance: random.Random) -> tuple[str, ...]:
    """Orders of F, I and W that no rank waits in for ever, as letters; any that a plan of schedule zb may have.

    A rank has begun as many micro-batches before its i-th I as the rank after it, or more: what that one waits for
    comes before what waits for it.
    """
    begun = list(range(1, micro_batches + 1))  # forward passes before each I, of the rank after this one
    texts: list[str] = []
    for _ in range(stages):
        most = 1
        for place, least in enumerate(begun):
            begun[place] = most = max(most, chance.randint(least, micro_batches))
        text, waiting = "", 0
        for before, count in pairwise([0, *begun]):
            text += "F" * (count - before) + "I"
            now = chance.randint(0, waiting + 1)
            text, waiting = text + "W" * now, waiting + 1 - now
        texts.append(text + "W" * waiting)
    return tuple(reversed(texts))
