"""Type checkers that draw random numbers: beartype checks one item of each list, and draws which one.

Its numbers decide what is checked, and nothing of what is computed; a graph holds no checks, so to it they are nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import FunctionType

from torch import nn

from profiler.observe.walk import walk_from

_FILE = "<@beartype("  # which the code that it generates for a function says that it comes from
_DRAW = "__beartype_getrandbits"  # by which name that code draws


def checkers_of(model: nn.Module) -> tuple[FunctionType, ...]:
    """The functions that a model's code reaches and that are such checks, each around a function of somebody's."""
    return tuple(
        function
        for function in walk_from(model).functions
        if function.__code__.co_filename.startswith(_FILE) and _DRAW in (function.__kwdefaults__ or ())
    )


@contextlib.contextmanager
def first_items_checked(checkers: Sequence[FunctionType]) -> Iterator[None]:
    """Within, these check the first item of each list, and draw no random number for that."""
    defaults = [function.__kwdefaults__ or {} for function in checkers]
    drawn = [held[_DRAW] for held in defaults]
    for held in defaults:
        held[_DRAW] = _first
    try:
        yield
    finally:
        for held, draw in zip(defaults, drawn, strict=True):
            held[_DRAW] = draw


def _first(_bits: int) -> int:
    return 0
