"""Of very many numbers of micro-batches some are tried, and the plan's lower bound holds for all."""

import os
from typing import Any

import numpy as np
import pytest

from planner import plan_from_profile
from planner.from_profile import make_problem
from planner.settings import Settings
from planner.solve import problem as problems
from planner.solve.counts import left_out_s
from planner.solve.problem import APART, EVERY, counts_between, counts_tried
from profiler.device import Cluster, Link
from profiler.errors import InfeasibleError

ROWS = [[0.2, 0.25, 0.5, 10, 4, 8, 8], [0.3, 0.1, 0.4, 10, 4, 8, 8], [0.1, 0.3, 0.6, 10, 4, 8, 8]]


@pytest.fixture
def profile(profile_of):
    """What each micro-batch takes besides its samples makes few large ones cheaper."""
    sizes = {("a", size): [[0.05 + cost * size for cost in row[:3]] + row[3:] for row in ROWS] for size in (1, 64)}
    return profile_of(sizes, links=(Link(latency_s=0.0, bytes_per_s=1e6),))


def settings(device, batch_size, **given):
    return Settings.of(Cluster(devices=(device(),) * 2), batch_size, given)  # type: ignore[arg-type]  # any of them


def test_up_to_a_number_all_are_tried(device):
    for share in (4, 7, 300):
        assert [*counts_tried(settings(device, share), share, 300)] == [*range(1, share + 1)]
    assert [*counts_tried(settings(device, 63_000, micro_batches=4_001), 63_000, 300)] == [4_001]


def test_beyond_neighbours_are_close_and_equal_micro_batches_are_all_there(device):
    asked = settings(device, 63_000)
    tried = [*counts_tried(asked, 63_000, EVERY)]
    assert tried == sorted(set(tried)) and len(tried) < len(counts_between(asked, 63_000)) / 3
    assert tried[-1] == counts_between(asked, 63_000)[-1]
    assert all(after / before < 1 + 2 * APART for before, after in zip(tried[EVERY:], tried[EVERY + 1 :], strict=False))
    assert {count for count in counts_between(asked, 63_000) if 63_000 % count == 0} <= {*tried}


@pytest.mark.parametrize("kinds", ["aa", "ab"])
def test_no_plan_with_one_that_is_left_out_is_below_the_bound(profile_of, device, monkeypatch, kinds):
    monkeypatch.setattr(problems, "EVERY", 8)
    monkeypatch.setattr(problems, "LEAST_EVERY", 8)
    monkeypatch.setattr(problems, "APART", 0.5)
    rows = {
        (kind, size): [[0.05 + factor * cost * size for cost in row[:3]] + row[3:] for row in ROWS]
        for kind, factor in (("a", 1.0), ("b", 1.5))
        for size in (1, 64)
    }
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    devices = [device(kind) for kind in kinds]
    problem = make_problem(profile, devices, batch_size=60, optimizer=None, settings={"schedule": "1f1b"})
    tried = {one.split.count for one in problem.candidates()}
    left_out = {count for count in range(8, 61) if count not in tried}
    assert len(left_out) > 30
    found = plan_from_profile(profile, devices, batch_size=60, schedule="1f1b")
    assert found.prediction.lower_bound_s <= left_out_s(problem)
    for count in left_out:
        other = plan_from_profile(profile, devices, batch_size=60, schedule="1f1b", micro_batches=count)
        assert other.prediction.step_s >= left_out_s(problem)


SEEDS = int(os.environ.get("COUNTS_SEEDS", "15"))
QUICK = 11  # with it a number that was left out is better
SCHEDULES_TRIED = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb": 1}


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [
        pytest.param(schedule, seed, marks=() if seed == QUICK and schedule != "zb" else pytest.mark.slow)
        for schedule in SCHEDULES_TRIED
        for seed in (range(SEEDS) if schedule != "zb" else (QUICK,))
    ],
)
def test_no_number_of_micro_batches_alone_has_a_better_plan(profile_of, device, monkeypatch, schedule, seed):
    monkeypatch.setattr(problems, "EVERY", 24)
    monkeypatch.setattr(problems, "LEAST_EVERY", 8)
    monkeypatch.setattr(problems, "APART", 1 / 8)
    draw = np.random.default_rng(seed)
    layers, overhead_s = draw.uniform(0.1, 1.0, (6, 3)), draw.choice([0.001, 0.003, 0.01])
    sizes = {
        ("a", size): [[overhead_s + cost * size for cost in row] + [10, 4, 8, 8] for row in layers]
        for size in (1, 2, 5, 16, 64)
    }
    profile = profile_of(sizes, links=(Link(latency_s=0.002, bytes_per_s=1e6),), weights=[(0.03, 4)] * 6)
    batch_size = int(draw.integers(90, 130))
    devices = [device(memory_bytes=int(draw.integers(3000, 20000))) for _ in range(4)]
    asked: dict[str, Any] = {"batch_size": batch_size, "schedule": schedule, "chunks": SCHEDULES_TRIED[schedule]}
    whole = plan_from_profile(profile, devices, **asked)
    near = [count for count in range(whole.M - 3, whole.M + 4) if 24 <= count <= batch_size]
    restricted: list[dict[str, Any]] = [
        {"micro_batches": int(count)} for count in {*draw.integers(24, batch_size, 4), *near}
    ]
    for settings_of_it in restricted:
        try:
            alone = plan_from_profile(profile, devices, **asked, **settings_of_it)
        except InfeasibleError:
            continue
        assert whole.prediction.step_s <= alone.prediction.step_s * (1 + 1e-9), settings_of_it
