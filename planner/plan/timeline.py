"""Pictures of a plan: the Gantt chart of a step, the memory of each stage, and a trace that opens in Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.plan.actions import Action, ActionKind
from planner.plan.plan import Plan
from planner.plan.simulator import Event, Timeline, simulate_plan
from planner.plan.stage import StageMemory
from planner.plan.units import seconds_text
from profiler.text import one_line
from profiler.value import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour: TypeAlias = tuple[float, float, float, float]
_NAMES = {
    ActionKind.F: "forward",
    ActionKind.R: "recompute",
    ActionKind.B: "backward",
    ActionKind.I: "backward, of inputs",
    ActionKind.W: "backward, of parameters",
    ActionKind.SEND_F: "send outputs",
    ActionKind.SEND_B: "send gradients",
}
_COLOURS = {
    ActionKind.F: 0,
    ActionKind.R: 4,
    ActionKind.B: 2,
    ActionKind.I: 2,
    ActionKind.W: 8,
    ActionKind.SEND_F: 1,
    ActionKind.SEND_B: 3,
}
"""Positions in matplotlib's qualitative colormap `tab20`, where light follows dark."""
_SPLIT = frozenset({ActionKind.I, ActionKind.W})
"""Kinds whose bars say which they are."""
_LABEL_SHARE = 0.008
"""Share of the step that a bar must take for each character of its label to have room for it."""
PALEST = 0.45
"""Share of white in the colour of a rank's last chunk."""
_MOST_OUTLINED = 200
"""Most bars of a lane that get an outline; with more there is nothing but outlines."""


def plot_timeline(plan: Plan, ax: Axes | None = None) -> Axes:
    """Gantt chart of one step: a lane for each stage, or rank with several, and each direction of each link.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    timeline = simulate_plan(plan)
    lanes = _lanes_by_place(timeline)
    axes = ax if ax is not None else _new_axes(height=1.2 + 0.45 * len(lanes))
    palette = colormaps["tab20"]
    colours = {
        kind: palette(2 * position + (kind in {ActionKind.SEND_F, ActionKind.SEND_B}))
        for kind, position in _COLOURS.items()
    }
    for row, lane in enumerate(lanes):
        events = [event for event in timeline.events if event.lane == lane]
        is_stage = not lane.startswith("link")
        height = 0.8 if is_stage else 0.4
        faces = [_paler(colours[event.action.kind], event.action.stage // plan.ranks, plan.chunks) for event in events]
        axes.broken_barh(
            [(event.start_s * 1e3, (event.end_s - event.start_s) * 1e3) for event in events],
            (row - height / 2, height),
            facecolors=faces,
            edgecolors="white" if is_stage else faces,  # an edge of its own colour keeps a short transfer visible
            linewidth=0.3 if len(events) < _MOST_OUTLINED else 0.0,
        )
        if is_stage:
            _label_bars(axes, row, events, timeline.makespan_s)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan_s * 1e3)
    axes.set_xlabel("time in ms")
    axes.set_title(
        f"{_order_text(plan)}: step {seconds_text(timeline.step_s)}, "
        f"of it optimizer {seconds_text(timeline.optimizer_s)}; bubble {timeline.bubble:.1%}"
    )
    shown = [kind for kind in _NAMES if any(event.action.kind == kind for event in timeline.events)]
    axes.legend(
        handles=[Patch(color=colours[kind], label=_NAMES[kind]) for kind in shown],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def plot_memory(plan: Plan, ax: Axes | None = None) -> Axes:
    """Predicted peak memory of each stage, or rank with several, by class, stacked, with the device's limit as a line.

    Args:
        plan: what to draw.
        ax: where to draw; a new figure by default.
    """
    from matplotlib import colormaps

    axes = ax if ax is not None else _new_axes(height=4.0)
    palette = colormaps["tab10"]
    memories = plan.device_memories
    devices = [stage.device for stage in plan.stages[: len(memories)]]
    bottom = [0.0] * len(memories)
    largest = max([memory.total for memory in memories] + [device.memory_bytes for device in devices])
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    for position, name in enumerate(StageMemory.model_fields):
        heights = [getattr(memory, name) / scale for memory in memories]
        if any(heights):
            label = name.replace("_", " ")
            axes.bar(range(len(memories)), heights, 0.7, bottom=bottom, color=palette(position), label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limits = [device.memory_bytes / scale for device in devices]
    stages = range(len(memories))
    axes.hlines(
        limits, [k - 0.42 for k in stages], [k + 0.42 for k in stages], colors="black", linestyles="--", label="device"
    )
    kind = "rank" if plan.chunks > 1 else "stage"
    axes.set_xticks(stages, [f"{kind} {k}\n{_plain(device.name)}" for k, device in enumerate(devices)])
    axes.set_ylim(0, 1.08 * max([*bottom, *limits]))
    axes.set_ylabel(unit)
    axes.set_title(f"predicted peak memory, K = {plan.K}, M = {plan.M}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save_timeline_json(plan: Plan, path: str | Path, timeline: Timeline | None = None) -> None:
    """Write one step as Chrome Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    One thread for each stage and link; arrows lead from the computation through the transfer to what waits for it.

    Args:
        plan: the plan.
        path: of the file.
        timeline: of a step that was measured; by default the one that the plan predicts.
    """
    timeline = simulate_plan(plan) if timeline is None else timeline
    threads = {lane: number for number, lane in enumerate(_lanes_by_place(timeline))}
    records: list[dict[str, Any]] = [_metadata("process_name", 0, _order_text(plan))]
    for lane, thread in threads.items():
        records.append(_metadata("thread_name", thread, lane))
        records.append(_metadata("thread_sort_index", thread, thread))
    records.extend(_slice(event, threads[event.lane]) for event in timeline.events)
    records.extend(_arrows(timeline, threads))
    text = json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, allow_nan=False, indent=0) + "\n"
    write_atomically(path, text)


def _order_text(plan: Plan) -> str:
    chunks = f", {plan.chunks} chunks a rank" if plan.chunks > 1 else ""
    return f"{plan.schedule}, K = {plan.K}, M = {plan.M}{chunks}"


def _paler(colour: Colour, chunk: int, chunks: int) -> Colour:
    """The colour for a chunk of a rank: the later, the paler."""
    share = PALEST * chunk / max(1, chunks - 1)
    red, green, blue, alpha = colour
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share, alpha)


def _plain(name: str) -> str:
    """A name as matplotlib draws it letter for letter: between two dollars it would look for a formula."""
    return one_line(name).replace("$", r"\$")


def _new_axes(*, height: float) -> Axes:
    from matplotlib import pyplot

    axes: Axes = pyplot.subplots(figsize=(12, height), layout="constrained")[1]
    return axes


def _lanes_by_place(timeline: Timeline) -> list[str]:
    """Lanes from the first device to the last, each link below the stage that sends first."""
    return sorted(timeline.lanes, key=_place)


def _place(lane: str) -> tuple[float, str]:
    kind, where = lane.split(" ")
    if kind != "link":
        return float(where), lane
    first, second = (int(stage) for stage in where.split(">"))
    return (first + second) / 2 + (0.1 if first > second else 0.0), lane


def _label_bars(axes: Axes, row: int, events: list[Event], makespan_s: float) -> None:
    for event in events:
        action = event.action
        label = f"{action.kind if action.kind in _SPLIT else ''}{action.micro_batch}"
        seconds = event.end_s - event.start_s
        if seconds >= _LABEL_SHARE * len(label) * makespan_s:
            middle_ms = (event.start_s + seconds / 2) * 1e3
            axes.text(middle_ms, row, label, ha="center", va="center", fontsize=7, color="white")


def _metadata(name: str, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name == "thread_sort_index" else "name"
    return {"ph": "M", "pid": 0, "tid": thread, "name": name, "args": {key: value}}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    start_us = event.start_s * 1e6
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": str(event.action),
        "cat": _NAMES[event.action.kind],
        "ts": start_us,
        "dur": max(0.0, event.end_s * 1e6 - start_us),
        "args": {"stage": event.action.stage, "micro_batch": event.action.micro_batch},
    }


def _arrows(timeline: Timeline, threads: dict[str, int]) -> list[dict[str, Any]]:
    """Two arrows a transfer: from what made the message to the link, and on to what reads it."""
    events = {event.action: event for event in timeline.events}
    records: list[dict[str, Any]] = []
    for send in timeline.events:
        if send.action.kind not in {ActionKind.SEND_F, ActionKind.SEND_B}:
            continue
        kinds = (ActionKind.F,) if send.action.kind is ActionKind.SEND_F else (ActionKind.B, ActionKind.I)
        maker, reader = (
            next(event for kind in kinds if (event := events.get(Action(stage, kind, send.action.micro_batch))))
            for stage in (send.action.stage, send.action.other_end.stage)
        )
        for source, target in ((maker, send), (send, reader)):
            number = len(records) // 2
            shared = {"pid": 0, "cat": "transfer", "name": str(send.action), "id": number}
            records.append({**shared, "ph": "s", "tid": threads[source.lane], "ts": source.start_s * 1e6})
            records.append({**shared, "ph": "f", "bp": "e", "tid": threads[target.lane], "ts": target.start_s * 1e6})
    return records
