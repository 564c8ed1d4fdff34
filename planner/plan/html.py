"""A plan as notebooks show it: the head of the report, the stages, bars of memory, and the step as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from planner.plan.actions import ActionKind
from planner.plan.bubble import MOST_PASSES
from planner.plan.colours import ACTION_COLOURS, ACTION_NAMES, MEMORY_COLOURS, letters_on
from planner.plan.plan import Plan
from planner.plan.report import headline, stage_rows
from planner.plan.simulator import Event, Timeline, simulate_plan
from planner.plan.timeline import box_texts
from planner.plan.units import WIDTH, bytes_text, seconds_text
from profiler.html import block, paragraph, table
from profiler.text import counted, one_line

PICTURE_WIDTH = 900
"""Units of a picture from left to right; it grows and shrinks with the page."""
MARGIN = 90
"""Units for the names on the left."""
ROW, TALLEST = 22, 700
"""Units of a row, and of all rows together at most [chosen]."""
HEAD = 5
"""Units above the first row, which letters of low rows reach into."""
LETTER = 6.5
"""Units that a letter takes."""
MOST_BARS = 50_000
"""Passes that are drawn on a page; a file of more is slow to open [chosen]."""
FAR_AWAY = 0.1
"""Share of its device's memory below which a bar cannot be read against the limit: then the limit is text [chosen]."""


def plan_html(plan: Plan) -> str:
    """The plan for a notebook."""
    heads, rows = stage_rows(plan)
    size = max(plan.micro_batch_sizes)
    return block(
        *(paragraph(line) for line in headline(plan, WIDTH)),
        table(heads, rows, left=frozenset({"device", "modules"})),
        paragraph(f"seconds of one micro-batch of {counted(size, 'sample')}; memory, and its share of the device's"),
        memory_svg(plan),
        timeline_svg(plan),
    )


def memory_svg(plan: Plan) -> str:
    """One bar a stage, or rank with several: predicted peak bytes by class, and the limit of its device."""
    memories = plan.device_memories
    limits = [plan.stages[index].device.memory_bytes for index in range(len(memories))]
    fullest = max(memory.total for memory in memories)
    limits_fit = fullest >= FAR_AWAY * max(limits)
    longest = max([fullest, *limits]) if limits_fit else fullest
    room = PICTURE_WIDTH - MARGIN - 200
    row = _row_height(len(memories))
    parts = []
    for index, (memory, limit) in enumerate(zip(memories, limits, strict=True)):
        left, top = float(MARGIN), index * row
        parts.append(_text(MARGIN - 6, top + row * 0.65, _lane_name(plan, index), anchor="end") * _named(index, row))
        for name, colour in MEMORY_COLOURS.items():
            size = getattr(memory, name)
            width = room * size / max(1, longest)
            title = f"{name.replace('_', ' ')} {bytes_text(size)}"
            parts.append(_bar(left, top, width, row * 0.8, colour, title) if size else "")
            left += width
        said = f"{bytes_text(memory.total)} of {bytes_text(limit)}, {memory.total / limit:.0%}"
        place = MARGIN + room + 8 if limits_fit else left + 6
        parts.append(_text(place, top + row * 0.65, said) * _named(index, row))
        if limits_fit:
            parts.append(_limit(MARGIN + room * limit / longest, top, row))
    present = [name for name in MEMORY_COLOURS if any(getattr(memory, name) for memory in memories)]
    legend = _legend([(MEMORY_COLOURS[name], name.replace("_", " ")) for name in present], len(memories) * row)
    line = "the line is the device's limit" if limits_fit else "the devices' limits are far beyond the bars"
    heading = paragraph(f"predicted peak memory of each {_lane_kind(plan)}; {line}")
    return heading + _svg([*parts, legend], len(memories) * row + 26, "predicted peak memory")


def timeline_svg(plan: Plan) -> str:
    """The predicted step: one row a stage, or rank with several; letters where there is room for them."""
    passes = plan.K * plan.M * 2
    if passes > min(MOST_BARS, MOST_PASSES):
        return paragraph(f"the step has {passes:,} passes, too many for a page; `autoplan plot` draws it as .png")
    timeline = simulate_plan(plan)
    lanes = [lane for lane in timeline.lanes if not lane.startswith("link")]
    row = _row_height(len(lanes))
    parts = []
    for index, lane in enumerate(lanes):
        parts.append(_text(MARGIN - 6, (index + 0.65) * row, lane, anchor="end") * _named(index, row))
        parts.extend(_passes((event for event in timeline.events if event.lane == lane), timeline, index * row, row))
    bottom = len(lanes) * row
    kinds = [kind for kind in ACTION_NAMES if any(e.action.kind == kind for e in timeline.events if e.lane in lanes)]
    parts.append(_text(PICTURE_WIDTH, bottom + 12, seconds_text(timeline.makespan_s), anchor="end"))
    parts.append(_legend([(ACTION_COLOURS[kind], f"{kind} {ACTION_NAMES[kind]}") for kind in kinds], bottom))
    heading = paragraph(
        f"predicted step before the optimizer, {seconds_text(timeline.makespan_s)}; {_busiest_link(timeline)}"
    )
    return heading + _svg(parts, bottom + 26, "predicted step")


def _passes(events: Iterable[Event], timeline: Timeline, top: float, row: float) -> Iterable[str]:
    """The bars of a lane, one path for each kind, and letters in those that have room."""
    scale = (PICTURE_WIDTH - MARGIN) / timeline.makespan_s
    letters: list[str] = []
    of_kind: dict[ActionKind, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event.action.kind, []).append(event)
    for kind, alike in of_kind.items():
        widths = [(event.end_s - event.start_s) * scale for event in alike]
        boxes = []
        for event, width in zip(alike, widths, strict=True):
            wide = width - (0.6 if width > 2 else 0.0)
            left = MARGIN + event.start_s * scale
            boxes.append(f"M{left:.1f} {top:.1f}h{wide:.1f}v{row * 0.8:.1f}h-{wide:.1f}z")
        yield f'<path fill="{ACTION_COLOURS[kind]}" d="{"".join(boxes)}"/>'
        if row < ROW:
            continue
        ink = letters_on(ACTION_COLOURS[kind])
        for event, width, text in zip(
            alike, widths, box_texts(alike, [width / LETTER for width in widths]), strict=True
        ):
            if text:
                middle = MARGIN + event.start_s * scale + width / 2
                letters.append(_text(middle, top + row * 0.57, text, anchor="middle", fill=ink, size=10))
    yield from letters


def _busiest_link(timeline: Timeline) -> str:
    busy: dict[str, float] = {}
    for lane, events in groupby(timeline.events, key=lambda event: event.lane):
        if lane.startswith("link"):
            busy[lane] = busy.get(lane, 0.0) + sum(event.end_s - event.start_s for event in events)
    if not busy:
        return "nothing is sent"
    lane = max(busy, key=busy.__getitem__)
    return f"the busiest link is {lane.removeprefix('link ')}, {busy[lane] / timeline.makespan_s:.1%} of the time"


def _row_height(rows: int) -> float:
    return min(ROW, TALLEST / rows)


def _named(row: int, height: float) -> bool:
    """Whether a row has its text: all, or as many as have room."""
    return row % max(1, round(14 / height)) == 0


def _lane_kind(plan: Plan) -> str:
    return "rank" if plan.chunks > 1 else "stage"


def _lane_name(plan: Plan, index: int) -> str:
    return f"{_lane_kind(plan)} {index}"


def _svg(parts: Iterable[str], height: float, label: str) -> str:
    shape = f'viewBox="0 {-HEAD} {PICTURE_WIDTH} {height + HEAD:.0f}" role="img" aria-label="{label}"'
    style = f"width:100%;max-width:{PICTURE_WIDTH}px;font:11px sans-serif;color:inherit"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {shape} style="{style}">{"".join(parts)}</svg>'


def _text(
    left: float, base: float, text: str, *, anchor: str = "start", fill: str = "currentColor", size: int = 11
) -> str:
    said = escape(one_line(text))
    return f'<text x="{left:.1f}" y="{base:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{said}</text>'


def _bar(left: float, top: float, width: float, height: float, colour: str, title: str) -> str:
    shape = f'x="{left:.1f}" y="{top:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"'
    return f"<rect {shape}><title>{escape(title)}</title></rect>"


def _limit(left: float, top: float, row: float) -> str:
    ends = f'x1="{left:.1f}" x2="{left:.1f}" y1="{top:.1f}" y2="{top + row * 0.8:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-width="2"/>'


def _legend(entries: Iterable[tuple[str, str]], top: float) -> str:
    parts, left = [], float(MARGIN)
    for colour, name in entries:
        parts += [_bar(left, top + 6, 10, 10, colour, name), _text(left + 14, top + 15, name)]
        left += 26 + LETTER * len(name)
    return "".join(parts)
