"""Thousands of small problems against every plan: L <= 9, K <= 4, M <= 8, limits that bind, unlike devices, segments.

make bench
"""

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from tests.benchmarks.kept_rows import kept
from tests.benchmarks.small_problems import Compared, compared

PROBLEMS, FIRST_SEED = 2000, 1000


@pytest.mark.benchmark
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plans_are_the_best_of_all_plans(schedule):
    start_s = time.monotonic()
    found = [
        Compared(**kept(f"{schedule} {seed}", partial(compared_fields, seed, schedule)))
        for seed in range(FIRST_SEED, FIRST_SEED + PROBLEMS)
    ]
    seconds = time.monotonic() - start_s
    fit = [one for one in found if one.fits]
    open_gaps = sorted(one.gap for one in fit if one.gap > 0)
    print(
        f"\n{schedule}: {PROBLEMS} problems, {sum(one.plans for one in found)} plans, {len(fit)} problems with a plan, "
        f"{len(fit) - len(open_gaps)} of them proven the best, the others with gaps of up to "
        f"{max(open_gaps, default=0):.2%}; {seconds:.0f} s"
    )
    assert len(fit) > PROBLEMS / 2
    assert len(open_gaps) < len(fit) / 100


def compared_fields(seed: int, schedule: str) -> dict[str, Any]:
    """`compared`, as rows are kept."""
    return asdict(compared(seed, schedule))
