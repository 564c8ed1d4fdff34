"""`autoplan plan`, `profile` and `trace`: from a model to its layers, their costs, and the best plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from executor.commands.interruption import interruption_later
from executor.commands.models import model_options, source_of
from executor.commands.options import STAGES, FloatType, Numbers, Output
from executor.commands.output import json_option, plan_outputs, present, print_frame
from executor.commands.settings import (
    CUT_AT,
    KEEP_TOGETHER,
    MEASURING,
    PRECISION,
    batch_dims_of,
    optimizer_named,
    planning,
    with_options,
)
from profiler.quantities import LEAST_STAGES


@click.command()
@model_options
@click.option("-o", "--output", type=Output(), help="Write the plan to this file.")
@click.option("--save-profile", type=Output(), help="Write what was measured to this file, for what-if and explain.")
@with_options(*MEASURING, *planning())
@plan_outputs
def plan(
    *,
    output: Path | None,
    save_profile: Path | None,
    timeline: Path | None,
    trace: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure a model on the devices and print the best plan for it.

    MODEL names a function, path/to/file.py:function or package.module:function. It takes no argument and returns
    (model, sample) or (model, sample, loss_fn, target). On devices that are not here, nothing is measured: times are
    estimated from data sheets.

    \b
    Examples:
      autoplan plan model.py:build -o plan.json --timeline plan.png
      autoplan plan shop.ranking:build --devices cuda:0,cuda:1 --batch-size 512
    """
    source, measuring = source_of(given), _measuring(given)
    from planner import autoplan

    built = source.build()
    pinned = dict(given.pop("pinned"))
    made = autoplan(
        built.model, built.sample, loss_fn=built.loss_fn, target=built.target, pinned=pinned, **measuring, **given
    )
    if output is not None:
        made.save(output)
    if save_profile is not None and made.profile is not None:
        made.profile.save(save_profile)
    present(made, as_json=as_json, timeline=timeline, trace=trace)


@click.command()
@model_options
@click.option("-o", "--output", type=Output(), required=True, help="Write the profile to this file.")
@click.option("--micro-batch-sizes", type=Numbers(), metavar="N,...", help="The sizes to measure.")
@with_options(*MEASURING, KEEP_TOGETHER, CUT_AT)
@json_option
def profile(*, output: Path, as_json: bool, micro_batch_sizes: list[int] | None, **given: Any) -> None:
    """Measure what the layers of a model cost, for `what-if` and `plan_from_profile`.

    \b
    Examples:
      autoplan profile model.py:build -o profile.json
      autoplan profile --hf llama --devices 8xH100 --batch-size 512 -o llama.json
    """
    source, measuring = source_of(given), _measuring(given)
    import profiler

    built = source.build()
    traced = {"batch_dims": measuring.pop("batch_dims")}
    traced |= {name: measuring.pop(name) for name in ("autocast", "precision")}
    traced |= {name: given[name] for name in ("keep_together", "cut_at")}
    found = profiler.profile(
        profiler.trace(built.model, built.sample, **traced),
        sample=built.sample,
        loss_fn=built.loss_fn,
        target=built.target,
        micro_batch_sizes=micro_batch_sizes,
        **measuring,
    )
    found.save(output)
    frame = found.to_frame().groupby(["device_kind", "micro_batch_size"], as_index=False)[["forward_s", "backward_s"]]
    print_frame(frame.sum(), as_json=as_json)


@click.command()
@model_options
@click.option(
    "--stages",
    type=STAGES,
    default=LEAST_STAGES,
    show_default=True,
    metavar="K",
    help="Layers are fine enough for so many.",
)
@click.option("--autocast", type=FloatType(), help="Trace in an autocast region.")
@PRECISION
@KEEP_TOGETHER
@CUT_AT
@json_option
def trace(*, stages: int, autocast: str | None, precision: str | None, as_json: bool, **given: Any) -> None:
    """Print the layers that a model is cut into: modules, parameters, work, and what crosses after each.

    \b
    Examples:
      autoplan trace model.py:build
      autoplan trace --hf gpt2 --set n_layer=4 --sequence 128 --json
    """
    source = source_of(given)
    with interruption_later():
        import torch

    import profiler

    built = source.build()
    sequence = profiler.trace(
        built.model,
        built.sample,
        autocast=None if autocast is None else getattr(torch, autocast),
        precision=precision,
        keep_together=given["keep_together"],
        cut_at=given["cut_at"],
        stages=stages,
    )
    frame = sequence.to_frame()
    print_frame(frame if as_json else frame.drop(columns=["boundary_values", "signature", "source"]), as_json=as_json)


def _measuring(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `autoplan` that MEASURING gives; they are taken out. Devices are checked before anything slow."""
    dims = batch_dims_of(given.pop("batch_dims"))
    devices, autocast = given.pop("devices"), given.pop("autocast")
    links = {name: given.pop(name) for name in ("link", "between")}
    with interruption_later():
        import torch

    from profiler.machine.local import local_devices

    names = ("batch_size", "precision", "time_budget_s", "threads", "cache")
    return {
        "devices": local_devices(devices, threads=given["threads"], **links),
        "autocast": None if autocast is None else getattr(torch, autocast),
        "batch_dims": dims,
        **{name: given.pop(name) for name in names},
        "optimizer": optimizer_named(given.pop("optimizer")),
    }
