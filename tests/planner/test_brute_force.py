"""Plans of small problems equal the best of all plans, each walked through; thousands more in `make bench`."""

import numpy as np
import pytest

from planner.plan.actions import make_schedule
from planner.plan.simulator import Durations, simulate
from tests.benchmarks.exhaustive import action_table, walk_s
from tests.benchmarks.small_problems import compared


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_walk_is_the_simulators(name):
    random = np.random.default_rng(1)
    for _ in range(100):
        stages, count = int(random.integers(1, 5)), int(random.integers(1, 9))
        busy, sizes = random.random((5, stages, 2)), np.sort(random.integers(0, 2, count))
        which = int(random.integers(2**stages))
        recompute = [bool(which >> stage & 1) for stage in range(stages)]
        busy[1] *= np.array(recompute)[:, None]
        durations = Durations(*(tuple(map(tuple, table[:, sizes].tolist())) for table in busy))
        schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=recompute)
        expected_s = simulate(schedule, durations).makespan_s
        assert walk_s(action_table(name, stages, count)[which], busy, sizes) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plans_are_the_best_of_all(schedule):
    found = [compared(seed, schedule) for seed in range(60)]
    assert sum(one.fits for one in found) > 40
    assert all(one.gap == 0 for one in found)
