"""Which random generators somebody's code may draw from, by the names that it uses; nothing of it runs.

Torch's own generators are always seeded. Whether code draws from others in a backward pass may depend on data, so
that one run cannot tell; its names can, but for those that are computed (`getattr`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, Generator
from profiler.observe.walk import walk_from
from profiler.torch_private import backward_of_operation

_PACKAGES = "random"  # in the names of all functions of Python's and numpy's generators that are not held by a name
_OF_THE_SYSTEM = frozenset(
    {"urandom", "SystemRandom", "secrets", "randbelow", "token_bytes", "token_hex", "token_urlsafe", "uuid1", "uuid4"}
)


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """What code may draw from.

    Attributes:
        generators: other than torch's own.
        of_the_system: a name by which it draws what nobody can draw again; "" if there is none.
    """

    generators: tuple[Generator, ...] = ()
    of_the_system: str = ""


def drawn_from(code: Any, methods: Sequence[str] = ()) -> DrawnFrom:
    """What a function may draw from, or a class by these methods."""
    walk = walk_from(code, methods)
    ends = OF_PYTHON_AND_NUMPY if _PACKAGES in walk.names else walk.ends.values()
    held = [spot.holder for spot in walk.spots.values() if spot.is_random]
    generators = {id(generator): generator for generator in (*ends, *held)}
    return DrawnFrom(tuple(generators.values()), min(walk.names & _OF_THE_SYSTEM, default=""))


def of_function(function: Any) -> DrawnFrom:
    """What a `torch.autograd.Function` may draw from."""
    return drawn_from(function, ("forward", "backward", "setup_context", "vjp"))


@functools.cache
def of_operation(operation: Any) -> DrawnFrom:
    """What the backward pass of an operation may draw from, if somebody has defined that in Python."""
    backward = backward_of_operation(operation.name().partition(".")[0])
    return DrawnFrom() if backward is None else drawn_from(backward)


def is_torchs_own(code: Any) -> bool:
    """Whether a function or module is torch's, which draws from torch's generators alone, and in no backward pass."""
    while isinstance(code, functools.partial):
        code = code.func
    parts = [type(part) for part in code.modules()] if isinstance(code, nn.Module) else [code]
    return all(str(getattr(part, "__module__", "")).partition(".")[0] == "torch" for part in parts)
