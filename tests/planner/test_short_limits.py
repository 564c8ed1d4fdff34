"""The bound that a search states holds, however early its time was over.

Time is counted in looks at the clock; `make bench` tries many more.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.solve.work_bound import even_share_s
from tests.planner.restricted import check_short_limit, cut_short, planned, problems

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=SUPPRESSED)
def test_no_plan_is_faster_than_an_even_share_of_the_work(data):
    """What is said of what was not looked at, where there is no time for more."""
    asked = data.draw(problems(most_layers=6, most_devices=4))
    plan = planned(asked)
    problem = make_problem(
        asked.profile, asked.devices, batch_size=asked.batch_size, optimizer=None, settings=asked.settings
    )
    assert plan is None or even_share_s(problem) <= plan.prediction.step_s


@pytest.mark.parametrize(("hosts", "chunks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("short", [False, True])
@given(data=st.data())
@settings(max_examples=6, suppress_health_check=SUPPRESSED)
def test_no_plan_is_faster_than_the_bound_of_a_search_out_of_time(short, hosts, chunks, data):
    problem = data.draw(problems(most_layers=6, most_devices=4, hosts=hosts, chunks=chunks))
    with cut_short(data.draw(st.integers(0, 2**16)) if short else None):
        check_short_limit(problem, data)
