"""Made-up profiles from plain numbers."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.list_scheduler import Room
from planner.plan.actions import make_schedule
from planner.plan.schedules import ScheduleName
from profiler.device import Link
from profiler.record import LayerCost, LayerInfo, OptimizerCost, ParameterInfo, Profile
from profiler.sample_spec import SampleSpec

FIELDS = (
    "forward_s",
    "recompute_s",
    "backward_s",
    "kept_bytes",
    "transient_bytes",
    "output_bytes",
    "output_gradient_bytes",
)


def build_profile(
    rows: dict[tuple[str, int], Any],
    *,
    parameters: Sequence[tuple[int, bool]] = (),
    readers: Sequence[Sequence[int]] | None = None,
    buffers: Sequence[int] | None = None,
    optimizer: tuple[float, float] = (0.0, 0.0),
    links: tuple[Link, ...] = (Link(latency_s=0.0, bytes_per_s=1.0),),
    input_bytes: int = 0,
    reserve_bytes: int = 0,
    weights: Sequence[tuple[float, float]] | None = None,
) -> Profile:
    """A profile from plain numbers.

    `rows[kind, size][layer]` are the values of `FIELDS`; `parameters` are (bytes, trainable), and `readers[layer]` the
    positions of the parameters that the layer reads. `weights[layer]` are the share of its backward pass that makes
    gradients of parameters, and the share of what it keeps that they need.
    """
    layers = len(next(iter(rows.values())))
    readers = readers or [()] * layers
    costs = [
        LayerCost.model_validate(
            {
                "layer": layer,
                "micro_batch_size": size,
                "device_kind": kind,
                "spread": 0.0,
                **{name: (float if name.endswith("_s") else int)(v) for name, v in zip(FIELDS, row, strict=True)},
                "weight_s": row[2] * weights[layer][0] if weights else 0.0,
                "weight_kept_bytes": int(row[3] * weights[layer][1]) if weights else 0,
            }
        )
        for (kind, size), table in rows.items()
        for layer, row in enumerate(table)
    ]
    return Profile(
        fingerprint="made up",
        sample=SampleSpec(batch_size=1, tree="", leaves=()),
        parameters=tuple(
            ParameterInfo(name=f"p{index}", elements=size // 4, size_bytes=size, trainable=trainable)
            for index, (size, trainable) in enumerate(parameters)
        ),
        layers=tuple(
            LayerInfo(
                index=layer,
                name=f"layer{layer}",
                signature=str(layer),
                parameters=tuple(f"p{index}" for index in readers[layer]),
                buffers_bytes=buffers[layer] if buffers else 0,
                module_paths=(f"blocks.{layer}.in", f"blocks.{layer}.out"),
            )
            for layer in range(layers)
        ),
        costs=tuple(costs),
        optimizers=tuple(
            OptimizerCost(
                name="AdamW", device_kind=kind, seconds_per_byte=optimizer[0], state_bytes_per_byte=optimizer[1]
            )
            for kind in sorted({kind for kind, _ in rows})
        ),
        links=links,
        input_bytes=input_bytes,
        reserve_bytes=reserve_bytes,
    )


COPIED = ((0.0, 0.0), (0.0, 0.0), (0.375, 0.25), (0.5, 0.0), (0.125, 0.75), (0.0625, 0.125))
"""Shares of a message's seconds that its ends copy: many links leave them nothing to copy."""


def copying(link: Link, copied: tuple[float, float]) -> Link:
    """A link whose ends copy these shares."""
    return link.model_copy(update={"sender_share": copied[0], "receiver_share": copied[1]})


def copied_of(number: int) -> tuple[float, float]:
    """Some of `COPIED` for a number that was drawn for something else."""
    return COPIED[number % len(COPIED)]


@cache
def most_held(schedule: ScheduleName, number: int, micro_batches: int) -> int:
    """Most micro-batches that a stage has under way, counted in its list of actions; its number is from the end."""
    held = [0]
    for action in make_schedule(schedule, stages=number, micro_batches=micro_batches, recompute=(False,) * number)[0]:
        held.append(held[-1] + (action.kind == "F") - (action.kind == "B"))
    return max(held)


def room_for(free: Floats, flying: Floats, waiting: Floats, micro_batches: int) -> Room:
    """Room where each micro-batch takes as much as every other one, of shape (K,).

    What is free is of shape (3, K), or (K,) where all passes have as much, those of weights enough to come right after.
    """
    many = np.arange(micro_batches + 1.0)
    if free.ndim == 1:
        free = np.stack((free, free, np.maximum(free, free - flying + waiting)))
    return Room(free, np.outer(flying, many), np.outer(waiting, many))
