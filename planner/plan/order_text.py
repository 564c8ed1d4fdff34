"""Orders that a plan has of its own, as text in its file: a letter for each pass of a stage.

With three micro-batches `FIFIWFIWW` goes forward with one and back to its inputs, forward with the next and back, makes
the gradients of the first one's parameters, and so on. It is read as letters and nothing else, and refused where it is
no order.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.plan.orders import Order
from profiler.errors import ArgumentError
from profiler.text import counted

LETTERS = "FIW"
"""Of the passes of a split backward pass, in the order of `PassKind`."""


def order_text(order: Order, micro_batches: int) -> str:
    """The passes as letters: micro-batches take each kind of pass in order, so they need no numbers.

    >>> order_text((0, 3, 1, 4, 6, 2, 5, 7, 8), 3)
    'FIFIWFIWW'
    """
    return "".join(LETTERS[number // micro_batches] for number in order)


def order_of_text(text: str, micro_batches: int) -> Order:
    """The passes of so many micro-batches that these letters of a step mean.

    Of more micro-batches than the letters are for, so many go first, and the others after them in the same way; of
    fewer, the passes of the others are left out.

    >>> order_of_text("FFIWIW", 2), order_of_text("FFIWIW", 1)
    ((0, 1, 2, 4, 3, 5), (0, 1, 2))
    """
    whole, done = len(text) // len(LETTERS), [0] * len(LETTERS)
    order: list[int] = []
    for first in range(0, micro_batches, whole):
        stop = min(first + whole, micro_batches)
        done = [first] * len(LETTERS)
        for letter in text:
            kind = LETTERS.index(letter)
            if done[kind] < stop:
                order.append(kind * micro_batches + done[kind])
                done[kind] += 1
    return tuple(order)


def check_order_texts(texts: Sequence[str], stages: int, micro_batches: int) -> None:
    """Refuse letters that are no order of a step for each stage.

    Raises:
        ArgumentError: there is not one for each stage, a pass is missing, there twice or too early, or all wait for
            each other.
    """
    if len(texts) != stages:
        raise ArgumentError(
            f"orders has {counted(len(texts), 'entry')} for {counted(stages, 'stage')}; each has its own"
        )
    for stage, text in enumerate(texts):
        counts = [text.count(letter) for letter in LETTERS]
        if counts != [micro_batches] * len(LETTERS) or len(text) != sum(counts):
            listed = ", ".join(f"{many} of {letter}" for letter, many in zip(LETTERS, counts, strict=True))
            raise ArgumentError(
                f"the order of stage {stage} has {counted(len(text), 'pass')}, {listed}; M = {micro_batches} asks for "
                f"{micro_batches} of each"
            )
        done = dict.fromkeys(LETTERS, 0)
        for place, letter in enumerate(text):
            done[letter] += 1
            if not done["F"] >= done["I"] >= done["W"]:
                raise ArgumentError(f"pass {place} of stage {stage}, {letter}, comes before the pass that it needs")
    _check_progress(texts)


def _check_progress(texts: Sequence[str]) -> None:
    """Refuse orders in which all wait for each other."""
    last = len(texts) - 1
    done = [dict.fromkeys(LETTERS, 0) for _ in texts]
    place = [0] * len(texts)
    waiting = [*range(len(texts))]
    while waiting:
        stage = waiting.pop()
        own, begun = done[stage], place[stage]
        while place[stage] < len(texts[stage]):
            letter = texts[stage][place[stage]]
            if letter == "F" and stage and done[stage - 1]["F"] <= own["F"]:
                break
            if letter == "I" and stage < last and done[stage + 1]["I"] <= own["I"]:
                break
            own[letter] += 1
            place[stage] += 1
        if place[stage] > begun:
            waiting += [other for other in (stage - 1, stage + 1) if 0 <= other <= last]
    for stage, text in enumerate(texts):
        if place[stage] < len(text):
            raise ArgumentError(
                f"the orders cannot finish: stage {stage} waits in pass {place[stage]}, {text[place[stage]]}, and all "
                "others are at their end or wait, too"
            )
