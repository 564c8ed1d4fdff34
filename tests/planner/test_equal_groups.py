"""Replicas on devices that differ in memory alone: what is planned, and that a smaller limit makes no more possible."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import Plan
from planner.from_profile import make_problem, plan_from_profile
from planner.keywords import SettingKeywords
from planner.solve.equal_groups import with_equal_groups
from planner.solve.problem import Problem
from profiler.device import Link
from profiler.errors import InfeasibleError
from tests.planner.made_up import build_profile

ROWS = {
    ("a", size): [[float(size)] * 3 + [size] * 4] * 3 + [[float(size)] * 3 + [size] * 2 + [0, 0]] for size in (1, 2)
}


def profile_of_four():
    return build_profile(ROWS, links=(Link(latency_s=0.0, bytes_per_s=1000.0),))


def test_a_byte_less_forbids_no_replicas(device):
    """Four devices of 1000 to 1003 bytes had one replica, 36 s, proven, and with a limit of 1000 bytes two, 32 s."""
    devices = [device(memory_bytes=size) for size in (1000, 1001, 1002, 1003)]
    profile = profile_of_four()
    asked: list[SettingKeywords] = [
        {"replicas": "auto"},
        {"replicas": 2},
        {"replicas": "auto", "memory_limit": 1000},
        {"replicas": 2, "memory_limit": 1000},
    ]
    plans = [
        plan_from_profile(profile, devices, batch_size=8, **(one | {"micro_batch_sizes": [1]}))  # of either size
        for one in asked
    ]
    assert {plan.replicas for plan in plans} == {2}
    assert len({plan.prediction.step_s for plan in plans}) == 1
    assert {plan.prediction.gap for plan in plans} == {0.0}
    of_own = plans[0]
    for stage in of_own.stages:
        assert len({one.memory_bytes for one in stage.devices}) == 1
    assert Plan.model_validate_json(of_own.to_json()) == of_own


def test_devices_of_two_kinds_are_no_replicas(device):
    profile = build_profile(
        ROWS | {("b", size): table for (_, size), table in ROWS.items()},
        links=(Link(latency_s=0.0, bytes_per_s=1000.0),),
    )
    with pytest.raises(InfeasibleError, match="needs 2 devices of one kind; 1 of 'a', 1 of 'b' make 0 such groups"):
        plan_from_profile(profile, [device("a"), device("b")], batch_size=8, micro_batch_sizes=[1], replicas=2)


def problem_of(device, memories: Sequence[int]) -> Problem:
    return make_problem(
        profile_of_four(), [device(memory_bytes=size) for size in memories], batch_size=12, optimizer=None, settings={}
    )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(2, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_groups_have_more_memory(device, memories, replicas):
    """However devices go together, sorted by the least of each these groups have as much as any."""
    equal = with_equal_groups(problem_of(device, memories), replicas)
    own = sorted(
        (one.device.memory_bytes for one in equal.classes for _ in range(one.capacity(replicas))), reverse=True
    )
    assert len(own) == len(memories) // replicas
    assert all(now.memory_bytes <= had for now, had in zip(equal.devices, memories, strict=True))
    for order in itertools.islice(itertools.permutations(memories), 200):
        groups = [order[first : first + replicas] for first in range(0, len(own) * replicas, replicas)]
        others = sorted(map(min, groups), reverse=True)
        assert all(one >= other for one, other in zip(own, others, strict=True))
