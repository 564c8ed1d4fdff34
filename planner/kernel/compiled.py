"""Numba behind one typed name: compiled on first use, and kept on disk for the next process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _numba() -> Any:
    """The module. It extends the package `coverage`, and takes any folder of that name for it."""
    found = find_spec("coverage") if "coverage" not in sys.modules else None
    places = [] if found is None else found.submodule_search_locations or []
    if found is None or any((Path(place) / "types.py").exists() for place in places):
        return importlib.import_module("numba")
    sys.modules["coverage"] = None  # type: ignore[assignment]  # reports of a coverage run beside a script, say
    try:
        return importlib.import_module("numba")
    finally:
        del sys.modules["coverage"]


_NUMBA = _numba()


def compiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same function as machine code; it takes numbers, arrays and named tuples of them, and no other values."""
    return cast("Callable[_Parameters, _Result]", _NUMBA.njit(cache=True)(function))


def inlined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same, put in the place of its calls: to hand over many arrays takes longer than to read a few of them.

    Each array counts who holds it; 40 of them cost 0.1 us a call and more [measured].
    """
    return cast("Callable[_Parameters, _Result]", _NUMBA.njit(cache=True, inline="always")(function))
