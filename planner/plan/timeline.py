"""A step as a trace that opens in Perfetto, and how its lanes are ordered and named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.plan.actions import Action, ActionKind
from planner.plan.colours import ACTION_NAMES
from planner.plan.plan import Plan
from planner.plan.simulator import Event, Timeline, simulate_plan
from profiler.value import write_atomically


def save_timeline_json(plan: Plan, path: str | Path, timeline: Timeline | None = None) -> None:
    """Write one step as Chrome Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    One thread for each stage and link; arrows lead from the computation through the transfer to what waits for it.

    Args:
        plan: the plan.
        path: of the file.
        timeline: of a step that was measured; by default the one that the plan predicts.
    """
    timeline = simulate_plan(plan) if timeline is None else timeline
    threads = {lane: number for number, lane in enumerate(lanes_by_place(timeline))}
    records: list[dict[str, Any]] = [_metadata("process_name", 0, title_text(plan))]
    for lane, thread in threads.items():
        records.append(_metadata("thread_name", thread, lane))
        records.append(_metadata("thread_sort_index", thread, thread))
    records.extend(_slice(event, threads[event.lane]) for event in timeline.events)
    records.extend(_arrows(timeline, threads))
    text = json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, allow_nan=False, indent=0) + "\n"
    write_atomically(path, text)


def title_text(plan: Plan) -> str:
    """Schedule, K and M in a line."""
    chunks = f", {plan.chunks} chunks a rank" if plan.chunks > 1 else ""
    return f"{plan.schedule}, K = {plan.K}, M = {plan.M}{chunks}"


def lanes_by_place(timeline: Timeline) -> list[str]:
    """Lanes from the first device to the last, each link below the stage that sends first."""
    return sorted(timeline.lanes, key=_place)


def box_texts(events: Sequence[Event], letters: Sequence[float]) -> list[str]:
    """What stands in boxes of one kind: letter and micro-batch if all have room, else the letter where there is room.

    Args:
        events: of a lane and kind.
        letters: how many each box has room for.
    """
    whole = [f"{event.action.kind}{event.action.micro_batch}" for event in events]
    if all(len(text) <= room for text, room in zip(whole, letters, strict=True)):
        return whole
    return [str(event.action.kind) if room >= 1 else "" for event, room in zip(events, letters, strict=True)]


def _place(lane: str) -> tuple[float, str]:
    kind, where = lane.split(" ")
    if kind != "link":
        return float(where), lane
    first, second = (int(stage) for stage in where.split(">"))
    return (first + second) / 2 + (0.1 if first > second else 0.0), lane


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
        "cat": ACTION_NAMES[event.action.kind],
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
