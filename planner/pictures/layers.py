"""Where the cuts lie: what each layer costs, and what crosses; and how even the stages are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.pictures.canvas import ink, new_axes, row_kind, some, time_unit, width_pt
from planner.plan.actions import ActionKind
from planner.plan.colours import ACTION_COLOURS
from planner.plan.plan import Plan
from planner.plan.units import bytes_text, seconds_text
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.record import LayerCost, Profile
from profiler.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

MOST_WRITTEN = 24
"""Cuts whose bytes are written large; of more they are small, or said once if they are equal [chosen]."""
LINE_HEIGHT = 1.15
"""Of a text, in sizes of its letters [chosen]."""
MOST_BUSY_TEXTS = 16
"""Stages whose shares are written above them [chosen]."""


@fits_its_arguments
def plot_layers(plan: Plan, profile: Profile | None = None, ax: Axes | None = None) -> Axes:
    """Cost of each layer for one micro-batch, the chosen cuts, and the bytes that cross at each.

    Times and bytes are of the measured size next to the plan's largest micro-batch, which the axis says.

    Args:
        plan: whose cuts to draw.
        profile: what it was made from; a plan made in this process knows it.
        ax: where to draw; a new figure by default.

    Raises:
        ArgumentError: there is no profile, or one of another model.
    """
    profile = profile or plan.profile
    if profile is None:
        raise ArgumentError("a plan from a file does not know its profile; pass it: plot_layers(plan, profile)")
    axes = ax if ax is not None else new_axes(5.0)
    costs = layer_costs_of(plan, profile)
    redone = {layer for stage in plan.stages for s in stage.recompute for layer in range(s.first, s.stop)}
    bottom = [0.0] * len(costs)
    unit, scale = time_unit(max(cost.forward_s + cost.backward_s for cost in costs))
    for kind, name, heights in (
        (ActionKind.F, "forward", [cost.forward_s for cost in costs]),
        (ActionKind.R, "recompute", [cost.recompute_s * (cost.layer in redone) for cost in costs]),
        (ActionKind.B, "backward", [cost.backward_s for cost in costs]),
    ):
        if any(heights):
            shown = [seconds * scale for seconds in heights]
            axes.bar(range(len(costs)), shown, 0.9, bottom=bottom, color=ACTION_COLOURS[kind], label=name)
            bottom = [low + height for low, height in zip(bottom, shown, strict=True)]
    title = f"cost of each layer and the cuts of K = {counted(plan.K, 'stage')}"
    crossing = [costs[stage.stop_layer - 1].output_bytes for stage in plan.stages[:-1]]
    is_one = len({*map(bytes_text, crossing)}) == 1 and len(crossing) > MOST_WRITTEN
    axes.set_xlim(-0.5, len(costs) - 0.5)
    written = _draw_cuts(axes, [stage.stop_layer - 0.5 for stage in plan.stages], [] if is_one else crossing)
    of_close = ", the most of close ones" if written < len(crossing) else ""
    on_top = f", what crosses on top{of_close}" if written else ""
    axes.set_xlabel(f"layer; micro-batches of {counted(costs[0].micro_batch_size, 'sample')}; dashed: cuts{on_top}")
    axes.set_ylabel(unit)
    axes.set_title(f"{title}; {bytes_text(crossing[0])} cross at each" if is_one else title, pad=48 if on_top else 6)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _draw_cuts(axes: Axes, ends: list[float], crossing: Sequence[float]) -> int:
    """Dashed lines with what crosses on top; every second stage is grey, so that many cuts are seen as well.

    Returns:
        At how many it is written: at those with the most, and not so close that one text covers another.
    """
    for first, stop in zip(ends[::2], ends[1::2], strict=False):
        axes.axvspan(first, stop, color=ink(axes), alpha=0.08, linewidth=0, zorder=0)
    places = ends[:-1]
    for place in places:
        axes.axvline(place, color=ink(axes), linewidth=1.0 if len(places) <= MOST_WRITTEN else 0.5, linestyle="--")
    size = 8 if len(places) <= MOST_WRITTEN else 7
    apart = LINE_HEIGHT * size / width_pt(axes) * ends[-1]
    written: list[float] = []
    for size_bytes, place in sorted(zip(crossing, places, strict=False), key=lambda pair: -pair[0]):
        if all(abs(place - other) >= apart for other in written):
            written.append(place)
            text, on_top = bytes_text(size_bytes), axes.get_xaxis_transform()
            axes.text(place, 1.01, text, transform=on_top, rotation=90, ha="center", va="bottom", fontsize=size)
    return len(written)


def layer_costs_of(plan: Plan, profile: Profile) -> list[LayerCost]:
    """One cost a layer, of its stage's kind of device and the size next to the plan's.

    Raises:
        ArgumentError: the profile is of another model.
    """
    if len(profile.layers) != plan.stages[-1].stop_layer:
        raise ArgumentError(
            f"the plan has {counted(plan.stages[-1].stop_layer, 'layer')} and the profile "
            f"{len(profile.layers)}; pass the profile that the plan was made from"
        )
    wanted = max(plan.micro_batch_sizes)
    found = []
    for stage in plan.stages:
        for layer in range(stage.first_layer, stage.stop_layer):
            of_layer = [c for c in profile.costs if (c.layer, c.device_kind) == (layer, stage.device.kind)]
            if not of_layer:
                raise ArgumentError(f"the profile has no costs of {stage.device.kind!r}, on which the plan runs")
            found.append(min(of_layer, key=lambda cost: abs(cost.micro_batch_size - wanted)))
    return found


@fits_its_arguments
def plot_balance(plan: Plan, ax: Axes | None = None) -> Axes:
    """Seconds that each stage, or rank with several, computes for one micro-batch, and their mean.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
    """
    axes = ax if ax is not None else new_axes(4.5)
    rows = range(plan.ranks)
    size = max(plan.micro_batch_sizes)
    times = [[stage.times_at(size) for stage in plan.stages_of(rank)] for rank in rows]
    bottom = [0.0] * plan.ranks
    unit, scale = time_unit(max(sum(e.forward_s + e.recompute_s + e.backward_s for e in entries) for entries in times))
    for kind, name in ((ActionKind.F, "forward_s"), (ActionKind.R, "recompute_s"), (ActionKind.B, "backward_s")):
        heights = [sum(getattr(entry, name) for entry in entries) * scale for entries in times]
        if any(heights):
            label = name.removesuffix("_s")
            axes.bar(rows, heights, 0.8, bottom=bottom, color=ACTION_COLOURS[kind], label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    mean = sum(bottom) / len(bottom)
    axes.axhline(mean, color=ink(axes), linestyle="--", label="mean")
    for row in rows if plan.ranks <= MOST_BUSY_TEXTS else ():
        place = max(bottom[row], mean)  # above the line, which would strike the text through
        apart = round(100 * (bottom[row] / mean - 1)) or 0  # no "-0%"
        axes.text(row, place, f"{apart:+d}%" if apart else "0%", ha="center", va="bottom", fontsize=8)
    slowest = max(rows, key=lambda row: bottom[row])
    axes.set_xticks([*some(plan.ranks)])
    axes.set_xlabel(row_kind(plan))
    axes.set_ylabel(f"{unit} for a micro-batch of {counted(size, 'sample')}")
    axes.set_title(
        f"balance: {row_kind(plan)} {slowest} takes {seconds_text(bottom[slowest] / scale)}, "
        f"{bottom[slowest] / mean - 1:.1%} more than the mean"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
