"""The command `autoplan`: make a plan, look at it, ask what others would take, train by it.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 unexpected, 2 usage, 3 infeasible, 4 model
not traceable, 5 bad or foreign plan. Only commands that need torch import it, so that help and `show` answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from executor.commands.environment import env
from executor.commands.estimating import estimate, what_if
from executor.commands.export import export
from executor.commands.option_words import in_options
from executor.commands.planning import plan, profile, trace
from executor.commands.plans import diff, explain, plot, show, validate
from executor.commands.running import run
from executor.commands.user_code import show_users_frames
from profiler.errors import PlanError, UserFunctionError
from profiler.text import printable

PACKAGES = "executor", "planner", "profiler"
ROOM = "make room there"
NO_ROOM = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EFBIG: "allow larger files (ulimit -f)"}
"""What the system says where the output has no room, and what to do."""
INTERRUPTED, OUTPUT_CLOSED = 128 + signal.SIGINT, 128 + signal.SIGPIPE


class _Group(click.Group):
    """Ends with one line, and frames of the user's function if that failed, where one of our errors gets this far."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _ending_as_programs_do(), _printable_complaints():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _ending_as_programs_do(), _plain_warnings(), _printable_complaints():
                return super().invoke(ctx)
        except PlanError as problem:
            if BrokenPipeError.__name__ in str(problem) and _output_is_closed():  # a rank had something to print
                sys.exit(OUTPUT_CLOSED)
            command = self.get_command(ctx, ctx.invoked_subcommand or "") or self
            click.echo(f"autoplan: error: {in_options(str(problem), command)}", err=True)
            cause = problem.__cause__
            if isinstance(problem, UserFunctionError) and cause is not None and cause.__traceback__ is not None:
                show_users_frames(cause)  # of another process the message has it
            ctx.exit(problem.exit_code)


@contextlib.contextmanager
def _ending_as_programs_do() -> Iterator[None]:
    """By Ctrl-C, and where who reads the output has closed it, with the status that a shell has for these signals.

    With 1 where there is no room for the output.
    """
    try:
        with _whole_output():
            try:
                yield
            finally:
                if sys.stdout is not None:  # it was closed
                    sys.stdout.flush()  # here, and not when the interpreter ends
    except KeyboardInterrupt:
        click.echo("autoplan: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except OSError as problem:
        if problem.errno not in (errno.EPIPE, *NO_ROOM) or problem.filename is not None:
            raise
        _write_no_more()
        if problem.errno == errno.EPIPE:
            sys.exit(OUTPUT_CLOSED)
        cure = NO_ROOM[problem.errno]
        click.echo(f"autoplan: error: cannot write the output: {problem.strerror}; {cure}", err=True)
        sys.exit(1)


@contextlib.contextmanager
def _whole_output() -> Iterator[None]:
    """Standard output is written to the end also where Python does not buffer it (`PYTHONUNBUFFERED`, `-u`).

    There a text of which a part was written is cut off without a word, as where a file system is full.
    """
    usual = sys.stdout
    raw = getattr(usual, "buffer", None)
    if not isinstance(raw, io.RawIOBase):
        yield
        return
    descriptor = os.dup(raw.fileno())
    whole = os.fdopen(descriptor, "w", buffering=1, encoding=usual.encoding, errors=usual.errors)
    sys.stdout = whole
    try:
        yield
    finally:
        sys.stdout = usual
        with contextlib.suppress(OSError):  # what could not be written was said before
            whole.close()


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Ours are for who typed the command, who has no use for a line of our source; all others are shown as ever."""
    ours, usual = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in PACKAGES), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if filename.startswith(ours):
            click.echo(f"autoplan: warning: {printable(str(message))}", err=True)
        else:
            usual(message, category, filename, *more, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def _output_is_closed() -> bool:
    """Whether nobody reads standard output any more."""
    if sys.stdout is None:
        return False
    watched = select.poll()
    watched.register(1, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _write_no_more() -> None:
    """What is still to be written when the interpreter ends goes nowhere."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


@contextlib.contextmanager
def _printable_complaints() -> Iterator[None]:
    """Complaints about arguments hold these as they came, and a terminal would obey them."""
    try:
        yield
    except click.ClickException as problem:
        problem.message = printable(problem.message)  # type: ignore[misc]  # final for who constructs it
        raise


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpipe-autoplan", prog_name="autoplan")
def main() -> None:
    """Plan pipeline-parallel training of an unmodified PyTorch model, and train by the plan.

    \b
    Examples:
      autoplan plan model.py:build --devices 2 -o plan.json
      autoplan run plan.json train.py:train
      autoplan estimate --hf llama --devices 8xA100-80GB --batch-size 512

    Exit codes: 0 fine, 1 unexpected, 2 usage, 3 no plan satisfies the limits, 4 the model cannot be traced,
    5 the plan file is damaged or made for something else.
    """


for _command in (plan, show, run, estimate, explain, diff, what_if, profile, trace, plot, validate, export, env):
    main.add_command(_command)
