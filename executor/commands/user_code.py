"""The user's own code, called by the command: where it fails, the user sees their frames and not ours."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import click

from profiler.errors import PlanError
from profiler.text import printable

_OURS = Path(__file__).parents[2]
_PACKAGES = tuple(f"{_OURS / name}{os.sep}" for name in ("executor", "planner", "profiler"))
_MACHINERY = ("<frozen importlib", "importlib/__init__.py", "click/")


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Within, any other error than ours ends the command with exit code 1, after the traceback of the user's frames.

    An exception's text may hold what a terminal would obey, so that is written as escapes.
    """
    try:
        yield
    except (PlanError, click.ClickException, click.exceptions.Exit):
        raise
    except Exception as problem:
        show_users_frames(problem)
        raise click.exceptions.Exit(1) from problem


def show_users_frames(problem: BaseException) -> None:
    """Write the traceback of an error of the user's own code, without what is ours, on standard error.

    Frames of Python's way of importing and of torch's insides are left out with ours: each line of the user's stands
    below the line of theirs that led to it.
    """
    told = traceback.TracebackException.from_exception(problem)
    _keep_the_users(told)
    click.echo(printable("".join(told.format())), err=True, nl=False)


def _keep_the_users(told: traceback.TracebackException) -> None:
    """Leave out other frames, also of what came before it."""
    told.stack[:] = [frame for frame in told.stack if not _is_ours(frame.filename)]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _keep_the_users(before)


def _is_ours(file: str) -> bool:
    torch = sys.modules.get("torch")  # what has not been imported has not failed
    inside = (*_PACKAGES, f"{Path(torch.__file__ or '').parent}{os.sep}") if torch is not None else _PACKAGES
    return file.startswith(inside) or any(part in file for part in _MACHINERY)
