"""Says why no plan fits and what would help. Every cure that is named was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.costs import Floats
from planner.micro_batches import MicroBatches
from planner.plan import StageMemory
from planner.problem import Problem
from planner.stage_options import memory_of
from planner.units import bytes_text

MOST_CANDIDATES = 32
"""How many M are looked at to explain a failure; they are spread over all candidates, both ends included."""
CLASSES_NAMED = 3
"""How many classes of memory a message names."""


def batch_too_small_text(problem: Problem, needed: int) -> str:
    """Why a batch cannot be cut into enough micro-batches."""
    stages, per_stage = problem.stages or 1, problem.micro_batches_per_stage
    fewer = problem.batch_size // per_stage
    cures = [f"use a batch of at least {needed}"]
    if stages > 1 and fewer >= 1:
        cures.append(f"set stages to at most {fewer}")
    if problem.batch_size // stages >= 1:
        cures.append(f"set micro_batches_per_stage to at most {problem.batch_size // stages}")
    return (
        f"a batch of {problem.batch_size} samples is too small for K = {stages}: M must be at least {needed} "
        f"({per_stage} micro-batches for each stage), and a micro-batch holds at least 1 sample; {', or '.join(cures)}"
    )


def nothing_fits_text(problem: Problem) -> str:
    """Which stage of the least bad plan does not fit, by how much and why, and what would help."""
    nearest = min(_attempts(problem), key=lambda attempt: attempt.over_bytes)
    stage = nearest.worst_stage
    first, stop = nearest.cuts[stage], nearest.cuts[stage + 1]
    memory, recomputed = _least_memory(problem, nearest.split, stage, first, stop)
    device = problem.devices[stage]
    classes = sorted(((getattr(memory, field), field) for field in StageMemory.model_fields), reverse=True)
    largest = ", ".join(f"{name} {bytes_text(size)}" for size, name in classes[:CLASSES_NAMED] if size)
    names = problem.costs.profile.layers
    cures = list(_cures(problem))
    return (
        f"no plan fits the memory. The nearest one has K = {len(nearest.cuts) - 1} stages and M = "
        f"{nearest.split.count} micro-batches; its stage {stage} (layers {first} to {stop - 1}, {names[first].name} to "
        f"{names[stop - 1].name}, {'' if recomputed else 'not '}recomputed) needs {bytes_text(memory.total)} and "
        f"device {device.name} ({device.kind}) has {bytes_text(device.memory_bytes)}: "
        f"{memory.total - device.memory_bytes} bytes ({bytes_text(memory.total - device.memory_bytes)}) too many. "
        f"Largest: {largest}. "
        + (
            f"What would help: {'; '.join(cures)}"
            if cures
            else "Neither recompute, more micro-batches, a smaller batch nor more devices would help alone"
        )
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A plan that does not fit: its cuts, the stage with the largest overflow, and that overflow in bytes."""

    split: MicroBatches
    cuts: tuple[int, ...]
    worst_stage: int
    over_bytes: float


def _attempts(problem: Problem) -> Iterator[_Attempt]:
    """For some M the cuts with the smallest largest overflow."""
    for split in _some(problem.candidates()):
        numbers = problem.stage_numbers(split.count)
        tables: dict[tuple[str, int], Floats] = {}
        over: list[Floats] = []
        for device in problem.devices[: numbers[-1]]:
            key = (device.kind, device.memory_bytes)
            if key not in tables:
                tables[key] = _least_total(problem, split, len(over)) - device.memory_bytes
            over.append(tables[key])
        yield _least_overflow(split, over, exact_stages=problem.stages is not None)


def _least_overflow(split: MicroBatches, over: list[Floats], *, exact_stages: bool) -> _Attempt:
    """The cuts whose worst stage is the least bad: a dynamic program from the last layer."""
    stages, last = len(over), over[0].shape[0] - 1
    after = np.full((stages + 1, last + 1), np.inf)
    after[stages if exact_stages else slice(1, None), last] = -np.inf
    choice = np.zeros((stages, last + 1), dtype=np.intp)
    not_empty = np.triu(np.ones_like(over[0], dtype=bool), k=1)
    for stage in reversed(range(stages)):
        ways = np.where(not_empty, np.maximum(over[stage], after[stage + 1][None, :]), np.inf)
        choice[stage] = ways.argmin(axis=1)
        np.minimum(after[stage], ways.min(axis=1), out=after[stage])
    cuts = [0]
    while cuts[-1] < last:
        cuts.append(int(choice[len(cuts) - 1, cuts[-1]]))
    overflow = [float(over[stage][first, stop]) for stage, (first, stop) in enumerate(pairwise(cuts))]
    return _Attempt(split, tuple(cuts), int(np.argmax(overflow)), max(overflow))


def _least_total(problem: Problem, split: MicroBatches, stage: int) -> Floats:
    device = problem.devices[stage]
    totals = [memory_of(problem, device, split, recompute=mode).total for mode in _recompute_modes(problem)]
    return np.minimum(totals[0], totals[-1])


def _least_memory(problem: Problem, split: MicroBatches, stage: int, first: int, stop: int) -> tuple[StageMemory, bool]:
    """Memory of one stage with whichever of recompute or not needs less, and which that is."""
    device = problem.devices[stage]
    options = [
        (memory_of(problem, device, split, recompute=mode).stage(first, stop), mode)
        for mode in _recompute_modes(problem)
    ]
    return min(options, key=lambda option: option[0].total)


def _recompute_modes(problem: Problem) -> tuple[bool, ...]:
    return {"auto": (False, True), "always": (True,), "never": (False,)}[problem.recompute]


def _cures(problem: Problem) -> Iterator[str]:
    """What makes the problem feasible, one change at a time."""
    if problem.recompute != "auto" and _feasible(replace(problem, recompute="auto")):
        yield 'recompute="auto"'
    if problem.micro_batches is not None:
        more = _first_feasible(
            replace(problem, micro_batches=count) for count in _powers(problem.micro_batches, problem.batch_size)
        )
        if more is not None:
            yield f"more micro-batches (M = {more.micro_batches} fits)"
    smaller = _first_feasible(
        replace(problem, batch_size=problem.batch_size // 2**halvings)
        for halvings in range(1, problem.batch_size.bit_length())
    )
    if smaller is not None:
        yield f"a smaller batch ({smaller.batch_size} samples fit)"
    if problem.stages is None or problem.stages == len(problem.devices):
        larger = _first_feasible(
            _with_devices(problem, count) for count in _powers(len(problem.devices), problem.layers)
        )
        if larger is not None:
            yield f"more devices ({len(larger.devices)} fit, with the added ones like the last)"


def _powers(count: int, most: int) -> Iterator[int]:
    """`count` doubled again and again, and at last `most`."""
    count *= 2
    while count < most:
        yield count
        count *= 2
    if count // 2 < most:
        yield most


def _with_devices(problem: Problem, count: int) -> Problem:
    devices = problem.devices + problem.devices[-1:] * (count - len(problem.devices))
    return replace(problem, devices=devices, max_stages=count, stages=None if problem.stages is None else count)


def _first_feasible(problems: Iterator[Problem]) -> Problem | None:
    return next((problem for problem in problems if _feasible(problem)), None)


def _feasible(problem: Problem) -> bool:
    """Whether some plan fits."""
    if problem.micro_batches is not None and problem.micro_batches > problem.batch_size:
        return False
    return any(attempt.over_bytes <= 0 for attempt in _attempts(problem))


def _some(candidates: list[MicroBatches]) -> list[MicroBatches]:
    """At most `MOST_CANDIDATES` of them, evenly spread."""
    if len(candidates) <= MOST_CANDIDATES:
        return candidates
    picks = np.linspace(0, len(candidates) - 1, MOST_CANDIDATES).round().astype(int)
    return [candidates[pick] for pick in picks]
