"""First plans of candidates with several chunks a rank, and what is searched because of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner.from_profile import make_problem, plan_from_profile
from planner.solve.chunk_bound import least_s
from planner.solve.chunk_candidates import plans_of, with_ranks
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import HOPELESS, CutClimb
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.first_plans import FirstPlans, Waiting
from profiler.device import Device, Link
from profiler.record import Profile
from tests.planner.made_up import build_profile

DEAR_TO_RECOMPUTE = (1.0, 4.0, 2.0, 10, 4, 8, 8)


def equal_layers(layers: int) -> Profile:
    return build_profile(
        {("a", size): [[value * size for value in DEAR_TO_RECOMPUTE]] * layers for size in (1, 64)},
        links=(Link(latency_s=0.0, bytes_per_s=1e9),),
        reserve_bytes=1000,
    )


def waiting(devices: list[Device], batch: int) -> list[Waiting]:
    """All candidates with 2 chunks over all devices."""
    asked: Any = {"schedule": "interleaved", "chunks": 2}
    problem = make_problem(equal_layers(16), devices, batch_size=batch, optimizer=None, settings=asked)
    found = []
    for position, candidate in enumerate(problem.candidates()):
        plans = plans_of(problem, with_ranks(candidate, len(devices), 2))
        bound_s = least_s(plans)
        found.append(Waiting(bound_s, bound_s, candidate.split.count, position, plans, None))
    return found


def test_what_memory_makes_slow_is_not_searched(device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds leave out memory, so the fewest micro-batches came first: half of the time went to their cuts."""
    searched: list[float] = []
    found = CutClimb.found

    def noted(self: CutClimb, below_s: float) -> Any:
        choices, least_of_all_s = found(self, below_s)
        searched.extend(choice.step_s for choice in choices)
        return choices, least_of_all_s

    monkeypatch.setattr(CutClimb, "found", noted)
    plan = plan_from_profile(
        equal_layers(40), [device(memory_bytes=2500)] * 4, batch_size=64, schedule="interleaved", chunks=2
    )
    assert searched
    assert max(searched) <= HOPELESS * plan.prediction.step_s
    few = plan_from_profile(
        equal_layers(40),
        [device(memory_bytes=2500)] * 4,
        batch_size=64,
        schedule="interleaved",
        chunks=2,
        micro_batches=16,
    )
    assert few.prediction.step_s > HOPELESS * plan.prediction.step_s


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-lean"])
def test_candidates_of_first_plans_are_proven_too(device: Callable[..., Device], schedule: Any) -> None:
    """What the search of all their cuts had shown was forgotten: of 500 small problems gaps were up to 38 %."""
    chance = random.Random(0)
    layers = [[chance.uniform(0.3, 3), chance.uniform(0.3, 3), chance.uniform(0.5, 6), 10, 4, 8, 8] for _ in range(7)]
    profile = build_profile(
        {("a", size): [[value * size for value in row] for row in layers] for size in (1, 64)},
        links=(Link(latency_s=0.0, bytes_per_s=100.0),),
        reserve_bytes=1000,
    )
    devices = [device(memory_bytes=1200)] * 2
    plan = plan_from_profile(profile, devices, batch_size=8, schedule=schedule, chunks=2, micro_batches_per_stage=1)
    assert plan.prediction.gap == pytest.approx(0.0, abs=1e-9)


def test_of_each_size_the_fewest_micro_batches_have_first_plans(device: Callable[..., Device]) -> None:
    entries = waiting([device()] * 2, 30)
    first = FirstPlans(NO_DEADLINE)
    fastest = first.fastest(entries, np.inf, rounds=1)
    assert fastest
    splits = [entry.plans.candidate.split for entry in fastest]
    assert all(split.count == max(8, -(-split.batch_size // split.largest)) for split in splits)


def test_others_are_expected_to_take_what_lies_between(device: Callable[..., Device]) -> None:
    entries = waiting([device(memory_bytes=2500)] * 2, 100)
    first = FirstPlans(NO_DEADLINE)
    first.fastest(entries, np.inf, rounds=1)
    own_s = {entry.position: first.step_s(entry, np.inf) for entry in entries}
    expected_s = {entry.position: first.estimate_s(entry, reached_s=0.0) for entry in entries}
    assert all(expected_s[entry.position] >= entry.bound_s for entry in entries)
    near_s = 1.2 * min(own_s.values())
    off = [expected_s[position] / seconds for position, seconds in own_s.items() if seconds < near_s]
    assert len(off) > 5
    assert min(off) > 0.85
    assert max(off) < 1.15
    assert first.estimate_s(entries[0], reached_s=1e9) == entries[0].bound_s


def test_none_is_looked_for_late(device: Callable[..., Device]) -> None:
    entries = waiting([device()] * 2, 30)
    first = FirstPlans(Deadline(0.0))
    assert first.fastest(entries, np.inf, rounds=3) == []
    assert first.estimate_s(entries[0], reached_s=0.0) == entries[0].bound_s
    assert first.in_vain > 0


def test_candidates_that_are_hopeless_for_their_time_are_not_taken_for_short_of_memory(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bounds may be raised, where memory does not leave them loose: a gap of 15 % had become one of 42 %."""
    entry = waiting([device(memory_bytes=10**6)] * 2, 64)[-1]
    monkeypatch.setattr(CutClimb, "tries_all_cuts", False)
    first = CutClimb(entry.plans, CutBound(entry.plans), NO_DEADLINE)
    (choice, *_), _ = first.found(np.inf)
    late = CutClimb(entry.plans, CutBound(entry.plans), NO_DEADLINE)
    assert late.found(choice.step_s / HOPELESS / 2) == ([], 0.0)
    assert late.hopeless
    assert not first.hopeless
    short = waiting([device(memory_bytes=1010)] * 2, 64)[-1]
    full = CutClimb(short.plans, CutBound(short.plans), NO_DEADLINE)
    assert full.found(choice.step_s / HOPELESS / 2) == ([], 0.0)
    assert not full.hopeless
