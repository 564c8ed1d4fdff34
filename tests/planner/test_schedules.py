"""A schedule is one record: what follows from it, shown on orders that nobody else has heard of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import Plan, plan_from_profile
from planner.kernel.makespan import makespan_s
from planner.plan.actions import make_schedule
from planner.plan.schedules import SCHEDULES, Objective, ScheduleRecord, rank_orders
from planner.plan.simulator import Durations, simulate
from profiler.errors import PlanFileError
from tests.planner.conftest import most_in_flight
from tests.planner.test_balancer import check, draw_devices


def first_in_first_out(rank, ranks, micro_batches, chunks):
    """All forward passes, then all backward passes, in the same order."""
    return tuple(range(2 * micro_batches))


def two_each(rank, ranks, micro_batches, chunks):
    """1F1B with two micro-batches in the place of each one."""
    ahead = min(2 * (ranks - rank), micro_batches)
    order = [*range(ahead)]
    for number in range(micro_batches):
        order.append(micro_batches + number)
        if number % 2 and ahead < micro_batches:
            order += range(ahead, min(ahead + 2, micro_batches))
            ahead += 2
    return tuple(order)


NEW = {
    "first in, first out": ScheduleRecord(first_in_first_out, None, Objective.WORK, "made up"),
    "two each": ScheduleRecord(two_each, lambda number, count: min(2 * number, count), Objective.WORK, "made up"),
    "gpipe, listed": replace(SCHEDULES["gpipe"], objective=Objective.WORK),
    "1f1b, listed": replace(SCHEDULES["1f1b"], objective=Objective.WORK),
}


@pytest.fixture(params=NEW, autouse=True)
def new(request, monkeypatch):
    """The name of a schedule that exists in this test only."""
    monkeypatch.setitem(SCHEDULES, request.param, NEW[request.param])
    return request.param


def test_the_records_say_how_many_micro_batches_are_in_flight(new):
    for name, record in SCHEDULES.items():
        for stages in range(1, 5) if record.fewest_chunks == 1 else ():
            for count in range(1, 10):
                for stage in range(stages):
                    said = record.most_in_flight(stages - stage, count)
                    assert said == most_in_flight(name, stage, stages, count)


def test_each_micro_batch_goes_forward_and_then_backward_once(new):
    for name, record in SCHEDULES.items():
        for order in rank_orders(name, 3, 7):
            assert sorted(order) == [*range(21 if record.splits_backward else 14)]
            assert all(order.index(number) < order.index(7 + number) for number in range(7))
            if record.splits_backward:
                assert all(order.index(7 + number) < order.index(14 + number) for number in range(7))
                assert [number for number in order if number >= 14] == [*range(14, 21)]
                assert [number for number in order if 7 <= number < 14] == [*range(7, 14)]


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_makespan_is_the_simulators(new, data):
    stages, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    random = data.draw(st.randoms(use_true_random=False))
    recompute = [random.random() < 0.5 for _ in range(stages)]
    rows = [
        [[random.random() * (row != 1 or recompute[k]) for _ in range(count)] for k in range(stages)]
        for row in range(5)
    ]
    durations = Durations(*(tuple(map(tuple, row)) for row in rows))
    schedule = make_schedule(new, stages=stages, micro_batches=count, recompute=recompute)
    expected_s = simulate(schedule, durations).makespan_s
    assert makespan_s(new, np.array(rows)) == pytest.approx(expected_s, rel=1e-12)


@given(data=st.data())
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
def test_plans_are_the_best_of_all_without_a_closed_form(profiles, oracle, device, new, data):
    profile = data.draw(profiles(most_layers=5))
    batch_size, count = data.draw(st.sampled_from([(4, 4), (8, 8), (10, 5), (12, 6)]))
    devices = draw_devices(data, device, oracle, profile, batch_size)
    mode = data.draw(st.sampled_from(["auto", "always", "never"]))
    best_s = oracle(profile, devices, batch_size, mode, 1, (new,)).best_step_s([count])
    check(
        profile,
        devices,
        best_s,
        batch_size=batch_size,
        micro_batches=count,
        recompute=mode,
        schedule=new,
        micro_batches_per_stage=1,
    )


@given(profile=st.data())
@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_plan_file_may_name_it_as_long_as_it_exists(profiles, device, new, profile, monkeypatch):
    made = profile.draw(profiles())
    text = plan_from_profile(made, [device("a")], batch_size=4, schedule=new).to_json()
    assert Plan.parse_json(text, source="here", error=PlanFileError).schedule == new
    monkeypatch.delitem(SCHEDULES, new)
    with pytest.raises(PlanFileError, match=r"is none of gpipe, 1f1b"):
        Plan.parse_json(text, source="here", error=PlanFileError)
    monkeypatch.setitem(SCHEDULES, new, NEW[new])
