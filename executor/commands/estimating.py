"""`autoplan estimate` and `what-if`: what training takes on hardware that is not here, or with other settings."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor.commands.interruption import interruption_later
from executor.commands.models import Built, model_options, source_of
from executor.commands.option_words import in_settings
from executor.commands.options import (
    FILE,
    PICTURE,
    REPLICAS,
    SAMPLES,
    Asking,
    FloatType,
    Numbers,
    Output,
    ParamType,
    SecondsOption,
    Size,
    Within,
)
from executor.commands.output import (
    cell_text,
    json_option,
    plan_outputs,
    print_frame,
    print_lines,
    terminal_width,
    write_picture,
    write_pictures,
)
from executor.commands.settings import LINKS, PRECISION, optimizer_named, planning, with_options
from planner.plan.schedules import SCHEDULES
from profiler.errors import ArgumentError, ProfileError
from profiler.quantities import MOST_DEVICES
from profiler.text import are, counted

if TYPE_CHECKING:
    import pandas

    from planner.plan.plan import Plan
    from profiler.device import Cluster, Link
    from profiler.record import Profile

SEARCH_S = 8.0
"""Seconds that the search of `estimate` may take by default: 70B on 64 devices gets the plan of 15 s [measured]."""
_REPLICAS = click.option("--replicas", type=REPLICAS, default="auto", show_default=True, help="Pipelines side by side.")
_TIME_LIMIT = click.option(
    "--time-limit",
    "time_limit_s",
    type=SecondsOption(positive=True),
    default=SEARCH_S,
    show_default=True,
    help="Seconds of search for a plan.",
)


@click.command()
@model_options
@click.option("--devices", required=True, metavar="TEXT", help="Such as 8xA100-80GB, 16xRTX4090:pcie4 or 8x8xH100.")
@with_options(*LINKS)
@click.option("--batch-size", type=SAMPLES, required=True, help="Samples in a mini-batch.")
@click.option("--optimizer", default="AdamW", show_default=True, help="Class in torch.optim to account for.")
@click.option("--autocast", type=FloatType(), help="Run the model in an autocast region.")
@PRECISION
@with_options(*planning(replicas="auto", time_limit_s=SEARCH_S))
@click.option("-o", "--output", type=Output(), help="Write the plan to this file.")
@click.option("--save-profile", type=Output(), help="Write the estimated profile to this file, for what-if.")
@plan_outputs
def estimate(
    *,
    devices: str,
    link: str | None,
    between: str | None,
    output: Path | None,
    save_profile: Path | None,
    as_json: bool,
    timeline: Path | None,
    trace: Path | None,
    **given: Any,
) -> None:
    """Say how well a model trains on devices that are not here: does it fit, how fast, with which plan.

    Times come from data sheets, and the last lines say how far they may be off. -o writes the plan, whose stages
    `autoplan show` prints.

    \b
    Examples:
      autoplan estimate --hf llama --devices 8xA100-80GB --batch-size 512
      autoplan estimate --hf gpt2 --devices 2x8xH100 --between ndr --batch-size 64
    """
    from profiler.device import Cluster

    cluster = Cluster.of(devices, link=link, between=between)
    source = source_of(given)
    made, measured = _estimated(source.build(), cluster, **given)
    if save_profile is not None:
        measured.save(save_profile)
    if output is not None:
        made.save(output)
    write_pictures(made, timeline=timeline, trace=trace)
    if as_json:
        click.echo(made.to_json(), nl=False)
        return
    from planner.plan.report import plan_summary

    click.echo(plan_summary(made, terminal_width(), spoken=in_settings))
    print_lines(_in_short(made, measured))


def _estimated(
    built: Built,
    cluster: Cluster,
    *,
    batch_size: int,
    optimizer: str,
    autocast: str | None,
    precision: str | None,
    pinned: Iterable[tuple[str, str | int]],
    **settings: Any,
) -> tuple[Plan, Profile]:
    with interruption_later():
        import torch

    import profiler
    from planner import plan_from_profile
    from planner.settings import Settings

    settings["pinned"] = dict(pinned)
    asked = Settings.of(cluster, batch_size, settings)  # type: ignore[arg-type]  # as click checks them
    dtype = None if autocast is None else getattr(torch, autocast)
    sequence = profiler.trace(
        built.model,
        built.sample,
        autocast=dtype,
        precision=precision,
        keep_together=asked.keep_together,
        cut_at=asked.cut_at,
        stages=asked.most_stages,
    )
    measured = profiler.profile(
        sequence,
        cluster,
        sample=built.sample,
        loss_fn=built.loss_fn,
        target=built.target,
        batch_size=batch_size,
        optimizer=optimizer_named(optimizer),
    )
    return plan_from_profile(measured, cluster, batch_size=batch_size, progress=True, **settings), measured


def _in_short(plan: Plan, measured: Profile) -> list[str]:
    """On how many devices it fits, and how sure that is."""
    lines = [f"fits on {counted(plan.ranks * plan.replicas, 'device')}: R = {plan.replicas} x {plan.ranks} in line"]
    lines.extend(
        f"{entry.device_kind}: from its data sheet, times may be off by {entry.error:.0%}"
        + (
            f"; {counted(len(entry.without_formula), 'operation')} {are(len(entry.without_formula))} "
            "priced by the bytes they touch"
            if entry.without_formula
            else ""
        )
        for entry in measured.estimates
    )
    return lines


class _Counts(ParamType):
    """Numbers of devices: `2,4`, or `2..64` for doublings."""

    name = "counts"

    def convert(self, value: Any, param: Asking, ctx: Within) -> list[int]:
        """The numbers, ascending as given."""
        match = re.fullmatch(r"([0-9]{1,6})\.\.([0-9]{1,6})", str(value))
        if match is None:
            return Numbers().convert(value, param, ctx)
        least, most = int(match[1]), int(match[2])
        if not 1 <= least <= most <= MOST_DEVICES:
            self.fail(f"{value} is no range of numbers from 1 to {MOST_DEVICES}", param, ctx)
        return [*itertools.takewhile(lambda count: count < most, (least * 2**power for power in range(64))), most]


class _Several(ParamType):
    """Values with commas between them, each of another type."""

    name = "values"

    def __init__(self, each: ParamType) -> None:
        self.each = each

    def convert(self, value: Any, param: Asking, ctx: Within) -> list[Any]:
        """The values."""
        return [self.each.convert(part.strip(), param, ctx) for part in str(value).split(",")]


@click.command("what-if")
@click.argument("profile_file", metavar="PROFILE", type=FILE)
@click.option(
    "--devices",
    "counts",
    type=_Counts(),
    required=True,
    help="How many of the profile's devices: 2,4 or 2..64 for doublings.",
)
@click.option("--batch-size", "batch_sizes", type=Numbers(), required=True, help="Samples in a mini-batch.")
@click.option("--link", "links", type=_Several(click.STRING), help="Links by name, such as nvlink4,ndr.")
@click.option("--between", metavar="NAME", help="Link between hosts of 8 devices, such as ndr; 4xhdr is four a host.")
@click.option("--memory-limit", "limits", type=_Several(Size()), help="Memory of a device, such as 24GiB,40GiB.")
@click.option(
    "--schedule",
    "schedules",
    type=_Several(click.Choice([*SCHEDULES, "auto"], case_sensitive=False)),
    help="Schedules.",
)
@click.option("--stages", type=Numbers(), metavar="K,...", help="Numbers of stages.")
@_REPLICAS
@_TIME_LIMIT
@click.option("--chart", type=PICTURE, help="Write samples/s as a picture, along the first of these that varies.")
@json_option
def what_if(*, profile_file: Path, chart: Path | None, as_json: bool, **given: Any) -> None:
    """Plan for every combination of these values from one profile, without measuring: one line a case.

    Ctrl-C ends it with the lines so far.

    \b
    Examples:
      autoplan what-if profile.json --devices 2..64 --batch-size 512
      autoplan what-if profile.json --devices 8 --batch-size 256 --link ndr,pcie4
    """
    from profiler.record import Profile

    measured = Profile.load(profile_file)
    frame, varied = _cases(measured, given)
    print_frame(frame.drop(columns=["cuts"], errors="ignore"), as_json=as_json, keys=varied)
    if chart is not None:
        _draw(frame, varied, chart)


def _cases(measured: Profile, given: Mapping[str, Any]) -> tuple[pandas.DataFrame, list[str]]:
    """The table, and the columns that vary."""
    import pandas
    from tqdm import tqdm

    with interruption_later():
        from planner import what_if as planned
    from profiler.device import Link
    from profiler.progress_line import ProgressLine

    settings = {
        "batch_size": given["batch_sizes"],
        "memory_limit": given["limits"],
        "schedule": given["schedules"],
        "stages": given["stages"],
    }
    variations = {name: values for name, values in settings.items() if values}
    always = {name: given[name] for name in ("replicas", "time_limit_s")}
    cases = list(itertools.product(given["counts"], given["links"] or [None], *variations.values()))
    frames: list[pandas.DataFrame] = []
    with ProgressLine("plans", total=len(cases), wanted=True) as line:
        try:
            for count, link, *values in cases:
                inside = next(iter(measured.links), None) if link is None else Link.of(link)
                cluster = _cluster(measured, count, inside, given["between"])
                varied = {name: [value] for name, value in zip(variations, values, strict=True)}
                frame = planned(measured, cluster, varied, batch_size=given["batch_sizes"][0], **always)
                frame.insert(0, "devices", count)
                if given["links"]:
                    frame.insert(1, "link", link)
                frames.append(frame)
                line.update()
        except KeyboardInterrupt:
            if not frames:
                raise
            tqdm.write(f"interrupted: {len(frames)} of {counted(len(cases), 'case')}", file=sys.stderr)
    names = ["devices", *(["link"] if given["links"] else []), *variations]
    table = pandas.concat(frames, ignore_index=True)
    return table, [name for name in names if table[name].nunique() > 1]


def _cluster(measured: Profile, count: int, link: Link | None, between: str | None) -> Cluster:
    """So many devices of the profile's kind: from its data sheet, or those of this machine.

    Raises:
        ProfileError: the profile has several kinds, or another one than this machine.
    """
    from profiler.datasheets import DATA_SHEETS
    from profiler.device import Cluster
    from profiler.machine.local import local_devices

    kinds = list(dict.fromkeys(cost.device_kind for cost in measured.costs))
    if len(kinds) == 1 and kinds[0] in DATA_SHEETS:
        return Cluster.of(f"{count}x{kinds[0]}", link=link, between=between)
    here = local_devices(count).devices
    if kinds != [here[0].kind]:
        raise ProfileError(
            f"the profile is of {', '.join(map(repr, kinds))}, and devices here are {here[0].kind!r}; profile one kind "
            "that is here or has a data sheet, or call planner.what_if with devices"
        )
    if between is not None:
        raise ArgumentError(f"between is {between!r}, and all devices of the profile are on this machine; leave it out")
    return Cluster(devices=here, link=link)


def _draw(table: pandas.DataFrame, varied: list[str], file: Path) -> None:
    """Samples/s along the first column that varies, a line for each combination of the others; crosses have no plan."""
    from planner.pictures.canvas import new_axes
    from planner.pictures.choices import COLOURS, MARKS

    if "samples_per_s" not in table:
        raise ArgumentError("no case has a plan, so there is nothing to draw; the table says why")
    axes = new_axes(4.0)
    along, others = (varied or ["devices"])[0], varied[1:]
    places = {case: place for place, case in enumerate(dict.fromkeys(_case(along, value) for value in table[along]))}
    groups = table.groupby(others, sort=False) if others else [((), table)]
    for position, (values, rows) in enumerate(groups):
        label = ", ".join(f"{_heading(name)} {_case(name, value)}" for name, value in zip(others, values, strict=True))
        axes.plot(
            [places[_case(along, value)] for value in rows[along]],
            rows["samples_per_s"],
            marker=MARKS[position % len(MARKS)],
            color=COLOURS[position % len(COLOURS)],
            label=label,
        )
    without = [places[_case(along, value)] for value in table[along][table["samples_per_s"].isna()]]
    axes.plot(without, [0] * len(without), "kx", clip_on=False)
    axes.set_xticks(range(len(places)), list(places))
    axes.set_xlabel(_heading(along))
    axes.set_ylabel("samples/s, predicted")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    write_picture(axes, file)


def _heading(column: str) -> str:
    return column.replace("_", " ")


def _case(column: str, value: Any) -> str:
    """What a case has, as people write it: a limit of memory is bytes."""
    return cell_text("memory_bytes" if column == "memory_limit" else column, value)
