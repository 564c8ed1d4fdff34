"""The bound of 1F1B from paths, and the cuts that it comes to, against all cuts there are."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.kernel.cut_walk import free_ends, least_cuts
from planner.solve.balance import StageChoice, evaluate_s
from planner.solve.deadline import NO_DEADLINE
from planner.solve.path_search import PathSearch
from tests.planner.test_chunk_plans import problem_of

ROUGH = 1e-6
SLOW = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@given(data=st.data())
@SLOW
def test_the_best_cuts_are_found_and_no_cuts_are_below_the_bound(profiles, device, data):
    profile = data.draw(profiles(most_layers=8, kinds=("a",)))
    layers, stages = len(profile.layers), data.draw(st.integers(2, 3))
    assume(layers > stages)
    batch, count = data.draw(st.sampled_from([(4, 4), (8, 8), (7, 5), (6, 3)]))
    asked: Any = {"schedule": "1f1b", "chunks": 1, "stages": stages, "micro_batches": count, "recompute": "never"}
    problem = problem_of(profile, [device()] * stages, batch, **asked)
    candidate = next(problem.candidates())
    every_s = [
        evaluate_s(
            problem,
            candidate,
            tuple(StageChoice(first, stop, 0, ()) for first, stop in itertools.pairwise((0, *cuts, layers))),
        )
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    ]
    search = PathSearch(problem, candidate, NO_DEADLINE)
    first, quick_s = search.run(1, None, np.inf)
    plan, bound_s = search.run(10_000, first, np.inf)
    assert quick_s <= bound_s <= min(every_s) * (1 + 1e-9)
    if batch % count == 0 and not any(parameter.trainable for parameter in profile.parameters):
        assert bound_s >= min(every_s) * (1 - ROUGH)
    if batch % count == 0:
        assert plan is not None
        assert plan.step_s == pytest.approx(min(every_s))
    assert PathSearch(problem, candidate, NO_DEADLINE).run(10_000, plan, min(every_s))[1] <= min(every_s) * (1 + 1e-9)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_stage_is_left_out_if_all_cuts_that_have_it_are_above_the_limit(stages, slack, longest, seed):
    random = np.random.default_rng(seed)
    places, longest = stages + slack, min(longest, slack)
    costs = random.random((stages, places))
    free = random.random((stages, slack, longest)) < 0.8
    ends_at = np.add.outer(np.add.outer(np.arange(stages), np.arange(slack)), np.arange(longest)) + 1
    free &= ends_at < places
    limit = stages * 0.5

    def is_free(stage, begin, end):
        return end - begin <= longest and free[stage, begin - stage, end - begin - 1]

    ways = {
        ends: float(sum(costs[stage, end] for stage, end in enumerate(ends)))
        for inner in itertools.combinations(range(1, places - 1), stages - 1)
        if (ends := (*inner, places - 1))
        if all(is_free(stage, begin, end) for stage, (begin, end) in enumerate(itertools.pairwise((0, *ends))))
    }
    left = free.copy()
    least, found = least_cuts(costs, left, limit)
    assert least == pytest.approx(min(ways.values(), default=np.inf))
    if ways:
        assert ways[tuple(map(int, found))] == pytest.approx(least)
    kept = np.zeros_like(free)
    for ends, cost in ways.items():
        for stage, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
            kept[stage, begin - stage, end - begin - 1] |= cost < limit
    assert np.array_equal(left, kept)
    there = {(stage, end) for ends, cost in ways.items() if cost < limit for stage, end in enumerate(ends)}
    assert {(int(stage), int(end)) for stage, end in np.argwhere(free_ends(left, places))} == there
