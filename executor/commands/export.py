"""`autoplan export`: a plan for another engine, as text to paste and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor.commands.models import model_options, source_of
from executor.commands.options import FILE
from executor.commands.output import json_option
from executor.commands.settings import MADE_FOR, made_for, with_options

if TYPE_CHECKING:
    from planner.export.target import Export

TARGETS = ("torch.distributed.pipelining", "torchgpipe", "torchtitan", "megatron-lm", "deepspeed", "huggingface")
"""The keys of `planner.export.export.TARGETS`, which takes torch to import."""


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@model_options
@click.option(
    "--to",
    "target",
    type=click.Choice(TARGETS, case_sensitive=False),
    required=True,
    metavar="ENGINE",
    help=f"One of {', '.join(TARGETS)}.",
)
@click.option("--profile", "profile_file", type=FILE, help="What the plan was made from; needed where cuts must move.")
@with_options(*MADE_FOR)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the engine's files into this folder.",
)
@json_option
def export(
    *,
    plan_file: Path,
    target: str,
    profile_file: Path | None,
    devices: str | None,
    link: str | None,
    between: str | None,
    folder: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Write a plan for another engine; say what moves to block borders there, and what that costs.

    PLAN is a file of `autoplan plan -o`, MODEL the function that built its model. What the engine would train wrongly
    is refused with the reason, and exit code 3. What is to be pasted goes to stdout, all else to stderr.

    \b
    Examples:
      autoplan export gpipe.json model.py:build --to torchgpipe
      autoplan export plan.json model.py:build --to torchtitan -o config
    """
    from planner.plan.plan import Plan
    from profiler.record import Profile

    cluster = made_for(devices, link, between)
    plan = Plan.load(plan_file)
    measured = None if profile_file is None else Profile.load(profile_file)
    built = source_of(given).build()
    made = plan.export(target, built.model, profile=measured, devices=cluster)
    written = [] if folder is None else made.save(folder)
    if as_json:
        click.echo(json.dumps(_as_json(made, written), indent=2))
        return
    for line in (made.changed, *made.notes, *(f"wrote {path}" for path in written)):
        click.echo(line, err=True)
    if folder is not None and not written:
        click.echo(f"{made.target} reads no file: nothing was written to {folder}; paste what is printed", err=True)
    click.echo(made.text, nl=False)


def _as_json(made: Export, written: list[Path]) -> dict[str, Any]:
    return {
        "target": made.target,
        "text": made.text,
        "changed": made.changed,
        "cost_s": made.cost_s,
        "cost_share": made.cost_share,
        "moves": [
            {"stage": move.stage, "before": move.before, "after": move.after, "module": move.path}
            for move in made.moves
        ],
        "notes": list(made.notes),
        "files": [str(path) for path in written],
    }
