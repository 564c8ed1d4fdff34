"""The planner's properties on hundreds of problems, of which `make test` takes a few.

make bench
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planner import test_balancer, test_chunk_search, test_skip_plans
from tests.planner.conftest import device, oracle, profiles

__all__ = ["device", "oracle", "profiles"]

pytestmark = pytest.mark.benchmark
OFTEN = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def inner(tested: Any) -> Any:
    """What hypothesis calls with each example."""
    return tested.hypothesis.inner_test


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(data=st.data())
@OFTEN
def test_plans_with_skips(profiles: Any, oracle: Any, device: Any, schedule: str, data: st.DataObject) -> None:
    tested = test_skip_plans.test_plans_with_skips_lie_between_their_bound_and_the_best_of_all
    inner(tested)(profiles, oracle, device, schedule, data)


@pytest.mark.parametrize("few_cuts", [0, 10**6])
@given(data=st.data())
@OFTEN
def test_plans_with_chunks(
    few_cuts: int, profiles: Any, device: Any, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    tested = test_chunk_search.test_no_plan_is_faster_than_the_bound_says_and_few_are_missed
    inner(tested)(few_cuts, profiles, device, monkeypatch, data)


@given(data=st.data())
@OFTEN
def test_the_bound_of_chunks(profiles: Any, device: Any, data: st.DataObject) -> None:
    inner(test_chunk_search.test_the_bound_is_below_every_cut)(profiles, device, data)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(data=st.data())
@OFTEN
def test_the_balancer_at_a_fixed_m(profiles: Any, oracle: Any, device: Any, schedule: str, data: st.DataObject) -> None:
    tested = test_balancer.test_balancer_finds_the_optimum_of_every_fixed_m
    inner(tested)(profiles, oracle, device, schedule, data)


@given(data=st.data())
@OFTEN
def test_the_balancer_over_everything(profiles: Any, oracle: Any, device: Any, data: st.DataObject) -> None:
    tested = test_balancer.test_balancer_finds_the_optimum_over_everything
    inner(tested)(profiles, oracle, device, data)
