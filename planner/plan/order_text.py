"""Orders that a plan has of its own, as text in its file: a letter for each pass of a rank.

With three micro-batches `FIFIWFIWW` goes forward with one and back to its inputs, forward with the next and back, makes
the gradients of the first one's parameters, and so on. Passes of a rank's second chunk are small letters: `FfiIwW`. It
is read as letters and nothing else, and refused where it is no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.plan.actions import room_between
from planner.plan.orders import Order
from profiler.errors import ArgumentError
from profiler.text import counted

if TYPE_CHECKING:
    from planner.plan.schedules import Ring

LETTERS = ("FIW", "FfIiWw")
"""Of the passes of a split backward pass, in the order of `PassKind`, and of each those of every chunk; by how many
chunks there are."""


def order_text(order: Order, micro_batches: int, chunks: int = 1) -> str:
    """The passes as letters: micro-batches take each kind of pass in order, so they need no numbers.

    >>> order_text((0, 3, 1, 4, 6, 2, 5, 7, 8), 3)
    'FIFIWFIWW'
    """
    return "".join(LETTERS[chunks - 1][number // micro_batches] for number in order)


def order_of_text(text: str, micro_batches: int, chunks: int = 1) -> Order:
    """The passes of so many micro-batches that these letters of a step mean.

    Of more micro-batches than the letters are for, so many go first, and the others after them in the same way; of
    fewer, the passes of the others are left out.

    >>> order_of_text("FFIWIW", 2), order_of_text("FFIWIW", 1), order_of_text("FfiIwW", 1, chunks=2)
    ((0, 1, 2, 4, 3, 5), (0, 1, 2), (0, 1, 3, 2, 5, 4))
    """
    letters = LETTERS[chunks - 1]
    whole = len(text) // len(letters)
    order: list[int] = []
    for first in range(0, micro_batches, whole):
        stop = min(first + whole, micro_batches)
        done = [first] * len(letters)
        for letter in text:
            place = letters.index(letter)
            if done[place] < stop:
                order.append(place * micro_batches + done[place])
                done[place] += 1
    return tuple(order)


def check_order_texts(texts: Sequence[str], ring: Ring, micro_batches: int) -> None:
    """Refuse letters that are no order of a step for each rank.

    Raises:
        ArgumentError: there is not one for each rank, a pass is missing, there twice or too early, or all wait for each
            other.
    """
    name = "stage" if ring.chunks == 1 else "rank"
    if len(texts) != ring.ranks:
        raise ArgumentError(
            f"orders has {counted(len(texts), 'entry')} for {counted(ring.ranks, name)}; each has its own"
        )
    letters = LETTERS[ring.chunks - 1]
    for rank, text in enumerate(texts):
        counts = [text.count(letter) for letter in letters]
        if counts != [micro_batches] * len(letters) or len(text) != sum(counts):
            listed = ", ".join(f"{many} of {letter}" for letter, many in zip(letters, counts, strict=True))
            raise ArgumentError(
                f"the order of {name} {rank} has {counted(len(text), 'pass')}, {listed}; M = {micro_batches} asks for "
                f"{micro_batches} of each"
            )
        done = dict.fromkeys(letters, 0)
        for place, letter in enumerate(text):
            done[letter] += 1
            before = letters.index(letter) - ring.chunks  # the place of the pass that it needs
            if before >= 0 and done[letters[before]] < done[letter]:
                raise ArgumentError(f"pass {place} of {name} {rank}, {letter}, comes before the pass that it needs")
    _check_progress(texts, ring)


def _check_progress(texts: Sequence[str], ring: Ring) -> None:
    """Refuse orders in which all wait for each other."""
    letters, last = LETTERS[ring.chunks - 1], ring.stages - 1
    done = [[0] * 3 for _ in range(ring.stages)]
    place = [0] * ring.ranks
    waiting = [*range(ring.ranks)]
    while waiting:
        rank = waiting.pop()
        own, begun = ring.stages_of(rank), place[rank]
        while place[rank] < len(texts[rank]):
            kind, chunk = divmod(letters.index(texts[rank][place[rank]]), ring.chunks)
            stage = own[chunk]
            source, target = ((stage - 1, stage + 1), (stage + 1, stage - 1), (stage, stage))[kind]
            if source != stage and 0 <= source <= last and done[source][kind] <= done[stage][kind]:
                break
            sends = 0 <= target <= last and ring.rank_of(target) != rank
            if sends and done[stage][kind] - done[target][kind] >= room_between(stage, target, ring):
                break
            done[stage][kind] += 1
            place[rank] += 1
        if place[rank] > begun:
            near = {ring.rank_of(other) for stage in own for other in (stage - 1, stage + 1) if 0 <= other <= last}
            waiting += sorted(near - {rank})
    for rank, text in enumerate(texts):
        if place[rank] < len(text):
            name = "stage" if ring.chunks == 1 else "rank"
            raise ArgumentError(
                f"the orders cannot finish: {name} {rank} waits in pass {place[rank]}, {text[place[rank]]}, and all "
                f"others are at their end or wait, too, with {room_between(0, 1, ring)} messages under way at most"
            )
