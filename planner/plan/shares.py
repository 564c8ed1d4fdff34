"""Which replica steps which parameters, where the optimizer's state is shared out over the replicas (ZeRO, stage 1).

Whole parameters are shared out, so that optimizers may look at all of one. The largest comes first, each to the
replica that has the fewest bytes so far: no share is larger than the largest parameter, or than an even share and one
parameter more (Graham, SIAM J. Appl. Math. 1969). Planner and executor take this one rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKET_BYTES = 32 * 2**20
"""What replicas sum or exchange at a time, all of them together: enough to hide the latency of two collectives, and
little next to a model [chosen]."""


def order_of_sharing(sizes: Sequence[int]) -> list[int]:
    """Positions of parameters in the order in which they are shared out: the largest first, equal ones as they come."""
    return [int(position) for position in np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable")]


def owners_of(sizes: Sequence[int], replicas: int) -> list[int]:
    """The replica that steps each of a stage's parameters.

    >>> owners_of([4, 1, 4, 3], 2)
    [0, 1, 1, 0]

    Args:
        sizes: bytes of each parameter as the optimizer steps it, in the stage's order.
        replicas: R.
    """
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for position in order_of_sharing(sizes):
        owner = loads.index(min(loads))
        owners[position] = owner
        loads[owner] += sizes[position]
    return owners
