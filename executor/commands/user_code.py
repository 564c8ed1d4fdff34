"""The user's own code, called by the command: where it fails, the user sees their frames and not ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from profiler.errors import PlanError
from profiler.text import printable
from profiler.users_frames import users_traceback


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
    click.echo(printable(users_traceback(problem)), err=True, nl=False)
