"""The nearest plan when nothing fits, against every plan that there is; unlike devices merged, against all orders."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.kernel.least_overflow import equal_segments, least_bad
from planner.kernel.segments import INSIDE, START, StageCosts
from planner.keywords import SettingKeywords
from planner.solve.segment_choices import segments_of
from planner.solve.tables import make_tables
from tests.planner.made_up import most_held

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(st.data())
@settings(max_examples=30, suppress_health_check=SLOW)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_plan_overflows_less(profiles, oracle, device, schedule, data):
    """With recompute of all or nothing a stage has at most two choices, so the best of all plans is quickly found."""
    profile = data.draw(profiles(most_layers=5))
    mode = data.draw(st.sampled_from(["always", "never"]))
    count = data.draw(st.sampled_from([2, 4]))
    kinds = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3))
    devices = [device(kind, data.draw(st.integers(1, 3000))) for kind in kinds]
    asked: SettingKeywords = {
        "micro_batches": count,
        "recompute": mode,
        "schedule": schedule,
        "micro_batches_per_stage": 1,
    }
    problem = make_problem(profile, devices, batch_size=2 * count, optimizer=None, settings=asked)
    found = least_bad(make_tables(problem, next(problem.candidates())))

    known = oracle(profile, tuple(devices), 2 * count, mode, 1, (schedule,))
    sizes, layers = [2] * count, len(profile.layers)

    def over_bytes(cuts, order):
        stages = list(itertools.pairwise(cuts))
        return max(
            known.memory(
                one.kind,
                *span,
                sizes,
                sizes[: most_held(schedule, len(stages) - stage, count)],
                known.patterns(*span)[0],
            )
            - one.memory_bytes
            for stage, (span, one) in enumerate(zip(stages, order, strict=True))
        )

    best = min(
        over_bytes((0, *inner, layers), order)
        for stages in range(1, min(len(devices), layers, count) + 1)
        for inner in itertools.combinations(range(1, layers), stages - 1)
        for order in set(itertools.permutations(devices, stages))
    )
    assert found.over_bytes == pytest.approx(best, abs=1e-6)
    order = [problem.classes[one].device for one in found.classes]
    assert over_bytes(tuple(int(cut) for cut in found.cuts), order) == pytest.approx(best, abs=1e-6)
    assert all((found.parts > 0) == (mode == "always"))


@given(st.data())
@settings(max_examples=15, suppress_health_check=SLOW)
def test_more_freedom_overflows_no_more(profiles, device, data):
    """With segments to choose the nearest plan is at least as near as with all stages recomputed, or none."""
    profile = data.draw(profiles(most_layers=6, kinds=("a",)))
    devices = [device("a", data.draw(st.integers(1, 300)))] * data.draw(st.integers(1, 3))

    def over_bytes(mode):
        asked: SettingKeywords = {"micro_batches": 4, "recompute": mode, "micro_batches_per_stage": 1}
        problem = make_problem(profile, devices, batch_size=8, optimizer=None, settings=asked)
        return least_bad(make_tables(problem, next(problem.candidates()))).over_bytes

    assert over_bytes("auto") <= min(over_bytes("always"), over_bytes("never"))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 9))
def test_equal_segments_cover_the_stage(kept, parts):
    sums = np.concatenate(([0.0], np.cumsum(kept, dtype=np.float64)))
    nothing = np.zeros(len(sums))
    costs = StageCosts(sums, nothing, sums, nothing[1:], nothing, nothing)
    pattern = equal_segments(costs, 0, len(kept), parts)
    if parts == 0:
        assert not pattern.any()
        return
    assert pattern[0] == START
    assert set(pattern) <= {INSIDE, START}
    most = sums[-1] / parts
    segments = segments_of(pattern, 0)
    assert segments[-1].stop == len(kept)
    for segment in segments:  # larger than its part only where one layer alone is
        size = sums[segment.stop] - sums[segment.first]
        assert size <= most * (1 + 1e-9) or segment.stop == segment.first + 1


def test_rules_that_leave_no_plan_are_infinitely_bad(profile_of, device):
    rows = {("a", size): [(1, 1, 1, 10, 0, 2, 2)] * 4 for size in (1, 2)}
    asked: SettingKeywords = {"stages": 2, "micro_batches": 2, "micro_batches_per_stage": 1}
    problem = make_problem(profile_of(rows), [device("a")] * 2, batch_size=2, optimizer=None, settings=asked)
    tables = make_tables(problem, next(problem.candidates()))
    nowhere = tables.allowed.copy()
    nowhere[1:-1] = False
    found = least_bad(tables._replace(allowed=nowhere))
    assert np.isinf(found.over_bytes)
    assert len(found.classes) == 0
