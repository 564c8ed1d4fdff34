"""The command `autoplan`: make a plan, show it, train by it.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 unexpected, 2 usage, 3 infeasible, 4 model
not traceable, 5 bad or foreign plan. Only `plan` and `run` import torch, so that help and `show` answer at once.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from executor.command_options import (
    CHUNKS,
    FILE,
    MICRO_BATCHES,
    PICTURE,
    SAMPLES,
    STAGES,
    THREADS,
    Assignment,
    Devices,
    MemoryLimit,
    Numbers,
    Output,
    Replicas,
    SecondsOption,
)
from executor.user_code import user_code
from planner.plan.schedules import DEFAULT_SCHEDULE, SCHEDULES
from planner.settings import RecomputeMode, SkipMode
from profiler.errors import ArgumentError, ForeignPlanError, PlanError
from profiler.files import replace_file
from profiler.quantities import shown
from profiler.text import printable

if TYPE_CHECKING:
    from planner.plan.plan import Plan


class _Group(click.Group):
    """Ends with one line and the error's own exit code where one of our errors gets this far."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _printable_complaints():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_complaints():
                return super().invoke(ctx)
        except PlanError as problem:
            click.echo(f"autoplan: error: {problem}", err=True)
            ctx.exit(problem.exit_code)


@contextlib.contextmanager
def _printable_complaints() -> Iterator[None]:
    """Complaints about arguments hold these as they came, and a terminal would obey them."""
    try:
        yield
    except click.ClickException as problem:
        problem.message = printable(problem.message)  # type: ignore[misc]  # final for who constructs it
        raise


def _outputs(command: Callable[..., None]) -> Callable[..., None]:
    """Options for the forms in which a plan leaves the command."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of a report."),
        click.option("--trace", type=Output(), help="Write the predicted step for Perfetto (ui.perfetto.dev)."),
        click.option(
            "--timeline",
            type=PICTURE,
            help="Write the predicted step as a picture (.png, .svg, .pdf).",
        ),
    ):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpipe-autoplan", prog_name="autoplan")
def main() -> None:
    """Plan pipeline-parallel training of an unmodified PyTorch model, and train by the plan.

    \b
    Examples:
      autoplan plan model.py:build --devices 2 -o plan.json
      autoplan run plan.json train.py:train

    Exit codes: 0 fine, 1 unexpected, 2 usage, 3 no plan satisfies the limits, 4 the model cannot be traced,
    5 the plan file is damaged or made for something else.
    """


@main.command()
@click.argument("model")
@click.option("-o", "--output", type=Output(), help="Write the plan to this file.")
@click.option(
    "--devices",
    type=Devices(),
    help="How many, or which: cuda:0,cuda:1 or cpu,cpu.  [default: all CUDA devices, or else 2 CPU workers]",
)
@click.option("--batch-size", type=SAMPLES, help="Samples in a mini-batch.  [default: as in the sample]")
@click.option("--chunks", type=CHUNKS, metavar="V", help="Stages a device, of an interleaved schedule.  [default: 1]")
@click.option("--stages", type=STAGES, metavar="K", help="Number of stages.  [default: the best]")
@click.option("--micro-batches", type=MICRO_BATCHES, metavar="M", help="Number of micro-batches.  [default: the best]")
@click.option("--max-stages", type=STAGES, metavar="K", help="Largest number of stages.")
@click.option("--micro-batches-per-stage", type=MICRO_BATCHES, help="M is at least this times K.  [default: 4]")
@click.option(
    "--schedule",
    type=click.Choice([*SCHEDULES, "auto"]),
    default=DEFAULT_SCHEDULE,
    show_default=True,
    help="Order of forward and backward passes; auto takes the fastest that fits.",
)
@click.option("--replicas", type=Replicas(), default=1, show_default=True, help="Pipelines side by side, or auto.")
@click.option("--keep-together", multiple=True, metavar="MODULE", help="Module that no cut may part; repeatable.")
@click.option("--cut-at", multiple=True, metavar="MODULE", help="Module before which there must be a cut; repeatable.")
@click.option(
    "--pin",
    "pinned",
    type=Assignment("MODULE=DEVICE"),
    multiple=True,
    metavar="MODULE=DEVICE",
    help="Device that must run a module, by name or position; repeatable.",
)
@click.option("--micro-batch-sizes", type=Numbers(), metavar="N,...", help="The only sizes of micro-batches.")
@click.option(
    "--batch-dim",
    "batch_dims",
    type=Assignment("INPUT=DIM"),
    multiple=True,
    metavar="INPUT=DIM",
    help="Batch dimension of an input, by position or keyword, or none; repeatable.  [default: 0]",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=SecondsOption(positive=True),
    metavar="SECONDS",
    help="Seconds that the search may take.",
)
@click.option(
    "--memory-limit",
    type=MemoryLimit(),
    help="Memory that a stage may fill, such as 8GiB; 8GiB,none for each device, or cuda:0=8GiB,cuda:1=4GiB.",
)
@click.option(
    "--recompute",
    type=click.Choice(get_args(RecomputeMode)),
    default="auto",
    show_default=True,
    help="Whether stages recompute their forward pass instead of keeping activations.",
)
@click.option(
    "--skips",
    type=click.Choice(get_args(SkipMode)),
    default="relayed",
    show_default=True,
    help="Whether stages pass on values that they do not read, or these go past them where that fits.",
)
@click.option("--optimizer", default="AdamW", show_default=True, help="Class in torch.optim to account for.")
@click.option(
    "--time-budget",
    "time_budget_s",
    type=SecondsOption(positive=False),
    default=60.0,
    show_default=True,
    help="Seconds of timing.",
)
@click.option(
    "--autocast",
    type=click.Choice(["bfloat16", "float16"]),
    help="Run the model and its loss in an autocast region.",
)
@click.option("--threads", type=THREADS, default=1, show_default=True, help="Threads of a CPU worker.")
@click.option("--cache", help="Folder of earlier measurements, or off.  [default: in the user's cache folder]")
@_outputs
def plan(
    *,
    model: str,
    output: Path | None,
    devices: int | list[str] | None,
    timeline: Path | None,
    trace: Path | None,
    as_json: bool,
    threads: int,
    autocast: str | None,
    pinned: tuple[tuple[str, int | str], ...],
    batch_dims: tuple[tuple[str, int | str], ...],
    **settings: Any,
) -> None:
    """Measure a model on the devices and print the best plan for it.

    MODEL names a function, path/to/file.py:function or package.module:function. It takes no argument and returns
    (model, sample) or (model, sample, loss_fn, target).

    \b
    Examples:
      autoplan plan model.py:build -o plan.json --timeline plan.png
      autoplan plan shop.ranking:build --devices cuda:0,cuda:1 --batch-size 512 --memory-limit 40GiB
    """
    dims = _batch_dims(batch_dims)
    import torch

    from planner import autoplan
    from profiler.machine.local import local_devices

    cluster = local_devices(devices, threads=threads)  # before the model is built, which may take long
    built = _built(model, _function(model, "MODEL"))
    made = autoplan(
        built[0],
        built[1],
        cluster,
        loss_fn=built[2] if len(built) == 4 else None,
        target=built[3] if len(built) == 4 else None,
        threads=threads,
        autocast=None if autocast is None else getattr(torch, autocast),
        pinned=dict(pinned),
        batch_dims=dims,
        **settings,
    )
    if output is not None:
        made.save(output)
    _present(made, as_json=as_json, timeline=timeline, trace=trace)


@main.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@_outputs
def show(plan_file: Path, timeline: Path | None, trace: Path | None, as_json: bool) -> None:
    """Print a plan: its stages, predicted times and memory.

    \b
    Examples:
      autoplan show plan.json
      autoplan show plan.json --timeline plan.png --trace plan-trace.json
    """
    from planner.plan.plan import Plan

    _present(Plan.load(plan_file), as_json=as_json, timeline=timeline, trace=trace)


@main.command()
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
    function = _function(script, "FUNCTION")
    if dry_run:
        places = ", ".join(stage.device.name for stage in made.stages[: made.K // made.chunks])
        click.echo(f"{plan_file}: sound; {made.K} stage{'s' if made.K > 1 else ''} on {places}")
        return
    from executor.launching import launch

    launch(function, made)


def _present(plan: Plan, *, as_json: bool, timeline: Path | None, trace: Path | None) -> None:
    if timeline is not None:
        from matplotlib import pyplot

        from planner.plan.timeline import plot_timeline

        figure = plot_timeline(plan).get_figure(root=True)
        assert figure is not None
        picture = io.BytesIO()
        figure.savefig(picture, format=timeline.suffix[1:] or None)
        try:
            replace_file(timeline, picture.getvalue())
        except OSError as problem:
            reason = problem.strerror or problem
            raise ArgumentError(f"cannot write {str(timeline)!r}: {reason}; choose another file") from problem
        finally:
            pyplot.close(figure)
    if trace is not None:
        from planner.plan.timeline import save_timeline_json

        save_timeline_json(plan, trace)
    click.echo(plan.to_json() if as_json else str(plan), nl=not as_json)


def _batch_dims(given: tuple[tuple[str, int | str], ...]) -> dict[int | str, int | None] | None:
    """Batch dimensions by position or keyword of the input."""
    dims: dict[int | str, int | None] = {}
    for name, dim in given:
        if isinstance(dim, str) and dim != "none":
            raise click.BadParameter(f"{name}={dim}: {dim!r} is neither a number nor none", param_hint="--batch-dim")
        dims[int(name) if name.isdecimal() else name] = None if isinstance(dim, str) else dim
    return dims or None


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


def _built(reference: str, function: Callable[[], Any]) -> tuple[Any, ...]:
    """What the user's function returns: model, sample and perhaps loss function and target."""
    _check_callable_without_arguments(reference, function)
    with user_code():
        built = function()
    if not isinstance(built, tuple) or len(built) not in (2, 4):
        kind = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise ArgumentError(
            f"{reference} returned {kind}; expected (model, sample) or (model, sample, loss_fn, target)"
        )
    return built


def _check_callable_without_arguments(reference: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as problem:
        raise ArgumentError(f"{reference} is called without arguments, and needs some: {problem}") from problem
    except ValueError:  # a built-in function that does not say
        pass


def _function(reference: str, argument: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names.

    A file becomes a module of its own name with its folder on the path, as Python itself does for a script: then a
    spawned process, which inherits the path, can import it again.

    Raises:
        click.BadParameter: there is no such file, module or function.
    """

    def refuse(reason: str) -> click.BadParameter:
        return click.BadParameter(f"{shown(reference)}: {reason}", param_hint=argument)

    place, colon, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    if not colon or not place or not name or not (is_file or all(map(str.isidentifier, place.split(".")))):
        raise refuse("write it as path/to/file.py:function or package.module:function")
    if is_file:
        file = _file(place)
        if file is None:
            raise refuse(f"there is no file {place}")
        folder, module_name = file.parent, file.stem
        if not all(module_name.split(".")):
            raise refuse(f"no module can have the name {module_name}; rename the file")
    else:
        file, folder, module_name = None, Path.cwd(), place
    sys.path.insert(0, str(folder))
    with user_code():
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as problem:
            if problem.name not in _ancestors(module_name):
                raise  # the module is there; something that it imports is not
            raise refuse(f"there is no module {module_name}") from problem
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise refuse(f"the name {module_name} is taken by {module.__file__ or 'a built-in module'}; rename the file")
    function = getattr(module, name, None)
    if not callable(function):
        raise refuse(f"{module.__file__} has no function {name}")
    return function  # type: ignore[no-any-return]


def _file(place: str) -> Path | None:
    """The file of that name; None if there is none, or no file can have that name."""
    try:
        file = Path(place).resolve()
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long; links in a circle; a zero byte
        return None


def _ancestors(module_name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = module_name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
