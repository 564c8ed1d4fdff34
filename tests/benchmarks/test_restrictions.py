"""Hundreds of problems, larger ones, too: none has a restriction with a better plan.

make bench     # or EXAMPLES=50 python -m pytest -m benchmark tests/benchmarks/test_restrictions.py
"""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planner.block_models import block_model, restrictions_of_blocks
from tests.planner.long_chains import long_chain, restrictions_of_chain
from tests.planner.restricted import check_against, check_restrictions, cut_short, problems

pytestmark = pytest.mark.benchmark
EXAMPLES = int(os.environ.get("EXAMPLES", "400"))  # of each of the six kinds, and of long chains
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize(("hosts", "chunks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("short", [False, True])
@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=SUPPRESSED)
def test_no_restriction_has_a_better_plan(short: bool, hosts: bool, chunks: bool, data: st.DataObject) -> None:
    with cut_short(data.draw(st.integers(0, 2**16)) if short else None):
        check_restrictions(data.draw(problems(most_layers=12, most_devices=6, hosts=hosts, chunks=chunks)), data)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_no_restriction_of_a_long_chain_has_a_better_plan(seed: int) -> None:
    problem = long_chain(seed)
    check_against(problem, random.Random(seed).choice([*restrictions_of_chain(problem)]))


@pytest.mark.parametrize("seed", range(EXAMPLES // 10))
def test_no_restriction_of_equal_blocks_has_a_better_plan(seed: int) -> None:
    """Of all M on up to 64 devices: searches that mostly end before all is proven."""
    problem = block_model(seed)
    check_against(problem, random.Random(seed).choice([*restrictions_of_blocks(problem)]))
