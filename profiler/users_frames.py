"""The traceback of an error of the user's own code, without what is ours.

Frames of Python's way of importing and of torch's insides are left out with ours: each line of the user's stands below
the line of theirs that led to it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = tuple(f"{_ROOT / name}{os.sep}" for name in ("executor", "planner", "profiler"))
_MACHINERY = ("<eval_with_key>", "<frozen importlib", "importlib/__init__.py", "contextlib.py", "click/")


def users_traceback(problem: BaseException) -> str:
    """The formatted traceback of an error, and of what came before it, with the user's frames alone."""
    told = traceback.TracebackException.from_exception(problem)
    _keep_the_users(told)
    return "".join(told.format())


def in_users_code(problem: BaseException) -> bool:
    """Whether the last frame that is not torch's is the user's: then it is no error of ours."""
    frames = traceback.extract_tb(problem.__traceback__)
    places = [frame.filename for frame in frames if not frame.filename.startswith(_inside_torch())]
    return bool(places) and not _is_ours(places[-1])


def users_way_to(cause: BaseException, problem: BaseException) -> str:
    """One traceback: the user's frames down to where `problem` was raised, then those down to its cause."""
    told = traceback.TracebackException.from_exception(cause)
    above = traceback.extract_tb(problem.__traceback__)
    told.stack[:0] = above
    _keep_the_users(told)
    return "".join(told.format())


def _keep_the_users(told: traceback.TracebackException) -> None:
    """Leave out other frames, also of what came before it."""
    told.stack[:] = [frame for frame in told.stack if not _is_ours(frame.filename)]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _keep_the_users(before)


def _is_ours(file: str) -> bool:
    return file.startswith((*_PACKAGES, *_inside_torch())) or any(part in file for part in _MACHINERY)


def _inside_torch() -> tuple[str, ...]:
    torch = sys.modules.get("torch")  # what has not been imported has not failed
    return () if torch is None else (f"{Path(torch.__file__ or '').parent}{os.sep}",)
