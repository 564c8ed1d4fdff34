"""`autoplan run`: train by a plan on the devices of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from executor.commands.functions import check_call, named_function
from executor.commands.interruption import interruption_later
from executor.commands.options import FILE
from profiler.errors import ArgumentError, ForeignPlanError
from profiler.text import counted

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.argument("script", metavar="FUNCTION")
@click.option("--dry-run", is_flag=True, help="Check the plan, the devices and the function, and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print what was found as JSON.")
def run(plan_file: Path, script: str, dry_run: bool, as_json: bool) -> None:
    """Call a function in one process for each stage.

    FUNCTION names it, path/to/file.py:function or package.module:function. It is called with the plan, and trains with
    Pipeline(model, plan). A file that defines functions needs nothing else; what it does at its top level, each process
    does as it imports the file, unless that stands under `if __name__ == "__main__":`.

    \b
    Examples:
      autoplan run plan.json train.py:train
      autoplan run plan.json train.py:train --dry-run
    """
    from executor.layout import layout_of
    from planner.plan.plan import Plan

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run; what a run prints is what FUNCTION prints")
    made = Plan.load(plan_file)
    _check_devices(plan_file, made)
    function = named_function(script, "FUNCTION")
    check_call(script, function, "the plan")
    if dry_run:
        processes = made.ranks * made.replicas
        layouts = [layout_of(made, process, processes) for process in range(processes)]
        places = [made.stages[own.stages[0]].devices[own.replica].name for own in layouts]
        if as_json:
            found = {"file": str(plan_file), "K": made.K, "M": made.M, "R": made.replicas, "devices": places}
            click.echo(json.dumps(found, indent=2))
        else:
            click.echo(f"{plan_file}: sound; {counted(made.K, 'stage')} on {', '.join(places)}")
        return
    from executor.launching import launch

    launch(function, made)


def _check_devices(plan_file: Path, plan: Plan) -> None:
    """Refuse a plan for devices that this machine lacks, before any process is started."""
    with interruption_later():
        from profiler.machine.local import torch_device

    for position, stage in enumerate(plan.stages):
        for device in stage.devices:
            try:
                torch_device(device)
            except ArgumentError as problem:
                raise ForeignPlanError(
                    f"{plan_file}: stage {position} cannot run here: {str(problem).partition(';')[0]}; make a plan for "
                    "the devices that are here with `autoplan plan`"
                ) from problem
