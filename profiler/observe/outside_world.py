"""What code asks of the world outside of Python that no graph holds: random numbers of the system, and files.

Reading a file is none of it: what does not change may be a constant.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

_OURS = __name__.partition(".")[0]
Tell = Callable[[str], object]


@contextlib.contextmanager
def outside_told(tell: Tell) -> Iterator[None]:
    """Within, `tell(what)` is called when other code than torch's draws numbers of the system, or writes a file."""
    draw, opened = os.urandom, io.open

    def drawn(size: int) -> bytes:
        if _by_others(sys._getframe(1)):
            tell("draws random numbers of the system (os.urandom, secrets, uuid)")
        return draw(size)

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
        if writes and _by_others(sys._getframe(1)) and not _by_an_import(sys._getframe(1)):
            tell("writes a file")
        return opened(file, mode, *args, **kwargs)

    with (
        mock.patch.object(os, "urandom", drawn),
        mock.patch.object(random, "_urandom", drawn),
        mock.patch.object(builtins, "open", opening),
        mock.patch.object(io, "open", opening),
    ):
        yield


def _by_others(frame: FrameType | None) -> bool:
    """Whether code of neither Python's own packages, nor torch's, nor ours has led here."""
    while frame is not None and _package_of(frame) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and _package_of(frame) not in ("torch", _OURS)


def _by_an_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported, which may write its compiled form."""
    while frame is not None and _package_of(frame) != "torch":
        if _package_of(frame) in ("importlib", "_frozen_importlib"):
            return True
        frame = frame.f_back
    return False


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
