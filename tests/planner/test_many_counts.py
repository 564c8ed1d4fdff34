"""One bound for many numbers of micro-batches is below the best plan of each."""

from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.kernel.tables import BACKWARD_STEADY, FORWARD_STEADY
from planner.solve.many_counts import _tables, alike, bound_of_all_s
from planner.solve.problem import Candidate, Problem
from planner.solve.tables import make_tables
from tests.planner.restricted import Asked, planned, problems

CLOSE = 1e-9
STEADY = [FORWARD_STEADY, BACKWARD_STEADY]
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def asked_of(data: st.DataObject) -> Asked:
    drawn = data.draw(problems(most_layers=7, most_devices=4))
    batch_size = data.draw(st.integers(7, 14))
    own = {"schedule": "1f1b", "replicas": 1, "micro_batches_per_stage": data.draw(st.sampled_from([1, 2]))}
    return replace(drawn, batch_size=batch_size, settings=drawn.settings | own)


def problem_of(asked: Asked) -> Problem:
    given_: Any = asked.settings
    return make_problem(asked.profile, asked.devices, batch_size=asked.batch_size, optimizer=None, settings=given_)


def groups_of(problem: Problem) -> list[list[Candidate]]:
    """Numbers of micro-batches that one bound may be for."""
    unequal = [one for one in problem.candidates() if not one.split.equal]
    groups = [list(group) for _, group in groupby(unequal, key=lambda one: one.split.smallest)]
    assert all(alike(group[0], one) for group in groups for one in group)
    assert not any(alike(one[0], other[0]) for one in groups for other in groups if one is not other)
    return [group for group in groups if len(group) > 1]


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=SUPPRESSED)
def test_no_plan_of_any_is_below_the_bound_of_all(data: st.DataObject) -> None:
    asked = asked_of(data)
    problem = problem_of(asked)
    groups = groups_of(problem)
    assume(groups)
    group = data.draw(st.sampled_from(groups))
    least = {
        one: np.inf if plan is None else plan.prediction.step_s
        for one in group
        for plan in (planned(replace(asked, settings=asked.settings | {"micro_batches": one.split.count})),)
    }
    enough_s = data.draw(st.sampled_from([np.inf, min(least.values()), 1.2 * min(least.values())]))
    first, last = sorted(data.draw(st.lists(st.integers(0, len(group) - 1), min_size=2, max_size=2)))
    bound_s, _ = bound_of_all_s(problem, group[first], group[last], enough_s)
    assert bound_s <= min(enough_s, *(least[one] for one in group[first : last + 1])) * (1 + CLOSE)


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=SUPPRESSED)
def test_seconds_and_memory_are_the_least_of_all_and_no_less(data: st.DataObject) -> None:
    problem = problem_of(asked_of(data))
    groups = groups_of(problem)
    assume(groups)
    group = data.draw(st.sampled_from(groups))
    if problem.most_stages(1, group[0].split.count) != problem.most_stages(1, group[-1].split.count):
        return
    found = _tables(problem, group[0], group[-1])
    for one in (make_tables(problem, candidate) for candidate in group):
        for name in ("forward", "backward", "steady_recompute"):
            mine, theirs = (np.diff(getattr(tables, name)) * tables.steady for tables in (found, one))
            assert (mine <= theirs * (1 + CLOSE) + CLOSE).all(), name
        copies = (found.copies[:, STEADY] * found.steady, one.copies[:, STEADY] * one.steady)
        assert (copies[0] <= copies[1] * (1 + CLOSE) + CLOSE).all()
        for name in ("passing", "crossing", "trainable_bytes", "stepped_bytes", "forward_most"):
            assert np.array_equal(getattr(found, name), getattr(one, name)), name
        for name, mine in found.memory._asdict().items():
            assert (mine <= getattr(one.memory, name)).all() or name == "in_flight", name
        assert (found.memory.in_flight[:, 0] <= one.memory.in_flight[:, 0]).all()
        assert (found.memory.in_flight.sum(1) <= one.memory.in_flight.sum(1)).all()
        assert (found.limit >= one.limit).all()
