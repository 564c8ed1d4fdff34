"""Choices between plans, from a frame of `what_if`: step time against memory, and against one thing that varies.

frame = what_if(profile, devices, {"stages": [2, 4, 8], "schedule": ["gpipe", "1f1b"]}, batch_size=64)
plot_frontier(frame)
plot_sensitivity(what_if(profile, devices, {"link_bytes_per_s": [1e9, 1e10]}, batch_size=64), "link_bytes_per_s")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.pictures.canvas import LETTER, byte_unit, ink, new_axes, time_unit, width_pt
from planner.plan.units import bytes_text
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas
    from matplotlib.axes import Axes

MOST_TEXTS: Final = 12
"""Plans of the frontier that say what they are; of more every second, third and so on [chosen]."""
TEXT_PT, TEXT_HEIGHT_PT = 8.0, 10.0
"""Size of what a plan is called, and what its line takes, in points."""
CASE_PT = 8
"""Size of what stands below the axis for each case."""
MARKS: Final = "osD^vPX*<>"
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
_COLUMNS: Final = ("step_s", "largest_memory_bytes", "schedule", "K", "M")


@fits_its_arguments
def plot_frontier(frame: pandas.DataFrame, ax: Axes | None = None) -> Axes:
    """Each plan a point, step time against memory of its fullest device; a line joins those that none beats in both.

    Args:
        frame: as `what_if` returns it.
        ax: where to draw; a new figure by default.

    Raises:
        ArgumentError: the frame has no plan.
    """
    plans = _plans(frame)
    axes = ax if ax is not None else new_axes(5.0)
    unit, scale = byte_unit(plans["largest_memory_bytes"].max())
    unit_of_time, in_a_second = time_unit(plans["step_s"].max())
    for position, (schedule, rows) in enumerate(plans.groupby("schedule", sort=True)):
        axes.plot(
            rows["largest_memory_bytes"] / scale,
            rows["step_s"] * in_a_second,
            MARKS[position % len(MARKS)],
            color=COLOURS[position % len(COLOURS)],
            label=one_line(str(schedule)),
        )
    ordered = plans.sort_values(["largest_memory_bytes", "step_s"])
    best = ordered[ordered["step_s"] < ordered["step_s"].cummin().shift(fill_value=float("inf"))]
    places = best["largest_memory_bytes"] / scale, best["step_s"] * in_a_second
    axes.plot(*places, "--", color=ink(axes), drawstyle="steps-post", linewidth=1, zorder=0)
    _spread_out(axes.set_xscale, plans["largest_memory_bytes"])
    _spread_out(axes.set_yscale, plans["step_s"])
    axes.margins(x=0.12, y=0.15)
    texts = [f"K {k:.0f}, M {m:.0f}" for k, m in zip(best["K"], best["M"], strict=True)]
    _write_apart(axes, list(zip(*places, texts, strict=True)))
    axes.set_xlabel(f"predicted memory of the fullest device in {unit}")
    axes.set_ylabel(f"predicted step in {unit_of_time}")
    axes.set_title(f"{len(plans)} plans; the line joins the {len(best)} that no other beats in both")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


@fits_its_arguments
def plot_sensitivity(frame: pandas.DataFrame, by: str, ax: Axes | None = None) -> Axes:
    """Samples a second against one thing that varies, such as bandwidth, memory, batch or devices.

    Cases without a plan are crosses at zero. Each point says its K and M.

    Args:
        frame: as `what_if` returns it, with nothing else varied.
        by: the column that varies.
        ax: where to draw; a new figure by default.

    Raises:
        ArgumentError: the frame has no such column, or no plan.
    """
    if by not in frame.columns:
        raise ArgumentError(f"the frame has no column {by!r}; it has {', '.join(map(str, frame.columns))}")
    plans = _plans(frame)
    axes = ax if ax is not None else new_axes(4.5)
    axes.plot(plans[by], plans["samples_per_s"], "o-", color=COLOURS[0], label="planned")
    without = frame[frame["step_s"].isna()]
    if len(without):
        axes.plot(without[by], [0.0] * len(without), "x", color=COLOURS[3], label="no plan fits")
    values = frame[by].astype(float)
    _spread_out(axes.set_xscale, values)
    if len({*values}) <= MOST_TEXTS:  # the cases themselves, and not powers of ten between them
        cases = sorted({*values})
        axes.set_xticks(cases, [""] * len(cases))
        axes.minorticks_off()
    axes.set_ylim(bottom=0 if len(without) == 0 else -0.03 * plans["samples_per_s"].max())
    axes.margins(x=0.08, y=0.12)
    if len({*values}) <= MOST_TEXTS:
        axes.set_xticks(cases, _apart_along(axes, cases, [_case_text(by, value) for value in cases]), fontsize=CASE_PT)
    texts = [f"K {k:.0f}, M {m:.0f}" for k, m in zip(plans["K"], plans["M"], strict=True)]
    _write_apart(axes, sorted(zip(plans[by], plans["samples_per_s"], texts, strict=True)))
    axes.set_xlabel(_with_unit(by))
    axes.set_ylabel("predicted samples a second")
    if len(without):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _spread_out(set_scale: Callable[[str], None], values: pandas.Series) -> None:
    """A logarithmic axis where the largest value is ten times the least or more."""
    if values.min() > 0 and values.max() >= 10 * values.min():
        set_scale("log")


def _write_apart(axes: Axes, texts: Sequence[tuple[float, float, str]]) -> None:
    """Texts below their points, but for those that would hide an earlier one."""
    axes.autoscale_view()
    taken: list[tuple[float, float, float]] = []
    points = width_pt(axes) / axes.bbox.width
    for x, y, text in texts:
        left, bottom = (float(pixels) * points for pixels in axes.transData.transform((x, y)))
        right = left + LETTER * TEXT_PT * (len(text) + 1)
        if all(left > end or right < start or abs(bottom - other) > TEXT_HEIGHT_PT for start, end, other in taken):
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, -11), fontsize=TEXT_PT)
            taken.append((left, right, bottom))


def _apart_along(axes: Axes, places: Sequence[float], texts: Sequence[str]) -> list[str]:
    """Texts below an axis, each on the first line on which it does not touch the one before."""
    axes.autoscale_view()
    points = width_pt(axes) / axes.bbox.width
    found: list[str] = []
    ends_pt: list[float] = []  # of the lines so far
    for place, text in zip(places, texts, strict=True):
        middle_pt = float(axes.transData.transform((place, 0.0))[0]) * points
        half_pt = LETTER * CASE_PT * (len(text) + 1) / 2
        free = (number for number, end_pt in enumerate(ends_pt) if middle_pt - half_pt >= end_pt)
        line = next(free, len(ends_pt))
        ends_pt[line : line + 1] = [middle_pt + half_pt]
        found.append("\n" * line + text)
    return found


def _case_text(column: str, value: float) -> str:
    """A case below the axis, with its unit where the column has one."""
    if column.endswith("_bytes_per_s"):
        return f"{bytes_text(value)}/s"
    return bytes_text(value) if column == "memory_limit" or column.endswith("_bytes") else f"{value:g}"


def _with_unit(column: str) -> str:
    for ending, words in (("_bytes_per_s", "bandwidth of the {}"), ("_bytes", "{}"), ("_s", "{} in s")):
        if column.endswith(ending):
            return words.format(column.removesuffix(ending).replace("_", " "))
    return column.replace("_", " ")


def _plans(frame: pandas.DataFrame) -> pandas.DataFrame:
    missing = [name for name in _COLUMNS if name not in frame.columns]
    if missing:
        raise ArgumentError(f"the frame has no column {missing[0]!r}; pass one of what_if with a plan in it")
    return frame[frame["step_s"].notna()]
