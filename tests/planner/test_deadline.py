"""A search that is out of time says no more than it knows."""

import numpy as np
import pytest

from planner.from_profile import make_problem
from planner.kernel.candidate_stages import make_arcs
from planner.kernel.front import before_bounds, step_bound_s
from planner.kernel.search import search
from planner.settings import SettingKeywords
from planner.solve.deadline import UNLIMITED, Deadline
from planner.solve.segment_choices import SegmentChoices, WorkBudget
from planner.solve.tables import make_tables
from profiler.device import Link


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_search_without_time_has_the_bound_of_its_stages(profile_of, device, schedule):
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 12 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: SettingKeywords = {"schedule": schedule, "micro_batches": 21}
    problem = make_problem(profile, [device()] * 4, batch_size=32, optimizer=None, settings=asked)
    tables = make_tables(problem, next(problem.candidates()))
    arcs = make_arcs(tables, np.inf)
    before = before_bounds(arcs)
    choices = SegmentChoices(tables, arcs, Deadline(None), WorkBudget()).known()
    whole = search(arcs, before, choices, np.inf, 100, 1, False, UNLIMITED)
    short = search(arcs, before, choices, np.inf, 100, 1, False, 0)
    assert len(whole.objective_s) == 1
    assert whole.dropped_s == np.inf
    assert short.work < whole.work
    assert short.dropped_s <= whole.objective_s[0] * (1 + 1e-12)
    assert short.dropped_s == step_bound_s(arcs, before[0, -1])


def test_a_deadline_that_is_over_leaves_no_labels():
    assert Deadline(1e-9).labels == 0
    assert Deadline(1e-9).over
    assert not Deadline(None).over
    assert Deadline(None).labels == UNLIMITED
