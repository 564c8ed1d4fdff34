"""The balancer against brute force over every choice that it has, judged by the simulator.

`test_brute_force.py` and `make bench` try more problems, with an oracle that is compiled.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem, plan_from_profile
from planner.solve import balancer
from planner.solve.host_search import best_plan
from profiler.device import Link
from profiler.errors import InfeasibleError

CLOSE = 1e-9


def draw_devices(data, device, oracle, profile, batch_size, most=3):
    """Some devices with memories around what some stages need, so that limits bind."""
    kinds = data.draw(
        st.lists(st.sampled_from(sorted({cost.device_kind for cost in profile.costs})), min_size=1, max_size=most),
        label="kinds",
    )
    roomy = oracle(profile, tuple(device(kind) for kind in kinds), batch_size)
    memories = {}
    for kind in sorted(set(kinds)):
        first = data.draw(st.integers(0, len(profile.layers) - 1))
        stop = data.draw(st.integers(first + 1, len(profile.layers)))
        sizes = [2] * (batch_size // 2)
        segments = [(first, stop)] if data.draw(st.booleans()) else []
        needed = roomy.memory(kind, first, stop, sizes, sizes, segments)
        memories[kind] = max(1, int(needed) + data.draw(st.integers(-2, 20)))
    own = data.draw(st.lists(st.integers(0, 30), min_size=len(kinds), max_size=len(kinds)))
    alike = data.draw(st.booleans())
    return tuple(device(kind, memories[kind] + (0 if alike else more)) for kind, more in zip(kinds, own, strict=True))


def check(profile, devices, best_s, *, proven=True, **asked):
    """The plan takes `best_s`, or there is none."""
    if best_s is None:
        with pytest.raises(InfeasibleError):
            plan_from_profile(profile, devices, **asked)
        return
    plan = plan_from_profile(profile, devices, **asked)
    assert plan.prediction.step_s == pytest.approx(best_s, rel=CLOSE)
    assert plan.prediction.gap == 0 or (not proven and plan.prediction.lower_bound_s <= plan.prediction.step_s)
    assert all(stage.memory.total <= device.memory_bytes for stage in plan.stages for device in stage.devices)


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize(("devices", "count"), [(1, 4), (1, 5), (1, 6), (1, 7), (2, 8), (3, 12)])
def test_of_two_schedules_that_are_as_fast_the_one_that_keeps_less_is_taken(profile_of, device, devices, count):
    """One stage, or equal ones without messages: GPipe is never slower than 1F1B there, nor faster."""
    profile = profile_of({("a", 1): [(1.0, 1.0, 2.0, 10, 0, 0, 0)] * devices})
    asked = {"batch_size": count, "micro_batches": count, "stages": devices}
    devices = [device("a", 10_000)] * devices
    plans = {name: plan_from_profile(profile, devices, **asked, schedule=name) for name in ("gpipe", "1f1b", "auto")}
    assert plans["gpipe"].prediction.step_s == plans["1f1b"].prediction.step_s
    assert plans["auto"].schedule == "1f1b"
    assert plans["1f1b"].stages[0].memory.total < plans["gpipe"].stages[0].memory.total


@given(st.data())
@settings(max_examples=12, suppress_health_check=SLOW)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_balancer_finds_the_optimum_of_every_fixed_m(profiles, oracle, device, schedule, data):
    profile = data.draw(profiles(most_layers=6))
    batch_size, count = data.draw(st.sampled_from([(4, 4), (8, 4), (8, 8), (10, 5), (12, 4), (12, 6), (12, 12)]))
    devices = draw_devices(data, device, oracle, profile, batch_size)
    mode = data.draw(st.sampled_from(["auto", "auto", "always", "never"]))
    per_stage = data.draw(st.sampled_from([1, 2, 4]))
    best_s = oracle(profile, devices, batch_size, mode, per_stage, (schedule,)).best_step_s([count])
    check(
        profile,
        devices,
        best_s,
        batch_size=batch_size,
        micro_batches=count,
        recompute=mode,
        schedule=schedule,
        micro_batches_per_stage=per_stage,
    )


@given(st.data())
@settings(max_examples=16, suppress_health_check=SLOW)
def test_balancer_finds_the_optimum_over_everything(profiles, oracle, device, data):
    profile = data.draw(profiles(most_layers=4))
    batch_size = data.draw(st.integers(2, 8))
    devices = draw_devices(data, device, oracle, profile, batch_size, most=4)
    best_s = oracle(
        profile, devices, batch_size, "auto", 1, ("gpipe", "1f1b"), tuple(range(1, len(devices) + 1))
    ).best_step_s()
    # of one kind and unlike memory, replicas are searched for by themselves: that none fit is not proven there
    check(
        profile,
        devices,
        best_s,
        proven=len({(one.kind, one.memory_bytes) for one in devices}) == len({one.kind for one in devices}),
        batch_size=batch_size,
        schedule="auto",
        replicas="auto",
        micro_batches_per_stage=1,
    )


@given(st.data())
@settings(max_examples=8, suppress_health_check=SLOW)
def test_segments_of_a_long_stage(profiles, oracle, device, data):
    profile = data.draw(profiles(most_layers=9, kinds=("a",), sizes=(1, 8)))
    devices = draw_devices(data, device, oracle, profile, 8, most=1)[:1]
    best_s = oracle(profile, (device("a", devices[0].memory_bytes),), 8).best_step_s([4])
    check(profile, [device("a", devices[0].memory_bytes)], best_s, batch_size=8, micro_batches=4, schedule="gpipe")


@given(st.data())
@settings(max_examples=16, suppress_health_check=[*SLOW, HealthCheck.filter_too_much])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_plan_below_a_limit_is_found_where_there_is_one(profiles, oracle, device, schedule, data):
    """What the report says of other schedules and rules is looked for only if it takes less than the plan at hand."""
    profile = data.draw(profiles(most_layers=6))
    devices = draw_devices(data, device, oracle, profile, 8)
    asked: Any = {"schedule": schedule, "micro_batches_per_stage": 1}
    if schedule == "interleaved":
        assume(len(profile.layers) > 3 and len(devices) > 1)
        asked["chunks"] = 2
    problem = make_problem(profile, devices, batch_size=8, optimizer=None, settings=asked)
    whole = best_plan(problem)
    if whole is None:
        assert best_plan(replace(problem, below_s=1e6)) is None
        return
    best_s = whole.prediction.step_s
    found = best_plan(replace(problem, below_s=best_s * (1 + 1e-6)))
    assert found is not None
    assert found.prediction.step_s <= best_s * (1 + 1e-6)
    share = data.draw(st.sampled_from([0.3, 0.7, 1 - 1e-6]))
    none = best_plan(replace(problem, below_s=best_s * share))
    assert none is None or none.prediction.step_s >= whole.prediction.lower_bound_s * (1 - CLOSE)


def test_without_time_the_roomiest_candidate_comes_first(profile_of, device, monkeypatch):
    """Eight replicas have the best bounds and never fit: 70B on 64 devices took 130 s of 10 until there was a plan."""
    row = [1.0, 1.0, 2.0, 10, 0, 1, 1]
    profile = profile_of(
        {("a", size): [[value * size for value in row]] * 8 for size in (1, 4)},
        parameters=[(100, True)] * 8,
        readers=[(layer,) for layer in range(8)],
        links=(Link(latency_s=0.0, bytes_per_s=1e6),),
    )
    tried = []
    dive = balancer._Balancer._dive

    def watched(self: Any, part: Any) -> Any:
        tried.append(part)
        return dive(self, part)

    monkeypatch.setattr(balancer._Balancer, "_dive", watched)
    asked: Any = {"batch_size": 64, "replicas": "auto", "schedule": "1f1b", "micro_batches_per_stage": 1}
    plan = plan_from_profile(profile, [device("a", 600)] * 8, time_limit_s=1e-9, **asked)
    assert (plan.replicas, tried[0].candidate.replicas, len(tried)) == (1, 1, 1)
    tried.clear()
    assert plan_from_profile(profile, [device("a", 600)] * 8, **asked).prediction.step_s <= plan.prediction.step_s
    assert tried[0].candidate.replicas > 1
