"""Numba behind one typed name: compiled on first use, and kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def compiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same function as machine code; it takes numbers, arrays and named tuples of them, and no other values."""
    return cast("Callable[_Parameters, _Result]", numba.njit(cache=True)(function))
