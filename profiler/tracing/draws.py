"""Draws of random numbers by their position in the whole graph, however it is cut into layers.

A layer's code says before each of its drawing operations which of its draws comes now, and whoever runs the layer may
seed the generators by that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Seeder = Callable[[int], None]
"""Called with the number of a draw in the whole graph, from 0, before it takes place."""

_NOW: ContextVar[tuple[Seeder, int] | None] = ContextVar("who seeds, and draws of earlier layers", default=None)


def before_draw(number: int) -> None:
    """Stands in the code of layers.

    Args:
        number: of the layer's own draws that came before.
    """
    now = _NOW.get()
    if now is not None:
        seed, earlier = now
        seed(earlier + number)


def draws_seeded_by(seed: Seeder | None, earlier: int) -> None:
    """From now on, in this thread, have draws seeded.

    Args:
        seed: None for nobody.
        earlier: draws in the layers before the one that runs next.
    """
    _NOW.set(None if seed is None else (seed, earlier))
