"""Options that several commands share: what a model is measured on and with, and what is asked of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

import click

from executor.commands.options import (
    CHUNKS,
    MICRO_BATCHES,
    REPLICAS,
    SAMPLES,
    STAGES,
    THREADS,
    Assignment,
    Devices,
    FloatType,
    MemoryLimit,
    Numbers,
    Precision,
    SecondsOption,
)
from planner.keywords import RecomputeMode, SkipMode
from planner.plan.schedules import SCHEDULES
from profiler.errors import ArgumentError

if TYPE_CHECKING:
    from profiler.device import Cluster

Command = TypeVar("Command", bound=Callable[..., Any])
Option: TypeAlias = Callable[[Command], Command]

DEVICES = click.option(
    "--devices",
    type=Devices(),
    help="How many, or which: cuda:0,cuda:1 or cpu,cpu; or such that are not here: 8xA100-80GB, 16xRTX4090:pcie4.  "
    "[default: all CUDA devices, or else 2 CPU workers]",
)
LINKS: tuple[Option[Any], ...] = (
    click.option("--link", metavar="NAME", help="Between devices of a host that is not here, such as nvlink4."),
    click.option("--between", metavar="NAME", help="Between such hosts, such as ndr; 4xhdr is four a host."),
)
MADE_FOR: tuple[Option[Any], ...] = (
    click.option("--devices", metavar="TEXT", help="What it was made for, if links are not the profile's: 8x8xH100."),
    click.option("--link", metavar="NAME", help="Between these devices, or those of a host, such as nvlink4."),
    click.option("--between", metavar="NAME", help="Between hosts, such as ndr."),
)
"""Of commands that hold a plan from a file against its profile; see `made_for`."""
BATCH_SIZE = click.option("--batch-size", type=SAMPLES, help="Samples in a mini-batch.  [default: as in the sample]")
PRECISION = click.option(
    "--precision",
    type=Precision(),
    metavar="RECIPE",
    help="Mixed precision: bf16-mixed keeps gradients, master weights and optimizer state in float32, bf16-grads all "
    "but gradients; fp16-mixed; bf16, fp32.  "
    "[default: the model's own types]",
)
KEEP_TOGETHER = click.option(
    "--keep-together", multiple=True, metavar="MODULE", help="Module that no cut may part; repeatable."
)
CUT_AT = click.option(
    "--cut-at", multiple=True, metavar="MODULE", help="Module before which there must be a cut; repeatable."
)
MEASURING: tuple[Option[Any], ...] = (
    DEVICES,
    *LINKS,
    BATCH_SIZE,
    click.option(
        "--batch-dim",
        "batch_dims",
        type=Assignment("INPUT=DIM"),
        multiple=True,
        metavar="INPUT=DIM",
        help="Batch dimension of an input, by position or keyword, or none; repeatable.  [default: 0]",
    ),
    click.option("--optimizer", default="AdamW", show_default=True, help="Class in torch.optim to account for."),
    click.option(
        "--autocast",
        type=FloatType(),
        help="Run the model and its loss in an autocast region.",
    ),
    PRECISION,
    click.option(
        "--time-budget",
        "time_budget_s",
        type=SecondsOption(positive=False),
        default=60.0,
        show_default=True,
        help="Seconds of timing.",
    ),
    click.option("--threads", type=THREADS, default=1, show_default=True, help="Threads of a CPU worker."),
    click.option("--cache", help="Folder of earlier measurements, or off.  [default: in the user's cache folder]"),
)


def planning(*, replicas: int | str = 1, time_limit_s: float | None = None) -> tuple[Option[Any], ...]:
    """Options for what is asked of a plan: the keywords of `planner.keywords.SettingKeywords`.

    Args:
        replicas: by default.
        time_limit_s: by default; None for no limit.
    """
    return (
        *_SHAPE,
        click.option(
            "--replicas", type=REPLICAS, default=replicas, show_default=True, help="Pipelines side by side, or auto."
        ),
        *_WITHIN,
        click.option(
            "--time-limit",
            "time_limit_s",
            type=SecondsOption(positive=True),
            metavar="SECONDS",
            default=time_limit_s,
            show_default=time_limit_s is not None,
            help="Seconds that the search may take.",
        ),
    )


_SHAPE: tuple[Option[Any], ...] = (
    click.option(
        "--schedule",
        type=click.Choice([*SCHEDULES, "auto"], case_sensitive=False),
        default="auto",
        show_default=True,
        help="Order of forward and backward passes; auto takes the fastest that fits.",
    ),
    click.option(
        "--chunks",
        type=CHUNKS,
        metavar="V",
        help="Stages a device; auto takes the fastest.  [default: auto with that schedule, on one host; else 1]",
    ),
    click.option("--stages", type=STAGES, metavar="K", help="Number of stages.  [default: the best]"),
    click.option("--max-stages", type=STAGES, metavar="K", help="Largest number of stages."),
    click.option(
        "--micro-batches", type=MICRO_BATCHES, metavar="M", help="Number of micro-batches.  [default: the best]"
    ),
    click.option("--micro-batches-per-stage", type=MICRO_BATCHES, help="M is at least this times K.  [default: 4]"),
    click.option("--micro-batch-sizes", type=Numbers(), metavar="N,...", help="The only sizes of micro-batches."),
)
_WITHIN: tuple[Option[Any], ...] = (
    click.option("--shard-optimizer", is_flag=True, help="Replicas share the optimizer's state (ZeRO, stage 1)."),
    click.option(
        "--memory-limit",
        type=MemoryLimit(),
        help="Memory that a stage may fill, such as 8GiB; 8GiB,none for each device, or cuda:0=8GiB,cuda:1=4GiB.",
    ),
    click.option(
        "--recompute",
        type=click.Choice(get_args(RecomputeMode)),
        default="auto",
        show_default=True,
        help="Whether stages recompute their forward pass instead of keeping activations.",
    ),
    click.option(
        "--skips",
        type=click.Choice(get_args(SkipMode)),
        default="relayed",
        show_default=True,
        help="Whether stages pass on values that they do not read, or these go past them where that fits.",
    ),
    KEEP_TOGETHER,
    CUT_AT,
    click.option(
        "--pin",
        "pinned",
        type=Assignment("MODULE=DEVICE"),
        multiple=True,
        metavar="MODULE=DEVICE",
        help="Device that must run a module, by name or position; repeatable.",
    ),
)


def with_options(*options: Option[Any]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, in this order in its help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def made_for(devices: str | None, link: str | None, between: str | None) -> Cluster | None:
    """The cluster that the options `MADE_FOR` name; None for what the profile says."""
    from profiler.device import Cluster

    if devices is None and (link or between):
        raise ArgumentError("--link and --between say what is between devices; say which with --devices, 2x8xH100")
    return None if devices is None else Cluster.of(devices, link=link, between=between)


def optimizer_named(text: str) -> str:
    """The name of a class of torch.optim, whatever the case of its letters; what is none stays as it is."""
    from torch import optim

    classes = (name for name, held in vars(optim).items() if isinstance(held, type))
    return {name.lower(): name for name in classes}.get(text.lower(), text)


def batch_dims_of(given: tuple[tuple[str, int | str], ...]) -> dict[int | str, int | None] | None:
    """Batch dimensions by position or keyword of the input, from what --batch-dim was given."""
    dims: dict[int | str, int | None] = {}
    for name, dim in given:
        if isinstance(dim, str) and dim != "none":
            raise click.BadParameter(f"{name}={dim}: {dim!r} is neither a number nor none", param_hint="--batch-dim")
        dims[int(name) if name.isdecimal() else name] = None if isinstance(dim, str) else dim
    return dims or None
