"""Orders of a rank's passes: how they are numbered, and those that are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import TypeAlias


class PassKind(IntEnum):
    """What a rank computes with a micro-batch: three things, or two where the backward pass is one.

    `BACKWARD` is the whole backward pass; in a schedule that splits it, the gradients of the inputs, and `WEIGHTS` the
    gradients of the parameters, which nobody waits for.
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2


Order: TypeAlias = tuple[int, ...]
"""The passes of a rank in order, by their numbers: pass p of micro-batch m in chunk c is `(p * chunks + c) * M + m`.

They are numbered as the places of an array of shape (passes, chunks, M). With one chunk `m` is the forward pass of
micro-batch m, `M + m` its backward pass, and `2 * M + m` that of its weights.
"""


def pass_of(number: int, micro_batches: int, chunks: int = 1) -> tuple[PassKind, int, int]:
    """PassKind, chunk and micro-batch of a number.

    >>> pass_of(7, micro_batches=4)
    (<PassKind.BACKWARD: 1>, 0, 3)
    """
    place, micro_batch = divmod(number, micro_batches)
    kind, chunk = divmod(place, chunks)
    return PassKind(kind), chunk, micro_batch


def gpipe_order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    """All forward passes, then all backward passes in reverse order; alike on all stages."""
    return (*range(micro_batches), *reversed(range(micro_batches, 2 * micro_batches)))


def one_f_one_b_order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    """As many forward passes as there are stages after it, then one forward and one backward pass in turns."""
    ahead = ranks - 1 - rank
    return _in_turns(range(micro_batches), range(micro_batches, 2 * micro_batches), ahead)


LEAD_OF_LARGER_GROUPS = 2


def interleaved_order(lead: int) -> Callable[[int, int, int, int], Order]:
    """The passes of 1F1B over all chunks of a rank, for any M.

    Micro-batches go in groups: as many as whole groups of one for each rank fit, at least one, their sizes as equal as
    may be, the larger first. A group goes forward through chunk 0, then chunk 1, ..., and back through the last chunk,
    ..., chunk 0. A rank goes forward until its last chunk has work that goes back, and `lead` passes more for each rank
    after it; then one forward and one backward pass in turns. No group is larger than the first, which that lead is
    for, so every backward pass comes after its forward pass.

    Args:
        lead: passes that a rank is ahead of the next one. With 1 nothing waits as long as messages take no time, and a
            rank keeps what it keeps with 1F1B; with 2 a message may take as long as a pass of a chunk. Where groups are
            larger than one for each rank it is 2: with 1, five ranks and 14 micro-batches, more messages would have to
            be under way than a rank sends before one is received, and all would wait for each other.
    """

    def order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
        if chunks == 1:
            return one_f_one_b_order(rank, ranks, micro_batches, 1)
        sizes = group_sizes(micro_batches, ranks)
        starts = list(accumulate(sizes, initial=0))
        groups = [range(start, stop) for start, stop in pairwise(starts)]
        forward = [c * micro_batches + m for group in groups for c in range(chunks) for m in group]
        backward = [
            (chunks + c) * micro_batches + m for group in groups for c in reversed(range(chunks)) for m in group
        ]
        passes_ahead = lead if sizes[0] <= ranks else max(lead, LEAD_OF_LARGER_GROUPS)
        return _in_turns(forward, backward, (chunks - 1) * sizes[0] + passes_ahead * (ranks - 1 - rank))

    return order


def group_sizes(micro_batches: int, ranks: int) -> tuple[int, ...]:
    """How many micro-batches go through a chunk before the next chunk's turn, group by group.

    >>> group_sizes(8, 4), group_sizes(11, 4), group_sizes(3, 4)
    ((4, 4), (6, 5), (3,))
    """
    groups = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def _in_turns(forward: Sequence[int], backward: Sequence[int], ahead: int) -> Order:
    """So many forward passes, then one forward and one backward pass in turns, at last the backward passes left."""
    passes = len(forward)
    ahead = min(ahead, passes)
    turns = 2 * (passes - ahead)
    order = [0] * (2 * passes)
    order[:ahead] = forward[:ahead]
    order[ahead : ahead + turns : 2] = forward[ahead:]
    order[ahead + 1 : ahead + turns : 2] = backward[: passes - ahead]
    order[ahead + turns :] = backward[passes - ahead :]
    return tuple(order)


def zb_h1_order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    """1F1B with later passes of weights: on rank r those of r micro-batches wait.

    Gradients travel on before the weights of a later rank are done, and these are done while 1F1B would have nothing to
    do at the end of the step.
    """
    order: list[int] = []
    for number in one_f_one_b_order(rank, ranks, micro_batches, 1):
        order.append(number)
        if number >= micro_batches + rank:
            order.append(number - rank + micro_batches)
    return (*order, *range(3 * micro_batches - min(rank, micro_batches), 3 * micro_batches))


def one_by_one_order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    """One micro-batch after the other through all chunks and back, the weights at once: it holds least.

    >>> one_by_one_order(0, 2, 2, 2)
    (0, 2, 6, 10, 4, 8, 1, 3, 7, 11, 5, 9)
    """
    order: list[int] = []
    for micro_batch in range(micro_batches):
        order += [chunk * micro_batches + micro_batch for chunk in range(chunks)]
        for chunk in reversed(range(chunks)):
            back = (chunks + chunk) * micro_batches + micro_batch
            order += [back, back + chunks * micro_batches]
    return tuple(order)


def fixed_split_orders(ranks: int, micro_batches: int) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
    """Of every rank, two orders with a split backward pass that suit any plan.

    They are ZB-H1's, and 1F1B's with the gradients of the parameters at once, which holds least.
    """
    whole = [one_f_one_b_order(rank, ranks, micro_batches, 1) for rank in range(ranks)]
    return (
        tuple(zb_h1_order(rank, ranks, micro_batches, 1) for rank in range(ranks)),
        tuple(_weights_at_once(order, micro_batches) for order in whole),
    )


def _weights_at_once(order: Order, micro_batches: int) -> Order:
    """Each backward pass in two, one after the other."""
    split = ((number,) if number < micro_batches else (number, number + micro_batches) for number in order)
    return tuple(number for parts in split for number in parts)
