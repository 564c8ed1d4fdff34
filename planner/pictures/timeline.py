"""The step as a Gantt chart: as predicted, as measured, or one above the other.

plot_timeline(plan)
plot_timeline(plan, measured=timeline)                      # each stage twice, on one clock
plot_timeline(plan, measured=timeline, predicted=False)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from planner.pictures.canvas import LETTER, MOST_NAMES, legend_beside, new_axes, some, time_unit, width_pt
from planner.plan.actions import COMPUTING, ActionKind
from planner.plan.colours import ACTION_COLOURS, ACTION_NAMES, letters_on
from planner.plan.plan import Plan
from planner.plan.simulator import Event, Timeline, simulate_plan
from planner.plan.timeline import box_texts, lanes_by_place, title_text
from planner.plan.units import seconds_text
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN = 0.45
LABEL_PT = 7
"""Size of the letters in boxes."""
BESIDE_PT = 4.5
"""What a box has beside its letters: 2.5 by which a W is wider than a digit, and 1 on each side [chosen]."""
MOST_LINKED = 12
"""Stages up to which links have rows of their own [chosen]."""
LEAST_BUSY = 0.01
"""Share of the step below which a link says nothing [chosen]."""
LEAST_WIDTH = 1 / 1200
"""Share of the step that a message is drawn with at least, a pixel of the picture."""
MOST_OUTLINED = 200
"""Most boxes of a row that get an outline; with more there is nothing but outlines."""
PALEST = 0.45
"""Share of white in the colour of a rank's last chunk."""


class _Row(NamedTuple):
    lane: str
    timeline: str
    events: list[Event]
    is_link: bool


@fits_its_arguments
def plot_timeline(
    plan: Plan, ax: Axes | None = None, *, measured: Timeline | None = None, predicted: bool = True
) -> Axes:
    """Gantt chart of one step: a row for each stage, or rank with several, and for each direction of links that matter.

    Links have rows up to `MOST_LINKED` stages, if they are busy for a hundredth of the step, and if there is one
    timeline; how busy those are that are not drawn stands below.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
        measured: a step that was measured.
        predicted: whether to draw the predicted step.

    Raises:
        ArgumentError: there is nothing to draw.
    """
    timelines = {"predicted": simulate_plan(plan)} if predicted else {}
    if measured is not None:
        timelines["measured"] = measured
    if not timelines:
        raise ArgumentError("predicted is False and measured is None: nothing is left to draw; give one of them")
    rows, note = _rows(plan, timelines)
    axes = ax if ax is not None else new_axes(1.4 + ROW_IN * len(rows))
    end_s = max(timeline.makespan_s for timeline in timelines.values())
    has_room = len(rows) <= MOST_NAMES
    unit, scale = time_unit(end_s)
    for position, row in enumerate(rows):
        _draw_row(axes, position, row, plan, end_s, scale, has_room=has_room)
    note += _name_rows(axes, rows, len(timelines))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end_s * scale)
    axes.set_xlabel(f"time in {unit}{note}")
    axes.set_title("\n".join([title_text(plan), *(_summary(name, line) for name, line in timelines.items())]))
    present = {event.action.kind for row in rows for event in row.events}
    legend_beside(axes, [(ACTION_COLOURS[kind], _explained(kind)) for kind in ACTION_NAMES if kind in present])
    return axes


def _name_rows(axes: Axes, rows: list[_Row], timelines: int) -> str:
    """Each row its name, or one for both rows of a stage where there are many; then a remark says which is which."""
    if len(rows) <= MOST_NAMES:
        names = [f"{row.lane} {row.timeline}" if timelines > 1 else row.lane for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        return ""
    every = some(len(rows) // timelines, 2 * MOST_NAMES).step * timelines
    named = range(0, len(rows), every)
    places = [position + (timelines - 1) / 2 for position in named]
    axes.set_yticks(places, [rows[position].lane for position in named], fontsize=6)
    return "; of two rows the upper one is predicted, the lower one measured" if timelines > 1 else ""


def _explained(kind: ActionKind) -> str:
    """What a colour means, after the letter that stands in the boxes."""
    return f"{kind}  {ACTION_NAMES[kind]}" if kind in COMPUTING else ACTION_NAMES[kind]


def _summary(name: str, timeline: Timeline) -> str:
    """What is not in a timeline, as the optimizer is not in one that was measured, is not said to take no time."""
    step = f"step {seconds_text(timeline.step_s)}, of it optimizer {seconds_text(timeline.optimizer_s)}"
    passes = f"{seconds_text(timeline.makespan_s)} without the optimizer"
    return f"{name}: {step if timeline.optimizer_s else passes}; bubble {timeline.bubble:.1%}"


def _rows(plan: Plan, timelines: dict[str, Timeline]) -> tuple[list[_Row], str]:
    """What is drawn from top to bottom, and a remark on the links that are not."""
    several = len(timelines) > 1
    lanes = lanes_by_place(next(iter(timelines.values())))
    rows, left_out = [], 0.0
    for lane in lanes:
        is_link = lane.startswith("link")
        for name, timeline in timelines.items():
            events = [event for event in timeline.events if event.lane == lane]
            busy = sum(event.end_s - event.start_s for event in events) / timeline.makespan_s
            if is_link and (several or plan.ranks > MOST_LINKED or busy < LEAST_BUSY):
                left_out = max(left_out, busy)
                continue
            rows.append(_Row(lane, name, events, is_link))
    drawn = sum(row.is_link for row in rows)
    links = sum(lane.startswith("link") for lane in lanes)
    return rows, f"; links that are not drawn are busy for at most {left_out:.1%} of it" if drawn < links else ""


def _draw_row(axes: Axes, position: int, row: _Row, plan: Plan, end_s: float, scale: float, *, has_room: bool) -> None:
    height = 0.4 if row.is_link else 0.8
    least_s = end_s * LEAST_WIDTH if row.is_link else 0.0
    faces = [_paler(ACTION_COLOURS[e.action.kind], e.action.stage // plan.ranks, plan.chunks) for e in row.events]
    axes.broken_barh(
        [(e.start_s * scale, max(e.end_s - e.start_s, least_s) * scale) for e in row.events],
        (position - height / 2, height),
        facecolors=faces,
        edgecolors="white",
        snap=False,  # or narrow boxes are moved to the next pixel, where they hide one another
        linewidth=0.3 if not row.is_link and len(row.events) < MOST_OUTLINED else 0.0,
    )
    if row.is_link or not has_room:
        return
    points_in_a_second = width_pt(axes) / end_s
    for kind in {event.action.kind: None for event in row.events}:
        events = [event for event in row.events if event.action.kind is kind]
        ink = letters_on(ACTION_COLOURS[kind])
        wide_pt = [(event.end_s - event.start_s) * points_in_a_second - BESIDE_PT for event in events]
        room = [one / (LETTER * LABEL_PT) for one in wide_pt]
        for event, label in zip(events, box_texts(events, room), strict=True):
            middle = (event.start_s + event.end_s) / 2 * scale
            axes.text(middle, position, label, ha="center", va="center", fontsize=LABEL_PT, color=ink)


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """The colour for a chunk of a rank: the later, the paler."""
    share = PALEST * chunk / max(1, chunks - 1)
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(part + (1 - part) * share for part in parts)
