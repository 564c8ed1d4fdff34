"""What the pictures share: new axes, names as they are, limits that are drawn where they can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from planner.plan.units import bytes_text
from profiler.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from planner.plan.plan import Plan

WIDTH_IN = 12.0
"""Of a new figure."""
TALLEST_IN = 10.0
"""Of a new figure: what has more rows has lower ones [chosen]."""
FAR_AWAY = 0.1
"""Share of a limit below which what is drawn would be flat under it: then the limit is text [chosen]."""
MOST_NAMES = 34
"""Names that an axis has room for, one below the other [chosen]."""

LETTER = 0.636
"""Width of a digit, as a part of the size of the letters: of DejaVu Sans, which matplotlib brings."""
LAID_OUT = 0.73
"""Part of a new figure's width that axes with a legend beside them have at least [measured: 0.73 to 0.86]."""


def width_pt(axes: Axes) -> float:
    """Width of the axes in points, about: a figure is laid out when it is drawn, and not before."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    own = LAID_OUT if figure.get_layout_engine() is not None else axes.get_position().width
    return 72 * figure.get_figwidth() * own


def ink(axes: Axes) -> Any:
    """The colour of lines that are no data, such as a limit: the words', which are light on dark paper."""
    return axes.xaxis.label.get_color()


def new_axes(height_in: float) -> Axes:
    """Axes of a new figure."""
    from matplotlib import pyplot

    size = (WIDTH_IN, min(TALLEST_IN, height_in))
    axes: Axes = pyplot.subplots(figsize=size, layout="constrained")[1]
    return axes


def plain(name: str) -> str:
    """A name as matplotlib draws it letter for letter: between two dollars it would look for a formula."""
    return one_line(name).replace("$", r"\$")


def some(count: int, most: int = MOST_NAMES) -> range:
    """Positions that get a name: all, or evenly spaced ones."""
    return range(0, count, max(1, -(-count // most)))


def legend_beside(axes: Axes, entries: Iterable[tuple[str, str]]) -> None:
    """A legend to the right of the picture, of colours and what they mean."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for colour, label in entries]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """The unit of an axis, and its bytes."""
    return ("GiB", 2**30) if largest_bytes >= 2**30 else ("MiB", 2**20)


def time_unit(largest_s: float) -> tuple[str, float]:
    """The unit of an axis of seconds, and how many of them a second has."""
    return next((unit for unit in (("s", 1.0), ("ms", 1e3)) if largest_s * unit[1] >= 1), ("us", 1e6))


def row_kind(plan: Plan) -> str:
    """What a row of a picture is: a stage, or a rank with several."""
    return "rank" if plan.chunks > 1 else "stage"


def limits_of(plan: Plan) -> list[int]:
    """Bytes of the device of each row."""
    return [stage.device.memory_bytes for stage in plan.stages[: len(plan.device_memories)]]


def limits_text(limits: Sequence[int]) -> str:
    """The limits in words, where no line for them is drawn."""
    least, most = min(limits), max(limits)
    each = bytes_text(least) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
    return f"limit of each device: {each}, far above"
