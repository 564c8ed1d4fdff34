"""What a plan predicted, compared with what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from executor.measure.action_times import TimedAction, TimedStep
from planner.plan.actions import COMPUTING, Action, ActionKind
from planner.plan.plan import Plan
from planner.plan.schedules import Ring
from planner.plan.simulator import Event, Timeline, simulate_plan
from profiler.machine.backend import backend_of

if TYPE_CHECKING:
    import pandas

_PASSES = {
    "forward_s": (ActionKind.F,),
    "recompute_s": (ActionKind.R,),
    "backward_s": (ActionKind.B, ActionKind.I, ActionKind.W),
    "weight_s": (ActionKind.W,),
}
"""Passes whose seconds are those of a field of `StageTimes`."""
_TRANSFERS = {ActionKind.SEND_F: "send_forward_s", ActionKind.SEND_B: "send_backward_s"}
WAITED_S = 200e-6
"""A receive that waited longer found its message not there yet: it arrived at the end of the wait. One whose message is
there takes 5 to 100 us [measured]."""
WAITED_SHARE = 0.1
"""A wait is at least this share of the time since the message was sent; shorter ones are interruptions [chosen]."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one process knows of its last steps.

    Attributes:
        steps: oldest first.
        offset_s: to be added to its clock to get that of process 0.
        peak_bytes: at the worst moment of the step whose memory was watched; 0 if none was.
        stages: that it runs.
    """

    steps: tuple[TimedStep, ...]
    offset_s: float
    peak_bytes: int
    stages: tuple[int, ...]


def real_timelines(plan: Plan, processes: Sequence[Recorded]) -> list[Timeline]:
    """The last steps of one replica as timelines, with the lanes of the predicted one.

    A transfer ends where its receiver, waiting, had it; one that nobody waited for ends after the median time of the
    others on its link, or where it was received if that was earlier.

    Args:
        plan: the plan.
        processes: of one replica.
    """
    numbers = set.intersection(*({step.number for step in process.steps} for process in processes))
    return [_timeline(plan, _on_one_clock(processes, number)) for number in sorted(numbers)]


def _on_one_clock(processes: Sequence[Recorded], number: int) -> dict[Action, tuple[float, float]]:
    """Start and end of each action of a step, in seconds since the first process began it."""
    steps = [(process, step) for process in processes for step in process.steps if step.number == number]
    zero_s = min(step.began_s + process.offset_s for process, step in steps)
    return {
        timed.action: (
            timed.start_s + step.began_s + process.offset_s - zero_s,
            timed.end_s + step.began_s + process.offset_s - zero_s,
        )
        for process, step in steps
        for timed in step.actions
    }


def _timeline(plan: Plan, spans: Mapping[Action, tuple[float, float]]) -> Timeline:
    computed = [action for action in spans if action.kind in COMPUTING]
    ring = plan.ring
    kind = "rank" if plan.chunks > 1 else "stage"
    events = [
        Event(f"{kind} {ring.rank_of(action.stage)}", action, *spans[action])
        for action in sorted(computed, key=spans.__getitem__)
    ]
    makespan_s = max(end_s for _, end_s in spans.values())
    busy_s = [0.0] * ring.ranks
    for event in events:
        busy_s[ring.rank_of(event.action.stage)] += event.end_s - event.start_s
    lanes = sorted(events, key=lambda event: ring.rank_of(event.action.stage))
    return Timeline(
        events=(*lanes, *_transfers(spans, ring)),
        makespan_s=makespan_s,
        idle_s=tuple(max(0.0, makespan_s - busy) for busy in busy_s),
    )


def _transfers(spans: Mapping[Action, tuple[float, float]], ring: Ring) -> list[Event]:
    """The transfers on each link between the lists of actions, in the order in which they were sent.

    What a rank hands to its own next chunk crosses none.
    """
    events: list[Event] = []
    by_link: dict[tuple[int, int], list[Action]] = {}
    for action in sorted(spans, key=spans.__getitem__):
        if action.kind in _TRANSFERS:
            ends = ring.rank_of(action.stage), ring.rank_of(action.other_end.stage)
            if ends[0] != ends[1]:
                by_link.setdefault(ends, []).append(action)
    for (sender, receiver), sends in sorted(by_link.items()):
        lane = f"link {sender}>{receiver}"
        awaited: list[float] = []
        free_s = 0.0
        spent: list[tuple[Action, float, float, bool]] = []
        for send in sends:
            begun_s, ended_s = spans[send.other_end]
            start_s = max(spans[send][0], free_s)
            end_s = max(start_s, ended_s)
            waited = ended_s - begun_s > max(WAITED_S, WAITED_SHARE * (end_s - start_s))
            spent.append((send, start_s, end_s, waited))
            if waited:
                free_s = end_s
                awaited.append(end_s - start_s)
        usual_s = median(awaited) if awaited else 0.0
        for send, start_s, end_s, waited in spent:
            events.append(Event(lane, send, start_s, end_s if waited else min(end_s, start_s + usual_s)))
    return events


def measured_frame(plan: Plan, processes: Sequence[Recorded]) -> pandas.DataFrame:
    """Predicted and measured, a row for each stage and quantity.

    Args:
        plan: the plan.
        processes: of one replica.

    Returns:
        Columns `stage` (-1 for all), `what`, `predicted`, `measured` and their `ratio`. Seconds (`what` ends in `_s`)
        of passes and transfers are means over the micro-batches; everything measured is a median over the last steps.
        A transfer is measured where its receiver waited for it; `skip_to_3_send_forward_s` is one that goes past
        stages to stage 3. `peak_bytes` holds neither the optimizer's state nor
        the reserve on CPU, not the reserve on CUDA; it is measured if `Pipeline.watch_memory` saw a step.
    """
    import pandas

    nan = float("nan")
    timelines = real_timelines(plan, processes)
    predicted = simulate_plan(plan)
    rows: list[tuple[int, str, float, float]] = [
        (-1, "makespan_s", predicted.makespan_s, median(t.makespan_s for t in timelines) if timelines else nan)
    ]
    actions = [step.actions for process in processes for step in process.steps]
    for index, stage in enumerate(plan.stages):
        for field, kinds in _PASSES.items():
            seconds = _pass_seconds(index, kinds, actions)
            if field != "weight_s" or seconds is not None:
                rows.append((index, field, _predicted(plan, index, field), 0.0 if seconds is None else seconds))
        if index < len(predicted.idle_s):  # where ranks have several chunks, in the row of the first
            idle_s = median(timeline.idle_s[index] for timeline in timelines) if timelines else nan
            rows.append((index, "idle_s", predicted.idle_s[index], idle_s))
        for kind, field in _TRANSFERS.items():
            seconds = _transfer_s(timelines, index, kind, None)
            if seconds is not None:
                rows.append((index, field, _predicted(plan, index, field), seconds))
        rows.extend(_skip_rows(plan, index, timelines))
        for process in processes:
            if index in process.stages and index < len(plan.device_memories):
                expected = plan.device_memories[index]
                memory = expected.total - expected.reserve
                if backend_of(stage.device.name).is_host:
                    memory -= expected.optimizer
                is_whole = len(process.stages) == plan.chunks
                peak = float(process.peak_bytes) if process.peak_bytes and is_whole else nan
                rows.append((index, "peak_bytes", float(memory), peak))
    frame = pandas.DataFrame(rows, columns=["stage", "what", "predicted", "measured"])
    frame["ratio"] = frame["measured"] / frame["predicted"]
    return frame


def _skip_rows(plan: Plan, stage: int, timelines: Sequence[Timeline]) -> list[tuple[int, str, float, float]]:
    """What a stage sends past others."""
    rows = []
    for skip in plan.skips:
        for kind, field, ends in (
            (ActionKind.SEND_F, "send_forward_s", skip.ends),
            (ActionKind.SEND_B, "send_backward_s", skip.ends[::-1]),
        ):
            seconds = _transfer_s(timelines, stage, kind, ends[1]) if ends[0] == stage else None
            if seconds is not None:
                predicted = fmean(getattr(skip.times_at(size), field) for size in plan.micro_batch_sizes)
                rows.append((stage, f"skip_to_{ends[1]}_{field}", predicted, seconds))
    return rows


def _transfer_s(timelines: Sequence[Timeline], stage: int, kind: ActionKind, peer: int | None) -> float | None:
    """Median over the steps and micro-batches; no number if nobody waited for one, None if there was none."""
    lasted = [
        event.end_s - event.start_s
        for timeline in timelines
        for event in timeline.events
        if (event.action.stage, event.action.kind, event.action.peer) == (stage, kind, peer)
    ]
    awaited = [seconds for seconds in lasted if seconds > 0]
    if not lasted:
        return None
    return median(awaited) if awaited else float("nan")


def _predicted(plan: Plan, stage: int, field: str) -> float:
    """Mean over the micro-batches."""
    return fmean(getattr(plan.stages[stage].times_at(size), field) for size in plan.micro_batch_sizes)


def _pass_seconds(stage: int, kinds: Sequence[ActionKind], steps: Sequence[Sequence[TimedAction]]) -> float | None:
    """Sum of these passes, mean over the micro-batches, median over the steps; None if there was none of them."""
    means = []
    for actions in steps:
        passes = [timed for timed in actions if timed.action.stage == stage and timed.action.kind in kinds]
        if passes:
            micro_batches = {timed.action.micro_batch for timed in passes}
            means.append(sum(timed.duration_s for timed in passes) / len(micro_batches))
    return median(means) if means else None
