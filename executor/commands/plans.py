"""Commands about plan files: `show`, `explain`, `diff`, `validate`, `plot`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor.commands.option_words import in_settings
from executor.commands.options import FILE, PICTURE
from executor.commands.output import json_option, plan_outputs, present, print_frame, print_lines, write_picture
from executor.commands.settings import MADE_FOR, made_for, with_options
from profiler.errors import PlanFileError, ProfileError
from profiler.text import counted

if TYPE_CHECKING:
    from planner.plan.plan import Plan

EVERY_STAGE = "List all stages, however many; otherwise some of more than 16."


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@plan_outputs
@click.option("--every-stage", is_flag=True, help=EVERY_STAGE)
def show(plan_file: Path, timeline: Path | None, trace: Path | None, as_json: bool, every_stage: bool) -> None:
    """Print a plan: its stages, predicted times and memory.

    \b
    Examples:
      autoplan show plan.json
      autoplan show plan.json --timeline plan.png --trace plan-trace.json
    """
    present(_loaded(plan_file), as_json=as_json, timeline=timeline, trace=trace, every_stage=every_stage)


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option("--profile", "profile_file", type=FILE, help="What it was made from: also tells what other cuts take.")
@with_options(*MADE_FOR)
@click.option("--every-stage", is_flag=True, help=EVERY_STAGE)
@json_option
def explain(
    plan_file: Path,
    profile_file: Path | None,
    devices: str | None,
    link: str | None,
    between: str | None,
    every_stage: bool,
    as_json: bool,
) -> None:
    """Say why a plan is as it is: what each stage is busy with, and what holds up the others.

    With the profile, two columns more say what the step takes if the cut after a stage is one layer earlier or later.

    \b
    Examples:
      autoplan explain plan.json
      autoplan explain plan.json --profile profile.json
    """
    from profiler.record import Profile

    cluster = made_for(devices, link, between)
    measured = None if profile_file is None else Profile.load(profile_file)
    explanation = _loaded(plan_file).explain(measured, cluster)
    if as_json:
        print_frame(explanation.reset_index(), as_json=True)
        return
    short, remark = (explanation, "") if every_stage else explanation.in_short()
    print_lines(map(in_settings, explanation.sentences))
    click.echo()
    print_frame(short.reset_index(), as_json=False)
    if remark:
        print_lines([f"{remark.partition(';')[0]}; --every-stage prints all"])


@click.command()
@click.argument("plan_file", metavar="A", type=FILE)
@click.argument("other_file", metavar="B", type=FILE)
@json_option
def diff(plan_file: Path, other_file: Path, as_json: bool) -> None:
    """Compare two plans: one line a quantity, and the ratio of B to A.

    \b
    Examples:
      autoplan diff gpipe.json 1f1b.json
      autoplan diff before.json after.json --json
    """
    from executor.commands.output import cell_text

    frame = _loaded(plan_file).compare(_loaded(other_file))
    frame = frame.reset_index(names="quantity")
    if not as_json:
        for column in ("this", "other"):
            frame[column] = [cell_text(name, value) for name, value in zip(frame.quantity, frame[column], strict=True)]
        frame = frame.rename(columns={"this": "A", "other": "B", "other / this": "B/A"})
    print_frame(frame, as_json=as_json)


@click.command()
@click.argument("files", metavar="[FILE...]", type=FILE, nargs=-1)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of plan files instead.")
@json_option
def validate(files: tuple[Path, ...], schema: bool, as_json: bool) -> None:
    """Check plan and profile files: what the sound ones hold; the exit code is 5 if one of them is damaged.

    \b
    Examples:
      autoplan validate plan.json profile.json
      autoplan validate --schema > plan.schema.json
    """
    if schema == bool(files):
        raise click.UsageError("give files to check, or --schema alone")
    if schema:
        from planner.plan.plan_schema import schema_text

        click.echo(schema_text(), nl=False)
        return
    found: list[dict[str, str]] = []
    damaged: PlanFileError | None = None
    for file in files:
        try:
            found.append({"file": str(file), "holds": _described(file)})
        except PlanFileError as problem:
            if damaged is not None:
                click.echo(f"autoplan: error: {damaged}", err=True)
            damaged = problem
    if as_json:
        click.echo(json.dumps(found, indent=2))
    for entry in () if as_json else found:
        click.echo(f"{entry['file']}: {entry['holds']}")
    if damaged is not None:
        raise damaged


def _described(file: Path) -> str:
    """What a sound file holds."""
    from profiler.record import Profile
    from profiler.value import read_file

    text = read_file(file, "plan or profile", PlanFileError)
    try:
        is_profile = "costs" in json.loads(text)
    except (ValueError, TypeError, RecursionError):
        is_profile = False
    if is_profile:
        try:
            found = Profile.load(file)
        except ProfileError as problem:
            raise PlanFileError(str(problem)) from problem
        kinds = ", ".join(dict.fromkeys(cost.device_kind for cost in found.costs))
        return f"a sound profile; {counted(len(found.layers), 'layer')} on {kinds}"
    plan = _loaded(file)
    return f"a sound plan; K = {plan.K}, M = {plan.M}, {plan.schedule}"


_PICTURES = {
    "timeline": ("planner.pictures.timeline:plot_timeline", "planner.pictures.shown:timeline_frame"),
    "memory": ("planner.pictures.memory:plot_memory", "planner.pictures.shown:memory_frame"),
    "memory-over-time": ("planner.pictures.memory:plot_memory_over_time", "planner.explain:memory_over_time"),
    "balance": ("planner.pictures.layers:plot_balance", "planner.pictures.shown:balance_frame"),
    "layers": ("planner.pictures.layers:plot_layers", "planner.pictures.shown:layers_frame"),
}
"""What can be drawn of a plan: what draws it, and what gives the same as a frame."""


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option("-o", "--output", type=PICTURE, help="Picture to write (.png, .svg, .pdf).")
@click.option(
    "--what", type=click.Choice(tuple(_PICTURES)), default="timeline", show_default=True, help="What it shows."
)
@click.option("--profile", "profile_file", type=FILE, help="What the plan was made from; for `--what layers`.")
@click.option("--json", "as_json", is_flag=True, help="Print what the picture shows as JSON; -o may be left out.")
def plot(plan_file: Path, output: Path | None, what: str, profile_file: Path | None, as_json: bool) -> None:
    """Draw a plan: its predicted step, the memory or the balance of its stages, or its cuts among the layers.

    \b
    Examples:
      autoplan plot plan.json -o step.png
      autoplan plot plan.json -o cuts.svg --what layers --profile profile.json
    """
    from profiler.record import Profile

    if (what == "layers") != (profile_file is not None):
        needs = "needs --profile, which says what each layer costs" if what == "layers" else "takes no --profile"
        raise click.UsageError(f"--what {what} {needs}")
    if output is None and not as_json:
        raise click.UsageError("say where the picture goes with -o, or ask for what it shows with --json")
    made = _loaded(plan_file)
    given = () if profile_file is None else (Profile.load(profile_file),)
    drawn, data = (_function(named) for named in _PICTURES[what])
    if output is not None:
        write_picture(drawn(made, *given), output)
    if as_json:
        print_frame(data(made, *given), as_json=True)


def _function(named: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = named.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _loaded(file: Path) -> Plan:
    from planner.plan.plan import Plan

    return Plan.load(file)
