"""Memory of stages: the peak by class, and its course over the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.pictures.canvas import (
    FAR_AWAY,
    byte_unit,
    ink,
    limits_of,
    limits_text,
    new_axes,
    plain,
    row_kind,
    some,
    time_unit,
)
from planner.plan.colours import MEMORY_COLOURS
from planner.plan.plan import Plan
from profiler.arguments import fits_its_arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 5
"""Stages that are lines; more, which would hide each other, are rows of a map [chosen]."""
MOST_LONG_NAMES = 16
"""Bars whose devices are named below them [chosen]."""
LINE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7")
TIME_BINS = 600


@fits_its_arguments
def plot_memory(plan: Plan, ax: Axes | None = None) -> Axes:
    """Predicted peak memory of each stage, or rank with several, by class, with the device's limit.

    The limit is a line where the bars come near it, and text where they would be flat under it.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
    """
    axes = ax if ax is not None else new_axes(4.5)
    memories = plan.device_memories
    limits = limits_of(plan)
    fullest = max(memory.total for memory in memories)
    is_near = fullest >= FAR_AWAY * max(limits)
    unit, scale = byte_unit(max(limits) if is_near else fullest)
    rows = range(len(memories))
    bottom = np.zeros(len(memories))
    for name, colour in MEMORY_COLOURS.items():
        heights = np.array([getattr(memory, name) / scale for memory in memories])
        if heights.any():
            axes.bar(rows, heights, 0.8, bottom=bottom, color=colour, label=name.replace("_", " "))
        bottom += heights
    if is_near:
        ends = [k - 0.45 for k in rows], [k + 0.45 for k in rows]
        axes.hlines([limit / scale for limit in limits], *ends, colors=ink(axes), linestyles="--", label="device")
    axes.set_ylim(0, 1.08 * max(fullest, max(limits) if is_near else 0) / scale or 1)
    _name_rows(axes, plan)
    axes.set_ylabel(unit)
    title = f"predicted peak memory, K = {plan.K}, M = {plan.M}"
    axes.set_title(title if is_near else f"{title}\n{limits_text(limits)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _name_rows(axes: Axes, plan: Plan) -> None:
    count, kind = len(plan.device_memories), row_kind(plan)
    if count <= MOST_LONG_NAMES:
        names = [f"{kind} {k}\n{plain(plan.stages[k].device.name)}" for k in range(count)]
        axes.set_xticks(range(count), names, fontsize=9 if count <= MOST_LONG_NAMES // 2 else 7)
        return
    axes.set_xticks([*some(count)], [str(k) for k in some(count)])
    axes.set_xlabel(kind)


@fits_its_arguments
def plot_memory_over_time(plan: Plan, ax: Axes | None = None) -> Axes:
    """Predicted bytes of each stage during the step: lines, or a map with one row a stage where these are many.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
    """
    axes = ax if ax is not None else new_axes(4.5 if plan.K <= MOST_LINES else 8.0)
    frame = plan.memory_over_time()
    courses = [(rows["time_s"].to_numpy(), rows["bytes"].to_numpy()) for _, rows in frame.groupby("stage")]
    limits = [stage.device.memory_bytes for stage in plan.stages]
    end_s = max(times[-1] for times, _ in courses)
    title = f"predicted memory during the step, K = {plan.K}, M = {plan.M}, {plan.schedule}"
    unit_of_time, in_a_second = time_unit(end_s)
    axes.set_xlabel(f"time in {unit_of_time}")
    if plan.K > MOST_LINES:
        _draw_map(axes, courses, limits, end_s, end_s * in_a_second)
        shares = [held.max() / limit for (_, held), limit in zip(courses, limits, strict=True)]
        stage = int(np.argmax(shares))
        axes.set_title(f"{title}\nfullest: stage {stage}, {shares[stage]:.0%} of its device")
        return axes
    fullest = max(held.max() for _, held in courses)
    is_near = fullest >= FAR_AWAY * max(limits)
    unit, scale = byte_unit(fullest)
    for stage, (times, held) in enumerate(courses):
        steps = [*times, end_s], [*held, held[-1]]
        axes.step(
            np.array(steps[0]) * in_a_second,
            np.array(steps[1]) / scale,
            where="post",
            color=LINE_COLOURS[stage],
            label=f"stage {stage}",
        )
    if is_near:
        for limit in sorted({*limits}):
            axes.axhline(limit / scale, color=ink(axes), linestyle="--", label="device")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end_s * in_a_second)
    axes.set_ylabel(unit)
    axes.set_title(title if is_near else f"{title}\n{limits_text(limits)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _draw_map(
    axes: Axes,
    courses: list[tuple[np.ndarray, np.ndarray]],
    limits: list[int],
    end_s: float,
    end: float,
) -> None:
    """A row a stage, coloured by the share of its device that is full; `end` is `end_s` in the unit of the axis."""
    edges = np.linspace(0.0, end_s, TIME_BINS + 1)
    shares = np.array(
        [_fullest(times, held, edges) / limit for (times, held), limit in zip(courses, limits, strict=True)]
    )
    shown = axes.imshow(
        shares * 100,
        aspect="auto",
        cmap="cividis",
        extent=(0, end, len(courses) - 0.5, -0.5),
        interpolation="nearest",
        vmin=0,
        vmax=100 if shares.max() >= FAR_AWAY else None,  # or all would be one colour
    )
    axes.figure.colorbar(shown, ax=axes, label="share of the device's memory in %")
    axes.set_yticks([*some(len(courses))])
    axes.set_ylabel("stage")


def _fullest(times: np.ndarray, held: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The most that is held between two edges, so that no peak falls between what is drawn."""
    firsts = np.maximum(0, np.searchsorted(times, edges[:-1], side="right") - 1)
    stops = np.searchsorted(times, edges[1:], side="left")
    return np.array([held[first : max(stop, first + 1)].max() for first, stop in zip(firsts, stops, strict=True)])
