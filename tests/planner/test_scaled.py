"""A step that takes other seconds is what the simulator says of it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.measured_ratios import PassRatios
from planner.plan.simulator import simulate_plan
from planner.scaled import scaled_plan, simulated_step_s
from tests.planner.restricted import planned, problems


@pytest.mark.parametrize(("hosts", "chunks"), [(False, False), (True, False), (False, True)])
@given(data=st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_step_with_other_seconds_is_the_simulators(hosts, chunks, data):
    plan = planned(data.draw(problems(most_layers=5, most_devices=3, hosts=hosts, chunks=chunks)))
    if plan is None:
        return
    ratios = st.floats(0.25, 4.0)
    of_stages, link = data.draw(st.lists(ratios, min_size=plan.K, max_size=plan.K)), data.draw(ratios)
    other = scaled_plan(plan, [*map(PassRatios.alike, of_stages)], link, of_stages)
    assert simulated_step_s(other) == pytest.approx(simulate_plan(other).step_s)
    assert simulated_step_s(plan) == pytest.approx(plan.prediction.step_s)
    alike = scaled_plan(plan, [PassRatios.alike(link)] * plan.K, link, [link] * plan.K)
    assert simulated_step_s(alike) == pytest.approx(link * plan.prediction.step_s)
