"""Why a plan is as it is, and what others would take: data frames from predictions, without measuring.

plan.explain(profile)                                           # why these cuts
plan.compare(other)
what_if(profile, cluster, {"stages": [2, 4], "link_bytes_per_s": [1e9, 12e9]}, batch_size=64)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas

from planner.cost.layer_costs import Indices
from planner.cost.ledger import classes_that_count
from planner.cost.ledger_rows import Counts
from planner.keywords import SettingKeywords
from planner.plan.actions import ActionKind
from planner.plan.explanation import Explanation
from planner.plan.plan import Plan
from planner.plan.simulator import Durations, Timeline, simulate_plan
from planner.planned_for import own_positions, problem_of, refuse_other_links
from planner.sentences import sentences_on
from profiler.arguments import fits_its_arguments
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, InfeasibleError
from profiler.record import Profile

if TYPE_CHECKING:
    from typing import Unpack

    from planner.solve.problem import Problem

MOST_PINNED = 12
"""Stages on unlike devices up to which each stays on its own when a cut moves; with more, the best order counts."""
CLOSE = 1e-9
"""Relative difference below which two times count as equal."""


def explain(
    plan: Plan, profile: Profile | None = None, devices: Cluster | Sequence[Device] | None = None
) -> Explanation:
    """Three sentences, and one row a stage: what it is busy with, whether it holds up the others, and its limits.

    Args:
        plan: what to explain.
        profile: what the plan was made from, which a plan made in this process knows itself. With it two columns say
            what the step would take with the cut after the stage one layer earlier or later, its best recompute
            included (missing where that does not fit), and a sentence what would help most: twice the memory,
            bandwidth or batch, or a device more, each of which is planned for `planner.sentences.SEARCH_S`.
        devices: what the plan was made for, where a `Cluster` had other links than the profile; a plan made in this
            process knows that itself.

    Returns:
        `sentences`, and columns: `forward_s`, `backward_s` (recompute included), both with what the stage copies of
        messages, and the longest transfers from the stage, without what their ends copy, for the largest micro-batch;
        `bottleneck`, whether the stage or its link takes the longest of all in
        `"forward"`, `"backward"`, `"both"` or `""`; `busy`, the share of the time before the optimizer that it
        computes, and `memory_share` of its device, both with all chunks of its rank; `recomputed_layers`;
        `memory_binds`, whether its memory costs time: it recomputes, or (with the profile) has no room for one layer
        more of a neighbour's; `cut_earlier_s` and `cut_later_s`, seconds of the step.

    Raises:
        ForeignPlanError: the profile is not the plan's, or the devices or their links are not.
        ArgumentError: by the profile's link the plan takes another time than it says, and no devices are given.
    """
    profile = plan.profile if profile is None else profile
    problem = None if profile is None else problem_of(plan, profile, devices)
    if problem is not None:
        refuse_other_links(plan, problem, devices)
    timeline = simulate_plan(plan)
    size = max(plan.micro_batch_sizes)
    durations, largest = Durations.of(plan), plan.micro_batch_sizes.index(size)
    rows = [_row(plan, durations, index, largest) for index in range(plan.K)]
    frame = pandas.DataFrame(rows).rename_axis("stage")
    forward = frame[["forward_s", "send_forward_s"]].max(axis=1)
    backward = frame["backward_s"].combine(frame["send_backward_s"], max)
    slow = [
        (one >= forward.max() * (1 - CLOSE), other >= backward.max() * (1 - CLOSE))
        for one, other in zip(forward, backward, strict=True)
    ]
    names = {(True, True): "both", (True, False): "forward", (False, True): "backward", (False, False): ""}
    frame.insert(3, "bottleneck", [names[bool(one), bool(other)] for one, other in slow])
    ranks = [plan.ring.rank_of(stage) for stage in range(plan.K)]
    frame["busy"] = [1 - timeline.idle_s[rank] / timeline.makespan_s for rank in ranks]
    shares = _memory_shares(plan)
    frame["memory_share"] = [shares[rank] for rank in ranks]
    frame["memory_binds"] = frame["recomputed_layers"] > 0
    if problem is not None:
        cuts = [stage.stop_layer for stage in plan.stages[:-1]]
        for column, step in (("cut_earlier_s", -1), ("cut_later_s", +1)):
            moved = [_with_cuts_s(plan, problem, [*cuts[:k], cuts[k] + step, *cuts[k + 1 :]]) for k in range(len(cuts))]
            frame[column] = [*moved, float("nan")]
        frame["memory_binds"] |= pandas.Series(_full(plan, frame))
    explanation = Explanation(frame)
    explanation.sentences = sentences_on(plan, frame, problem)
    return explanation


def _memory_shares(plan: Plan) -> list[float]:
    """What share of its device each stage fills, or each rank that has several."""
    return [memory.total / plan.stages[index].device.memory_bytes for index, memory in enumerate(plan.device_memories)]


def _full(plan: Plan, frame: pandas.DataFrame) -> list[bool]:
    """For each stage whether a neighbour has a layer to spare that it has no room for."""
    spare = [stage.stop_layer - stage.first_layer > 1 for stage in plan.stages]
    later, earlier = frame["cut_later_s"].isna(), frame["cut_earlier_s"].isna()
    return [
        bool((k + 1 < plan.K and spare[k + 1] and later[k]) or (k > 0 and spare[k - 1] and earlier[k - 1]))
        for k in range(plan.K)
    ]


def _row(plan: Plan, durations: Durations, index: int, largest: int) -> dict[str, Any]:
    """A stage with one of the largest micro-batches."""
    stage = plan.stages[index]
    skips = durations.skips.items()
    ahead = [outputs[largest] for (sender, _), (outputs, _) in skips if sender == index]
    back = [gradients[largest] for (_, receiver), (_, gradients) in skips if receiver == index]
    return {
        "first_layer": stage.first_layer,
        "stop_layer": stage.stop_layer,
        "device": stage.device.name,
        "forward_s": durations.forward_s[index][largest],
        "backward_s": durations.backward_s[index][largest] + durations.recompute_s[index][largest],
        "send_forward_s": max(durations.send_forward_s[index][largest], *ahead, 0.0),
        "send_backward_s": max(durations.send_backward_s[index][largest], *back, 0.0),
        "recomputed_layers": sum(segment.stop - segment.first for segment in stage.recompute),
    }


def _with_cuts_s(plan: Plan, problem: Problem, cuts: Sequence[int]) -> float:
    """Seconds of the step with these cuts on the plan's devices; not a number when they do not fit."""
    from planner.solve.host_search import best_in_order

    places = [0, *cuts, problem.layers]
    if any(stop <= first for first, stop in itertools.pairwise(places)):
        return float("nan")
    allowed = problem.rules.allowed & False
    allowed[places] = True
    demanded = problem.rules.demanded & False
    demanded[list(cuts)] = True
    problem = replace(problem, rules=replace(problem.rules, allowed=allowed, demanded=demanded))
    if plan.replicas == plan.chunks == 1 and len(problem.classes) > 1 and len(plan.stages) <= MOST_PINNED:
        problem = _each_on_its_own(plan, problem, places)
    found = best_in_order(problem)
    return float("nan") if found is None else found.prediction.step_s


def _each_on_its_own(plan: Plan, problem: Problem, places: Sequence[int]) -> Problem:
    """The problem with each stage on the device that it has in the plan."""
    from planner.solve.problem import DeviceClass

    devices = [row[0] for row in own_positions(problem, plan)]
    pinned = problem.rules.pinned.copy()
    for device, (first, stop) in zip(devices, itertools.pairwise(places), strict=True):
        pinned[first:stop] = device
    classes = tuple(DeviceClass(problem.devices[device], (device,), pinned=True) for device in devices)
    return replace(problem, rules=replace(problem.rules, pinned=pinned), classes=classes)


def compare(plan: Plan, other: Plan) -> pandas.DataFrame:
    """Two plans side by side: one row a quantity that is known of either, with the ratio of the other to this."""
    columns = [_quantities(one) | {"processes": _numbers_text(one)} for one in (plan, other)]
    frame = pandas.DataFrame({"this": columns[0], "other": columns[1]}, dtype=object)
    frame["other / this"] = [
        there / here if here and there is not None and not isinstance(here, str) else float("nan")
        for here, there in zip(columns[0].values(), columns[1].values(), strict=True)
    ]
    return frame[~frame[["this", "other"]].isna().all(axis=1)]


def _numbers_text(plan: Plan) -> str | None:
    """By rank its processes, if the plan is for several hosts."""
    return " ".join(",".join(map(str, row)) for row in plan.processes) if plan.positions else None


def _quantities(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    return {
        "schedule": plan.schedule,
        "K": plan.K,
        "chunks": plan.chunks,
        "M": plan.M,
        "R": plan.replicas,
        "cuts": " ".join(str(stage.stop_layer) for stage in plan.stages[:-1]),
        "recomputed_layers": sum(segment.stop - segment.first for stage in plan.stages for segment in stage.recompute),
        "sent_past_stages": " ".join(f"{skip.sender}>{skip.receiver}" for skip in plan.skips),
        "step_s": prediction.step_s,
        "optimizer_s": prediction.optimizer_s,
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "device_flops_per_s": prediction.device_flops_per_s,
        "mfu": prediction.mfu,
        "idle_devices": plan.unused.devices if plan.unused is not None else 0,
        "bubble": prediction.bubble,
        "gap": prediction.gap,
        "largest_memory_bytes": max(memory.total for memory in plan.device_memories),
        "largest_memory_share": max(_memory_shares(plan)),
    }


@partial(fits_its_arguments, keywords=SettingKeywords.__annotations__)
def what_if(
    profile: Profile,
    devices: Cluster | Sequence[Device],
    variations: Mapping[str, Sequence[Any]],
    *,
    batch_size: int,
    optimizer: str | None = None,
    **settings: Unpack[SettingKeywords],
) -> pandas.DataFrame:
    """Plans for every combination of some settings, without measuring.

    Args:
        profile: what the model costs.
        devices: as for `plan_from_profile`.
        variations: values to try of any keyword of `plan_from_profile`, of `batch_size`, of `devices`, of
            `link_bytes_per_s` and of `link_latency_s`.
        batch_size: where it does not vary.
        optimizer: as for `plan_from_profile`.
        settings: those that do not vary.

    Returns:
        One row a combination: its values, then what `Plan.compare` says, then `reason`, why there is no plan.

    Raises:
        ArgumentError: a combination means nothing.
    """
    from planner.from_profile import make_problem, plan_of

    rows = []
    for values in itertools.product(*variations.values()):
        varied = dict(zip(variations, values, strict=True))
        asked: dict[str, Any] = {**settings, **varied}
        size, name = asked.pop("batch_size", batch_size), asked.pop("optimizer", optimizer)
        cluster = _cluster(
            profile,
            asked.pop("devices", devices),
            asked.pop("link_bytes_per_s", None),
            asked.pop("link_latency_s", None),
        )
        try:
            problem = make_problem(profile, cluster, batch_size=size, optimizer=name, settings=asked)  # type: ignore[arg-type]
            found = {**_quantities(plan_of(problem)), "reason": ""}
        except InfeasibleError as reason:
            found = {"reason": str(reason)}
        shown = {name: _count(value) if name == "devices" else value for name, value in varied.items()}
        rows.append({**shown, **{name: value for name, value in found.items() if name not in shown}})
    return pandas.DataFrame(rows)


def _count(devices: Cluster | Sequence[Device]) -> int:
    return len(devices.devices if isinstance(devices, Cluster) else devices)


def _cluster(profile: Profile, devices: Any, bytes_per_s: float | None, latency_s: float | None) -> Cluster:
    """The devices with their link changed."""
    from planner.from_profile import cluster_of

    cluster = cluster_of(devices)
    if bytes_per_s is None and latency_s is None:
        return cluster
    link = cluster.link or next(iter(profile.links), None)
    if link is None:
        raise ArgumentError("a link cannot vary where none was measured; give a Cluster with a link")
    changed = Link(
        latency_s=link.latency_s if latency_s is None else latency_s,
        bytes_per_s=link.bytes_per_s if bytes_per_s is None else bytes_per_s,
        error=link.error,
        sender_share=link.sender_share,
        receiver_share=link.receiver_share,
    )  # without a table, which would no longer say how long messages take
    return cluster.model_copy(update={"link": changed})


def memory_over_time(plan: Plan) -> pandas.DataFrame:
    """Predicted bytes of every stage during a step, as steps: one row where they change.

    Classes that count for each micro-batch in flight (`planner.cost.ledger`) grow and shrink with their samples; the
    transient part is there while the stage computes, and from a recompute to the end of its backward pass. Messages
    under way count throughout, for their receives are posted ahead. With GPipe a rank posts the receives of all inputs
    at once, which count here from their micro-batch's forward pass on. The largest value is the stage's predicted peak.
    Of the chunks of a rank the first has what the process has once.

    Returns:
        Columns `stage`, `time_s`, `bytes` (from this time on), ordered.
    """
    timeline = simulate_plan(plan)
    rows: list[tuple[int, float, float]] = []
    for index, stage in enumerate(plan.stages):
        memory = stage.memory
        in_flight, deferred, transient = (
            sum(getattr(memory, name) for name in classes_that_count(counts))
            for counts in (Counts.IN_FLIGHT, Counts.WAITING, Counts.TRANSIENT)
        )
        always = memory.total - in_flight - deferred - transient
        changes = _changes(plan, timeline, index)
        samples = np.cumsum([[change.samples, change.waiting] for change in changes], axis=0)
        computing = 0
        rows.append((index, 0.0, float(always)))
        anyway, each, other = _bytes_of_samples(samples, in_flight, deferred)
        for change, (now, waiting) in zip(changes, samples.tolist(), strict=True):
            computing += change.busier
            held = min(in_flight + deferred, anyway + each * now + other * waiting)
            rows.append((index, change.time_s, always + held + (transient if computing else 0)))
    frame = pandas.DataFrame(rows, columns=["stage", "time_s", "bytes"])
    return frame.drop_duplicates(["stage", "time_s"], keep="last", ignore_index=True)


def _bytes_of_samples(samples: Indices, in_flight: int, deferred: int) -> tuple[float, float, float]:
    """Of none, of one under way and of one that waits, if these bytes, a stage's most, are of one of these moments.

    Were they of another moment, bytes of a sample would follow of which that one had fewer than some other. At a moment
    at which none waits, or none is under way, one has as many bytes as no moment has more with. Bytes in flight at a
    moment at which no sample is are there in any case.
    """
    most = in_flight + deferred
    moments = sorted({(now, waiting) for now, waiting in samples.tolist() if now or waiting})

    def rates(moment: tuple[int, int]) -> tuple[float, float, float]:
        now, waiting = moment
        anyway = 0.0 if now else float(in_flight)
        each, other = in_flight / max(now, 1), deferred / max(waiting, 1)
        if not waiting:
            other = min((max(0.0, most - each * n) / w for n, w in moments if w), default=0.0)
        if not now:
            each = min((max(0.0, deferred - other * w) / n for n, w in moments if n), default=0.0)
        return anyway, each, other

    def exceeded(moment: tuple[int, int]) -> float:
        anyway, each, other = rates(moment)
        return float(max(anyway + each * now + other * waiting for now, waiting in moments))

    possible = [(now, waiting) for now, waiting in moments if bool(waiting) == bool(deferred)]
    if not possible:  # a file may say so of a schedule in which nothing waits
        return 0.0, in_flight / int(samples[:, 0].max()), 0.0
    return rates(min(possible, key=lambda moment: (max(most, int(exceeded(moment))), not moment[0])))


class _Change(NamedTuple):
    """Samples that come under way and samples whose weights wait, and work that begins."""

    time_s: float
    samples: int
    waiting: int
    busier: int


def _changes(plan: Plan, timeline: Timeline, stage: int) -> list[_Change]:
    """In order of time, ends before beginnings."""
    changes = []
    begun: dict[int, float] = {}
    for event in timeline.events:
        action = event.action
        if action.stage != stage or event.lane.startswith("link"):
            continue
        size = plan.micro_batch_sizes[action.micro_batch]
        begin_s, end_s = begun.get(action.micro_batch, event.start_s), event.end_s
        if action.kind is ActionKind.F:
            changes += [_Change(event.start_s, size, 0, 1), _Change(end_s, 0, 0, -1)]
        elif action.kind is ActionKind.R:
            begun[action.micro_batch] = event.start_s
        elif action.kind is ActionKind.B:
            changes += [_Change(begin_s, 0, 0, 1), _Change(end_s, -size, 0, -1)]
        elif action.kind is ActionKind.I:
            changes += [_Change(begin_s, 0, 0, 1), _Change(end_s, -size, size, -1)]
        else:
            changes += [_Change(event.start_s, 0, 0, 1), _Change(end_s, 0, -size, -1)]
    return sorted(changes, key=lambda change: (change.time_s, change.busier))
