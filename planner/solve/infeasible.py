"""Says why no plan fits and what would help. Every cure that is named was tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.stage_memory import stage_memory
from planner.kernel.least_overflow import LeastBad, equal_segments, least_bad
from planner.kernel.tables import segment_costs
from planner.plan.schedules import SCHEDULES, Ring, ScheduleName, one_chunk_schedules
from planner.plan.stage import Segment, StageMemory
from planner.plan.units import bytes_text
from planner.settings import Settings
from planner.solve.allowed_cuts import Stops
from planner.solve.candidate_search import first_balance
from planner.solve.chunk_candidates import candidates, plans_of
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import Deadline
from planner.solve.problem import Candidate, Problem, device_classes
from planner.solve.segment_choices import segments_of
from planner.solve.tables import make_tables
from profiler.device import Device
from profiler.text import counted

MOST_CANDIDATES = 12
"""How many schedules, R and M are looked at for each question; they are spread over all, both ends included."""
MOST_CURES_S = 10.0
"""Seconds in which cures are tried [chosen]: each asks whether a plan fits, which of large problems takes that long."""
MOST_NEAREST_S = 4.0
"""Seconds in which the plan is looked for that is nearest to fitting, of one candidate at least [chosen]."""
MOST_PLACES = 500
"""Places of cuts that it is looked for with [chosen: with 2,000 and 64 devices it took 40 s]."""
CLASSES_NAMED = 3
"""How many classes of memory a message names."""


def nothing_fits_text(problem: Problem) -> str:
    """Which stage of the least bad plan does not fit, by how much and why, and what would help."""
    looking = Deadline(MOST_NEAREST_S)
    tried: list[tuple[LeastBad, Candidate]] = []
    some_places = _with_fewer_places(problem)
    for candidate in reversed(_some(problem.candidates())):  # the most micro-batches, which keep least, first
        if not (tried and looking.over):
            tried.append((least_bad(make_tables(some_places, candidate)), candidate))
    nearest, candidate = min(reversed(tried), key=lambda pair: pair[0].over_bytes)
    if not np.isfinite(nearest.over_bytes):
        return _too_few_micro_batches(problem) or (
            "no plan satisfies all rules on these devices, whatever the memory: there are fewer equal devices than "
            "stages that the rules make, or replicas; drop a rule"
        )
    memories = [_memory(problem, candidate, nearest, stage) for stage in range(len(nearest.classes))]
    over = [
        memory.total - problem.classes[group].device.memory_bytes
        for (memory, _), group in zip(memories, nearest.classes, strict=True)
    ]
    stage = int(np.argmax(over))
    if over[stage] <= 0:
        return _not_found_text(problem, candidate, map(int, nearest.cuts[1:]))
    memory, segments = memories[stage]
    device = problem.classes[nearest.classes[stage]].device
    classes = sorted(((getattr(memory, field), field) for field in StageMemory.model_fields), reverse=True)
    largest = ", ".join(f"{name} {bytes_text(size)}" for size, name in classes[:CLASSES_NAMED] if size)
    names = problem.costs.profile.layers
    first, stop = (int(cut) for cut in nearest.cuts[stage : stage + 2])
    deadline = Deadline(MOST_CURES_S)
    cures = list(_cures(problem, deadline))
    none, nearest_one = "no plan fits the memory", "The nearest one"
    if some_places is not problem:
        none = "no plan was found that fits the memory"
        nearest_one = f"The nearest one with cuts at {_places(some_places)} of the {_places(problem)} places for them"
    return (
        f"{none}. {nearest_one} has K = {counted(len(nearest.classes), 'stage')} and M = "
        f"{counted(candidate.split.count, 'micro-batch')}; its stage {stage} (layers {first} to {stop - 1}, "
        f"{names[first].name} to "
        f"{names[stop - 1].name}, {_recompute_text(segments)}) needs {bytes_text(memory.total)} and "
        f"device {device.name} ({device.kind}) has {bytes_text(device.memory_bytes)}: "
        f"{over[stage]} bytes ({bytes_text(over[stage])}) too many. "
        f"Largest: {largest}. " + _cures_text(cures, out_of_time=deadline.over)
    )


def _too_few_micro_batches(problem: Problem) -> str:
    """Where rules make more stages than M >= n K allows for any M, and not more than the devices do; else nothing."""
    settings, needed = problem.settings, 1 + int(problem.rules.demanded.sum())
    loose = replace(problem, settings=replace(settings, micro_batches_per_stage=1))
    tried = [(one.replicas, one.split.count) for one in problem.candidates()]
    ruled, unruled = (max(one.most_stages(*shape) for shape in tried) for one in (problem, loose))
    if not ruled < needed <= unruled:
        return ""
    most = max(count for _, count in tried)
    return (
        f"the rules make {counted(needed, 'stage')} at least, for which micro_batches_per_stage = "
        f"{settings.micro_batches_per_stage} asks for M = {settings.micro_batches_per_stage * needed} micro-batches, "
        f"and there are at most {most}; give more micro-batches, or a smaller micro_batches_per_stage"
    )


def _with_fewer_places(problem: Problem) -> Problem:
    """The problem with cuts at some of its places alone, evenly spread: of many the nearest plan takes long to find."""
    rules = problem.rules
    places, most = np.flatnonzero(rules.allowed), max(MOST_PLACES, len(problem.devices)) + 2  # both ends
    if len(places) <= most:
        return problem
    some = np.zeros_like(rules.allowed)
    some[places[np.linspace(0, len(places) - 1, most).round().astype(int)]] = True
    return replace(problem, rules=replace(rules, allowed=some | rules.demanded))


def _places(problem: Problem) -> int:
    """How many cuts are allowed."""
    return int(problem.rules.allowed[1:-1].sum())


def no_chunks_fit_text(problem: Problem) -> str:
    """The same for chunks and orders made for a plan: how far the nearest plan that was found is from fitting."""
    looking = Deadline(MOST_NEAREST_S)
    tried: list[tuple[float, ChunkPlans, Stops, tuple[int, ...]]] = []
    for candidate in reversed(_some(_with_most_micro_batches(candidates(problem)))):
        if tried and looking.over:
            break
        plans = plans_of(problem, candidate, looking)
        found = CutClimb(plans, CutBound(plans), looking).nearest()
        if found is not None:
            over_bytes, stops, classes = found
            tried.append((over_bytes, plans, stops, classes))
    if not tried:
        return "no number of ranks and micro-batches satisfies all settings; drop or loosen one"
    _, plans, stops, classes = min(reversed(tried), key=lambda one: one[0])
    rank = max(range(plans.ranks), key=lambda rank: plans.over_bytes(rank, stops, classes))
    device = problem.classes[classes[rank]].device
    more = plans.over_bytes(rank, stops, classes)
    if not more:
        return _not_found_text(problem, plans.candidate, stops)
    chunks = f"{problem.settings.chunks} chunks a rank"
    if problem.settings.chunks == 1:
        chunks = f"schedule {' or '.join(map(repr, problem.settings.schedules))}"
    return (
        f"no plan with {chunks} was found that fits the memory. The nearest one has {counted(plans.ranks, 'rank')} "
        f"and M = {counted(plans.candidate.split.count, 'micro-batch')}; its rank {rank} needs "
        f"{bytes_text(device.memory_bytes + more)} and device {device.name} ({device.kind}) has "
        f"{bytes_text(device.memory_bytes)}: {more} bytes ({bytes_text(more)}) too many"
    )


def _not_found_text(problem: Problem, candidate: Candidate, stops: Iterable[int]) -> str:
    """Of a search that ended before it came to a plan that fits."""
    names, ring, inner = problem.costs.profile.layers, candidate.ring, [*stops][:-1]
    cuts = ", ".join(names[stop].name for stop in inner)
    chunks = f" in {ring.chunks} chunks a rank" if ring.chunks > 1 else ""
    replicas = f", R = {candidate.replicas}" if problem.settings.replicas is None else ""
    return (
        f'no plan was found, though one fits the memory: with schedule="{candidate.schedule}", '
        f"K = {counted(len(inner) + 1, 'stage')}{chunks}{replicas}, "
        f"M = {counted(candidate.split.count, 'micro-batch')}{f' and cuts before {cuts}' if cuts else ''}"
        f"{_advice_to_find(problem, inner)}"
    )


def _advice_to_find(problem: Problem, cuts: Sequence[int]) -> str:
    """What leaves less to search for a plan with these cuts, of what is not set yet; and a longer limit."""
    settings = problem.settings
    free = {
        "schedule": len(settings.schedules) > 1,
        "stages": settings.stages is None,
        "replicas": settings.replicas is None,
        "micro_batches": settings.micro_batches is None,
    }
    unset = [name for name, one in free.items() if one]
    advice = [f"{', '.join(unset[:-1])}{' and ' * (len(unset) > 1)}{unset[-1]} so"] if unset else []
    if not unset and not problem.rules.demanded[[*cuts]].all():
        advice.append("cut_at to the modules that begin there")
    if settings.time_limit_s is not None:
        advice.append(f"a time_limit_s of more than {settings.time_limit_s:g} s, which may find others")
    return f". Set {', or '.join(advice)}" if advice else ""


def lean_cures_text(problem: Problem, besides: str) -> str:
    """What would help a problem of schedules that keep more: those that keep least, if need be with a cure.

    Args:
        problem: with one chunk a rank.
        besides: what of the settings that were asked for has to change with the schedule, in words.
    """
    deadline, names = Deadline(MOST_CURES_S), _lean_schedules()
    plain = [_with(problem, replace(problem.settings, schedules=(name,))) for name in names]
    fitting = [name for name, one in zip(names, plain, strict=True) if _fits(one, deadline)]
    if fitting:
        return f'What would help: schedule="{fitting[0]}"{besides}'
    text = _cures_text([*_cures(plain[0], deadline)], out_of_time=deadline.over)
    return f'Nor does any with schedule="{names[0]}"{besides} fit; with it, {text[0].lower()}{text[1:]}'


def _cures_text(cures: Sequence[str], *, out_of_time: bool) -> str:
    untried = f"; there was no time to try all cures ({MOST_CURES_S:.0f} s)" if out_of_time else ""
    if cures:
        return f"What would help: {'; '.join(cures)}{untried}"
    if out_of_time:
        return f"No cure was found in {MOST_CURES_S:.0f} s, which was not enough to try all"
    lean = ", ".join(_lean_schedules())
    return f"Neither recompute, {lean}, more micro-batches, a smaller batch nor more devices would help alone"


def _recompute_text(segments: Sequence[Segment]) -> str:
    if not segments:
        return "not recomputed"
    return "recomputed" if len(segments) == 1 else f"recomputed in {len(segments)} segments"


def _memory(
    problem: Problem, candidate: Candidate, plan: LeastBad, stage: int
) -> tuple[StageMemory, tuple[Segment, ...]]:
    """Bytes of one stage, and its segments."""
    device_class = int(plan.classes[stage])
    device = problem.classes[device_class].device
    number = len(plan.classes) - stage
    first, stop = (int(cut) for cut in plan.cuts[stage : stage + 2])
    tables = make_tables(problem, candidate)
    costs = segment_costs(tables, device_class, number - 1 if tables.by_number else 0)
    segments = segments_of(equal_segments(costs, first, stop, int(plan.parts[stage])), first)
    optimizer = problem.costs.optimizer(device.kind, problem.optimizer)
    return stage_memory(
        problem.costs,
        problem.parameters,
        device,
        candidate.schedule,
        candidate.split,
        optimizer,
        number=number,
        first=first,
        stop=stop,
        segments=segments,
        replicas=problem.as_replicas(candidate.replicas),
        carrier=problem.carrier(device),
    ), segments


def _cures(problem: Problem, deadline: Deadline) -> Iterator[str]:
    """What makes the problem feasible, one change at a time, as far as there is time to try."""
    settings = problem.settings
    if settings.recompute != "auto" and _fits(_with(problem, replace(settings, recompute="auto")), deadline):
        yield 'recompute="auto"'
    for name in _lean_schedules():
        if name not in settings.schedules and _fits(_with(problem, replace(settings, schedules=(name,))), deadline):
            yield f'schedule="{name}"'
    if settings.micro_batches is not None:
        share = settings.batch_size // (settings.replicas or 1)
        for count in _powers(settings.micro_batches, share):
            if _fits(_with(problem, replace(settings, micro_batches=count)), deadline):
                yield f"more micro-batches (M = {count} fits)"
                break
    for halvings in range(1, settings.batch_size.bit_length()):
        batch = settings.batch_size >> halvings
        if batch % (settings.replicas or 1) == 0 and _fits(
            _with(problem, replace(settings, batch_size=batch)), deadline
        ):
            yield f"a smaller batch ({counted(batch, 'sample')} {'fits' if batch == 1 else 'fit'})"
            break
    if settings.stages in (None, len(problem.devices)):
        for count in _powers(len(problem.devices), max(problem.layers, len(problem.devices))):
            if _fits(_with_devices(problem, count), deadline):
                also = "" if settings.stages is None else f" with stages={count}"
                yield f"more devices ({count} fit{also}, with the added ones like the last)"
                break


def _lean_schedules() -> list[ScheduleName]:
    """The schedules with one stage a rank that do not keep all micro-batches."""
    return [name for name in one_chunk_schedules() if not SCHEDULES[name].keeps_all]


def _powers(count: int, most: int) -> Iterator[int]:
    """`count` doubled as long as it is below `most`, and at last `most`."""
    count *= 2
    while count < most:
        yield count
        count *= 2
    if count // 2 < most:
        yield most


def _with(problem: Problem, settings: Settings) -> Problem:
    return replace(problem, settings=settings)


def _with_devices(problem: Problem, count: int) -> Problem:
    added = count - len(problem.devices)
    devices: tuple[Device, ...] = problem.devices + problem.devices[-1:] * added
    settings = replace(
        problem.settings,
        max_stages=min(count, problem.settings.stages_limit or count),
        stages=None if problem.settings.stages is None else count,
        memory_limits=problem.settings.memory_limits + problem.settings.memory_limits[-1:] * added,
    )
    return replace(problem, devices=devices, classes=device_classes(devices, problem.rules), settings=settings)


def _fits(problem: Problem, deadline: Deadline) -> bool:
    """Whether a plan was found in time that fits."""
    return not deadline.over and any(
        first_balance(problem, candidate, deadline) is not None
        for candidate in _some(problem.candidates())
        if not deadline.over
    )


def _with_most_micro_batches(candidates: Iterable[Candidate]) -> Iterable[Candidate]:
    """Of each schedule, R and number of ranks the one that keeps least."""
    most: dict[tuple[ScheduleName, int, Ring], Candidate] = {}
    for one in candidates:
        most[one.schedule, one.replicas, one.ring] = one
    return most.values()


def _some(candidates: Iterable[Candidate]) -> list[Candidate]:
    """At most `MOST_CANDIDATES` of the candidates, evenly spread."""
    every = list(candidates)
    picks = np.linspace(0, len(every) - 1, min(len(every), MOST_CANDIDATES)).round().astype(int)
    return [every[pick] for pick in picks]
