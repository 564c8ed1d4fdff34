"""Hundreds of searches that are out of time, on larger problems, too: no plan is faster than the bound that they state.

make bench     # or EXAMPLES=50 python -m pytest -m benchmark tests/benchmarks/test_short_limits.py
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planner.restricted import check_short_limit, cut_short, problems

pytestmark = pytest.mark.benchmark
EXAMPLES = int(os.environ.get("EXAMPLES", "400"))  # of each of the six kinds
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize(("hosts", "chunks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("short", [False, True])
@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=SUPPRESSED)
def test_no_plan_is_faster_than_the_bound_of_a_search_out_of_time(
    short: bool, hosts: bool, chunks: bool, data: st.DataObject
) -> None:
    problem = data.draw(problems(most_layers=12, most_devices=6, hosts=hosts, chunks=chunks))
    with cut_short(data.draw(st.integers(0, 2**16)) if short else None):
        check_short_limit(problem, data)
