"""Why devices idle: the schedule fills and drains the pipeline, and stages and messages take unlike times."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import NamedTuple

from planner.plan.plan_fields import PlanFields
from planner.plan.simulator import Durations, simulate

MOST_PASSES = 100_000
"""Passes of all micro-batches through all stages up to which a report simulates; it takes 0.4 s then [measured]."""


class BubbleParts(NamedTuple):
    """Shares of the devices' time before the optimizer step.

    Attributes:
        fill_and_drain: idle even if all stages took equally long and messages no time; (K - 1) / (M + K - 1) for GPipe
            and 1F1B.
        imbalance: the rest of the bubble: the wait for longer stages and for messages.
    """

    fill_and_drain: float
    imbalance: float


def bubble_parts(plan: PlanFields) -> BubbleParts | None:
    """What the bubble of a plan consists of; None for a plan of more than `MOST_PASSES` passes."""
    if plan.K * plan.M > MOST_PASSES:
        return None
    times = Durations.of(plan)
    still = {name: tuple((0.0,) * plan.M for _ in range(plan.K)) for name in ("send_forward_s", "send_backward_s")}
    level = {name: _level(getattr(times, name)) for name in ("forward_s", "recompute_s", "backward_s", "weight_s")}
    skips = dict.fromkeys(times.skips, ((0.0,) * plan.M, (0.0,) * plan.M))
    even = simulate(plan.actions(), replace(times, **still, **level, skips=skips)).bubble
    fill_and_drain = min(even, plan.prediction.bubble)
    return BubbleParts(fill_and_drain, plan.prediction.bubble - fill_and_drain)


def _level(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """The same time for all stages and micro-batches: their mean."""
    if not rows:
        return ()
    seconds = [value for row in rows for value in row]
    mean_s = fsum(seconds) / len(seconds)
    return tuple((mean_s,) * len(row) for row in rows)
