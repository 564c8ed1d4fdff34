"""Unlike devices that are taken for equal, on problems so small that every plan can be tried."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.keywords import SettingKeywords
from planner.solve import many_devices
from planner.solve.balancer import balance
from planner.solve.many_devices import balance_any, with_fewer_classes
from planner.solve.parts import Part
from profiler.device import Link
from tests.planner.made_up import most_held

CLOSE = 1e-9
FUNCTION_SCOPED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def few_told_apart(monkeypatch):
    """Two unlike devices are told apart, three are not."""
    monkeypatch.setattr(many_devices, "FEW_COMBINATIONS", 4)
    monkeypatch.setattr(many_devices, "MOST_COMBINATIONS", 4)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=FUNCTION_SCOPED)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plans_of_merged_classes_lie_between_their_bound_and_the_best_of_all(profiles, oracle, device, schedule, data):
    profile = data.draw(profiles(most_layers=5))
    mode = data.draw(st.sampled_from(["auto", "never"]))
    memory_bytes = data.draw(st.integers(100, 1500))
    kinds = data.draw(st.sampled_from([("a", "a", "a"), ("a", "a", "b"), ("a", "b", "b")]))
    devices = [device(kind, memory_bytes + 40 * index) for index, kind in enumerate(kinds)]
    asked: SettingKeywords = {"micro_batches": 4, "recompute": mode, "schedule": schedule, "micro_batches_per_stage": 1}
    problem = make_problem(profile, devices, batch_size=8, optimizer=None, settings=asked)
    assert len(problem.classes) == 3
    assert len(with_fewer_classes(problem).classes) < 3
    best_s = oracle(profile, tuple(devices), 8, mode, 1, (schedule,)).best_step_s([4])
    found = balance_any(problem)
    if best_s is None or found is None:
        assert found is None  # as small as its smallest a class may hold no plan, though there is one
        return
    assert found.step_s >= best_s * (1 - CLOSE)
    assert found.lower_bound_s <= best_s * (1 + CLOSE)
    used = [stage.device_class for stage in found.stages]
    assert len(set(used)) == len(used), "a device runs one stage"
    known = oracle(profile, tuple(devices), 8, mode, 1, (schedule,))
    for stage, one in enumerate(found.stages):
        held = [2] * most_held(schedule, len(used) - stage, 4)
        segments = [(segment.first, segment.stop) for segment in one.segments]
        own = problem.classes[one.device_class].device
        assert known.memory(own.kind, one.first, one.stop, [2] * 4, held, segments) <= own.memory_bytes + CLOSE


def test_what_can_be_told_apart_is_solved_as_it_is(profile_of, device):
    rows = {("a", size): [(1.0, 1.0, 1.0, 10 * size, 0, 2, 2)] * 4 for size in (1, 4)}
    devices = [device("a", 1000), device("a", 2000)]
    asked: SettingKeywords = {"micro_batches": 4, "micro_batches_per_stage": 1}
    problem = make_problem(profile_of(rows), devices, batch_size=4, optimizer=None, settings=asked)
    assert with_fewer_classes(problem).classes == problem.classes
    assert balance_any(problem) == balance(problem)


def test_no_bound_forgets_what_was_not_searched(profile_of, device):
    """Where time was up before a plan, the bound of other schedules' plans was returned as one of all."""
    rows = {("a", size): [[0.25 * size, 0.25 * size, 0.5 * size, 10, 4, 8, 8]] * 6 for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    devices = [device("a", 10_000 + more) for more in range(3)]
    problem = make_problem(profile, devices, batch_size=32, optimizer=None, settings={"schedule": "1f1b"})
    best = balance_any(problem)
    assert best is not None
    reached = replace(best, step_s=2 * best.step_s, lower_bound_s=2 * best.step_s)
    late = replace(problem, dispensable=True, settings=replace(problem.settings, time_limit_s=1e-9))
    found = balance_any(late, reached)
    assert found is not None
    assert found.lower_bound_s <= best.step_s


def test_replicas_of_a_stage_are_on_devices_that_are_equal_indeed(profile_of, device):
    """Of 1,024 devices with four memories one class was made, and 1,024 replicas found that no such devices can run."""
    rows = {("a", size): [[0.5 * size, 0.0, 1.0 * size, 10 * size, 4, 8, 8]] * 2 for size in (1, 2, 4)}
    devices = [device("a", 10_000)] * 32 + [device("a", 5_000 + more) for more in range(8)]
    asked: SettingKeywords = {"replicas": "auto", "micro_batches_per_stage": 1, "schedule": "gpipe"}
    problem = make_problem(profile_of(rows), devices, batch_size=160, optimizer=None, settings=asked)
    assert len(with_fewer_classes(problem).classes) < len(problem.classes)
    found = balance_any(problem)
    fixed = balance_any(replace(problem, settings=replace(problem.settings, replicas=32)))
    assert found is not None
    assert fixed is not None
    assert found.step_s <= fixed.step_s


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_part_has_as_many_devices_of_a_merged_class_as_it_says(profile_of, device, monkeypatch, replicas):
    """With 9 memories of 2 devices each a plan had more stages on a class than that has devices: an IndexError."""
    monkeypatch.setattr(many_devices, "FEW_COMBINATIONS", 30)
    monkeypatch.setattr(many_devices, "MOST_COMBINATIONS", 30)
    rows = {("a", size): [[0.5 * size, 0.0, 1.0 * size, 10 * size, 4, 8, 8]] * 6 for size in (1, 2, 4)}
    devices = [device("a", 5_000 + more) for more in range(4) for _ in range(2)]
    asked: SettingKeywords = {
        "replicas": replicas,
        "micro_batches": 4,
        "micro_batches_per_stage": 1,
        "schedule": "1f1b",
    }
    problem = with_fewer_classes(make_problem(profile_of(rows), devices, batch_size=8, optimizer=None, settings=asked))
    assert [bool(group.alike) for group in problem.classes] == [True, True]
    (candidate,) = problem.candidates()
    for part in Part(candidate).parts(problem):
        for smallest in part.parts(problem):
            room = [group.capacity(replicas) for group in smallest.problem(problem).classes]
            assert sorted(room) == sorted(number for number in smallest.devices or () if number)
