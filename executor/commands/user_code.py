"""The user's own code, called by the command: where it fails, the user sees their frames and not ours."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

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
    """Write the traceback of an error of the user's own code, without what is ours, on standard error."""
    told = traceback.TracebackException(type(problem), problem, _from_the_user(problem.__traceback__))
    click.echo(printable("".join(told.format())), err=True, nl=False)


def _from_the_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither ours nor Python's way of importing."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGES) or any(part in file for part in _MACHINERY)
