"""The command `autoplan`: make a plan, look at it, ask what others would take, train by it.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 unexpected, 2 usage, 3 infeasible, 4 model
not traceable, 5 bad or foreign plan. Only commands that need torch import it, so that help and `show` answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
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


class _Group(click.Group):
    """Ends with one line, and frames of the user's function if that failed, where one of our errors gets this far."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _printable_complaints():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_complaints():
                result = super().invoke(ctx)
                if sys.stdout is not None:  # it was closed
                    sys.stdout.flush()  # here, and not when the interpreter ends
                return result
        except PlanError as problem:
            command = self.get_command(ctx, ctx.invoked_subcommand or "") or self
            click.echo(f"autoplan: error: {in_options(str(problem), command)}", err=True)
            if isinstance(problem, UserFunctionError) and problem.__cause__ is not None:
                show_users_frames(problem.__cause__)
            ctx.exit(problem.exit_code)
        except OSError as problem:
            if problem.errno != errno.ENOSPC or problem.filename is not None:
                raise
            with Path(os.devnull).open("w") as nowhere:  # for what is still to be written when the interpreter ends
                os.dup2(nowhere.fileno(), 1)
            click.echo(f"autoplan: error: cannot write the output: {problem.strerror}; make room there", err=True)
            ctx.exit(1)


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
