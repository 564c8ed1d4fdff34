"""What commands print and write: plans, tables fit for the terminal, JSON, pictures."""

from __future__ import annotations

import io
import json
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from executor.commands.option_words import in_settings
from executor.commands.options import PICTURE, Output
from planner.plan.units import WIDTH, bytes_text, count_text, flops_text, rate_text, seconds_text
from profiler.errors import ArgumentError
from profiler.files import replace_file
from profiler.text import one_line

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from planner.plan.plan import Plan

Command = TypeVar("Command", bound=Callable[..., None])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def plan_outputs(command: Command) -> Command:
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


def present(plan: Plan, *, as_json: bool, timeline: Path | None, trace: Path | None, every_stage: bool = False) -> None:
    """Print a plan as a report or as JSON, and write its pictures."""
    write_pictures(plan, timeline=timeline, trace=trace)
    if as_json:
        click.echo(plan.to_json(), nl=False)
        return
    from planner.plan.report import plan_report

    click.echo(plan_report(plan, terminal_width(), every_stage=every_stage, spoken=in_settings))


def terminal_width() -> int:
    """Columns of the terminal, or of a report where there is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def write_pictures(plan: Plan, *, timeline: Path | None, trace: Path | None) -> None:
    """Write the files that `plan_outputs` asks for."""
    if timeline is not None:
        from planner.pictures.timeline import plot_timeline

        write_picture(plot_timeline(plan), timeline)
    if trace is not None:
        from planner.plan.timeline import save_timeline_json

        save_timeline_json(plan, trace)


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, each from a new line on, as wide as the terminal."""
    for line in lines:
        click.echo("\n".join(textwrap.wrap(line, terminal_width(), subsequent_indent="  ", break_on_hyphens=False)))


def write_picture(axes: Axes, file: Path) -> None:
    """Write the figure that holds these axes, in the format of the file's ending.

    Raises:
        ArgumentError: the file cannot be written.
    """
    from matplotlib import pyplot

    figure = axes.get_figure(root=True)
    assert figure is not None
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix[1:] or None, bbox_inches="tight")
    try:
        replace_file(file, picture.getvalue())
    except OSError as problem:
        raise ArgumentError(
            f"cannot write {str(file)!r}: {problem.strerror or problem}; choose another file"
        ) from problem
    finally:
        pyplot.close(figure)


def print_frame(frame: pandas.DataFrame, *, as_json: bool, keys: Sequence[str] = ()) -> None:
    """Print a data frame: as a table as wide as the terminal, or as JSON with one object a row.

    Units follow from the names of columns: `_s` are seconds, `_bytes` bytes, shares are shown in percent.

    Args:
        frame: what to print.
        as_json: as JSON.
        keys: columns that tell the rows apart, for what is too wide and goes on below; the first one by default.
    """
    if as_json:
        click.echo(json.dumps(json.loads(frame.to_json(orient="records")), indent=2))
        return
    cells, left = {}, set()
    for name in frame.columns:
        head = _head(str(name))
        rows = [cell_text(str(name), value) for value in frame[name]]
        if any(rows):  # what is empty in every row is left out
            cells[head] = rows
        if any(isinstance(value, str) for value in frame[name]):
            left.add(head)
    for columns in _fitting(cells, left, [head for key in keys if (head := _head(key)) in cells]):
        _print_table({head: cells[head] for head in columns}, left)


def _head(column: str) -> str:
    """What stands above a column: its values have their units with them.

    >>> _head("device_flops_per_s"), _head("step_s"), _head("largest_memory_bytes")
    ('device flops', 'step', 'largest memory')
    """
    return column.removesuffix("_per_s").removesuffix("_s").removesuffix("_bytes").replace("_", " ")


SHORTEST_TEXT = 16
"""Columns of the terminal that a text keeps [chosen]."""
BETWEEN = 2


def _fitting(cells: Mapping[str, Sequence[str]], left: Collection[str], keys: Sequence[str]) -> list[list[str]]:
    """The columns in as many tables as the terminal's width asks for, each with those that tell the rows apart."""
    room = shutil.get_terminal_size((80, 24)).columns
    first = list(keys) or list(cells)[:1]
    tables = [[*first]]
    widths = {head: _least_width(head, rows, head in left) for head, rows in cells.items()}
    least = used = sum(widths[head] for head in first) + BETWEEN * (len(first) - 1)
    for head in (head for head in cells if head not in first):
        if len(tables[-1]) > len(first) and used + BETWEEN + widths[head] > room:
            tables.append([*first])
            used = least
        tables[-1].append(head)
        used += BETWEEN + widths[head]
    return tables


def _least_width(head: str, rows: Sequence[str], is_text: bool) -> int:
    """Numbers are never cut, texts no shorter than `SHORTEST_TEXT`; a heading breaks between words."""
    widest = max(map(len, rows), default=0)
    return max(*map(len, head.split()), min(widest, SHORTEST_TEXT) if is_text else widest, 1)


def _print_table(cells: Mapping[str, Sequence[str]], left: Collection[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, BETWEEN, 0, 0))
    for head, rows in cells.items():
        is_text = head in left
        table.add_column(
            head.replace(" ", "\n"),
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=_least_width(head, rows, is_text),
        )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    console = Console()
    with console.capture() as captured:  # it would end the process by itself where nobody reads
        console.print(table)
    click.echo(captured.get(), nl=False)


def cell_text(name: str, value: Any) -> str:
    """A value for people, with the unit that its name tells.

    >>> cell_text("step_s", 0.0125), cell_text("largest_memory_bytes", 2**30), cell_text("gap", 0.051)
    ('12.5 ms', '1.00 GiB', '5.1%')
    """
    if value is None or value != value:  # noqa: PLR0124  # not a number
        return ""
    if isinstance(value, bool | str):
        return one_line(str(value))
    for ending, text in _UNITS.items():
        if name.endswith(ending):
            return text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    return f"{share:.1%}"


_UNITS: dict[str, Callable[[float], str]] = {
    "tokens_per_s": lambda rate: f"{count_text(rate)}/s",
    "_flops_per_s": flops_text,
    "_per_s": lambda rate: f"{rate_text(rate)}/s",
    "_s": seconds_text,
    "_bytes": bytes_text,
    **dict.fromkeys(("parameters", "flops"), count_text),
    **dict.fromkeys(("bubble", "gap", "share", "busy", "mfu"), _percent),
}
