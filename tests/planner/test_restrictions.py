"""No restriction of a problem has a better plan than the problem, also where searches are cut off.

The limits of the searches are made so small that they bind on small problems; `make bench` tries many more.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planner.restricted import check_refusal, check_restrictions, cut_short, problems

FUNCTION_SCOPED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize(("hosts", "chunks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("short", [False, True])
@given(data=st.data())
@settings(max_examples=6, suppress_health_check=FUNCTION_SCOPED)
def test_no_restriction_has_a_better_plan(short, hosts, chunks, data):
    with cut_short(data.draw(st.integers(0, 2**16)) if short else None):
        check_restrictions(data.draw(problems(most_layers=6, most_devices=4, hosts=hosts, chunks=chunks)), data)


@pytest.mark.parametrize(
    ("more", "most_devices"), [({}, 8), ({"chunks": True}, 6), ({"hosts": True}, 4)], ids=["ranks", "chunks", "hosts"]
)
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=FUNCTION_SCOPED)
def test_what_is_refused_has_no_plan_over_fewer_ranks(more, most_devices, data):
    check_refusal(data.draw(problems(most_layers=9, most_devices=most_devices, tight=True, **more)), data)
