"""Numba behind one typed name: compiled on first use by one process at a time, and kept on disk for the next.

Numba keeps what it compiled next to the source (or where `NUMBA_CACHE_DIR` says) and takes it back as long as the
function's own file is unchanged. Two things are done differently here:

- A function holds the machine code of those that it calls and the constants that it reads. So what is kept is stale
  when any of `SOURCES` has changed, not only the function's own file.
- Processes that start side by side would each compile all of the search. A lock file makes the others wait for the one
  that came first, and take what it kept; for so long as that may take, since it may also be stopped or stuck.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PACKAGES = Path(__file__).parents[2]
SOURCES = (
    *sorted((_PACKAGES / "planner" / "kernel").glob("*.py")),
    _PACKAGES / "planner" / "cost" / "stage_sums.py",
    _PACKAGES / "planner" / "plan" / "actions.py",
    _PACKAGES / "planner" / "plan" / "orders.py",
    _PACKAGES / "planner" / "plan" / "schedules.py",
    _PACKAGES / "profiler" / "between_sizes.py",
)
"""Files of compiled functions, and of the constants and named tuples that they read."""


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
    return cast("Callable[_Parameters, _Result]", _dispatcher(function))


def inlined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same, put in the place of its calls: to hand over many arrays takes longer than to read a few of them.

    Each array counts who holds it; 40 of them cost 0.1 us a call and more [measured].
    """
    return cast("Callable[_Parameters, _Result]", _dispatcher(function, inline="always"))


def _dispatcher(function: Callable[..., object], **options: str) -> Any:
    """What numba makes of a function, with the two changes; the parts of numba that they rest on are private."""
    if _NUMBA.config.DISABLE_JIT:
        return function
    # nobody takes the address of a compiled function for C, and each such entrance takes time to compile
    dispatcher = _NUMBA.njit(cache=True, no_cfunc_wrapper=True, **options)(function)
    kept = dispatcher._cache._cache_file
    kept._source_stamp = kept._source_stamp, digest_of(SOURCES)
    compile_for, template_for = dispatcher.compile, dispatcher.get_call_template
    folder = Path(dispatcher.stats.cache_path)

    def compile_alone(signature: Any) -> Any:
        with _IN_PROCESS, _SPENT, _one_process(folder):
            return compile_for(signature)

    def template_of_types(types: Any, keywords: Any) -> Any:
        """A number that stands in the source is a number like any other: numba would compile for each of them."""
        plain = _NUMBA.types.unliteral
        return template_for(tuple(map(plain, types)), {name: plain(kind) for name, kind in keywords.items()})

    dispatcher.compile, dispatcher.get_call_template = compile_alone, template_of_types
    return dispatcher


@cache
def digest_of(files: tuple[Path, ...]) -> str:
    """Of what the files contain."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Spent:
    """Seconds in its outermost `with`, which one thread at a time is in."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._depth = 0
        self._begun_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._begun_s = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._total_s += time.monotonic() - self._begun_s

    @property
    def running_s(self) -> float:
        """Seconds since the outermost `with` was entered; 0 outside."""
        return time.monotonic() - self._begun_s if self._depth else 0.0

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._total_s + self.running_s


_SPENT = _Spent()


def seconds_compiling() -> float:
    """What this process has spent so far on compiling the search, or on taking what others have compiled."""
    return _SPENT.total_s


def compiling_since_s() -> float:
    """Seconds that the compiling has taken that goes on now, in whatever thread; 0 if none does."""
    return _SPENT.running_s


_IN_PROCESS = threading.RLock()
_HELD: set[Path] = set()
_WAITED_IN_VAIN: set[Path] = set()
LONGEST_WAIT_S = 120.0
"""Seconds that a process waits for another that compiles: several times what all of the search takes [chosen]."""
BETWEEN_LOOKS_S = 0.02


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """Only one process compiles for that folder; where it cannot be locked, or not in time, each for itself."""
    with _IN_PROCESS:
        if folder in _HELD or folder in _WAITED_IN_VAIN:  # of a function that is called by the one that is compiled
            yield
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "compiling.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            yield
            return
        try:
            if not _is_free_in_time(descriptor):
                _WAITED_IN_VAIN.add(folder)
            _HELD.add(folder)
            yield
        finally:
            _HELD.discard(folder)
            os.close(descriptor)


def _is_free_in_time(descriptor: int) -> bool:
    """Lock the file; whether that was possible before `LONGEST_WAIT_S`, or the file system has no locks."""
    until_s = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process compiles
            if time.monotonic() > until_s:
                return False
            time.sleep(BETWEEN_LOOKS_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True
