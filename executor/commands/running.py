"""`autoplan run`: train by a plan on the devices of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from executor.commands.functions import named_function
from executor.commands.options import FILE
from profiler.errors import ArgumentError, ForeignPlanError

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.argument("script", metavar="FUNCTION")
@click.option("--dry-run", is_flag=True, help="Check the plan, the devices and the function, and stop.")
def run(plan_file: Path, script: str, dry_run: bool) -> None:
    """Call a function in one process for each stage.

    FUNCTION names it, path/to/file.py:function or package.module:function. It is called with the plan, and trains with
    Pipeline(model, plan). Each process imports its file: what the file does as a script must stand under
    `if __name__ == "__main__":`.

    \b
    Examples:
      autoplan run plan.json train.py:train
      autoplan run plan.json train.py:train --dry-run
    """
    from planner.plan.plan import Plan

    made = Plan.load(plan_file)
    _check_devices(plan_file, made)
    function = named_function(script, "FUNCTION")
    if dry_run:
        places = ", ".join(stage.device.name for stage in made.stages[: made.K // made.chunks])
        click.echo(f"{plan_file}: sound; {made.K} stage{'s' if made.K > 1 else ''} on {places}")
        return
    from executor.launching import launch

    launch(function, made)


def _check_devices(plan_file: Path, plan: Plan) -> None:
    """Refuse a plan for devices that this machine lacks, before any process is started."""
    from profiler.machine.local import torch_device

    for position, stage in enumerate(plan.stages):
        try:
            torch_device(stage.device)
        except ArgumentError as problem:
            raise ForeignPlanError(
                f"{plan_file}: stage {position} cannot run here: {problem}; make a plan for the devices that are here "
                "with `autoplan plan`"
            ) from problem
