"""Replicas on devices that differ in memory alone: what is planned, and that a smaller limit makes no more possible."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import Plan
from planner.from_profile import make_problem, plan_from_profile
from planner.keywords import SettingKeywords
from planner.solve import deadline, equal_groups, host_search
from planner.solve.balance import Unsettled
from planner.solve.equal_groups import best_plan, with_equal_groups
from planner.solve.problem import Problem
from profiler.device import Cluster, Link
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


LIMIT_S, LEAST_S = 100.0, 0.25
SINGLE = (2, 4)
"""R that have other groups of four unlike devices."""
Searched = tuple[Plan | None, list[tuple[int | None, float]], float]


@pytest.fixture
def searched(device, monkeypatch) -> Callable[[dict[int | None, tuple[float, float]]], Searched]:
    """The plan where the search for each R takes so long and finds such a step; cut off, it finds twice as long a one.

    Returns also the R and limits of all searches, and when the last one ended, by a made-up clock.
    """
    devices = [device(memory_bytes=size) for size in (1000, 1001, 1002, 1003)]
    asked: SettingKeywords = {"replicas": "auto", "time_limit_s": LIMIT_S, "micro_batch_sizes": [1]}
    problem = make_problem(profile_of_four(), devices, batch_size=8, optimizer=None, settings=asked)
    some = plan_from_profile(profile_of_four(), devices, batch_size=8, replicas=1, micro_batch_sizes=[1])

    def searched(of_each: dict[int | None, tuple[float, float]]) -> Searched:
        now_s, had = [0.0], []

        def found(one: Problem, unsettled: Unsettled) -> Plan | None:
            replicas, limit_s = one.settings.replicas, one.settings.time_limit_s
            needed_s, step_s = of_each[replicas]
            assert limit_s is not None
            had.append((replicas, limit_s))
            now_s[0] += min(needed_s, limit_s)
            proven = needed_s <= limit_s
            step_s, bound_s = (step_s, step_s) if proven else (2 * step_s, LEAST_S)
            if step_s == math.inf:
                unsettled.note(bound_s)
                return None
            number = {"step_s": step_s, "lower_bound_s": bound_s, "gap": step_s / bound_s - 1}
            return some.model_copy(update={"prediction": some.prediction.model_copy(update=number)})

        monkeypatch.setattr(deadline, "_now_s", lambda: now_s[0])
        monkeypatch.setattr(equal_groups, "least_s", lambda problem: LEAST_S)
        monkeypatch.setattr(host_search, "best_plan", found)
        return best_plan(problem), had, now_s[0]

    return searched


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_search_for_replicas_ends_with_a_gap_while_time_is_left(searched, data):
    """Each had a fixed share: 5.7 s of 15 were used, and the step took 1.22 s where one with replicas=1 took 0.72 s."""
    steps = st.one_of(st.floats(1.0, 100.0), st.just(math.inf))
    of_each = {one: (data.draw(st.floats(0.01, 2 * LIMIT_S)), data.draw(steps)) for one in (None, *SINGLE)}
    plan, had, ended_s = searched(of_each)
    assert ended_s <= LIMIT_S + 0.01  # some that have none left end at once
    longest_s = {one: max(had_s for other, had_s in had if other == one) for one in of_each}
    waits = [longest_s[one] for one, (needed_s, _) in of_each.items() if needed_s > longest_s[one]]
    assert LIMIT_S - ended_s <= min(waits, default=math.inf)
    best_s = min(step_s for _, step_s in of_each.values())
    if not waits:
        assert plan is None or (plan.prediction.step_s, plan.prediction.gap) == (best_s, 0)
    assert (plan is None) == (best_s == math.inf)


def test_what_some_searches_leave_is_for_those_that_were_cut_off(searched):
    plan, had, _ = searched({None: (30.0, 2.0), 2: (40.0, 1.5), 4: (1.0, 1.75)})
    assert [replicas for replicas, _ in had] == [None, 2, 4, None, 2]
    assert (plan.prediction.step_s, plan.prediction.gap) == (1.5, 0)


def test_a_plan_rules_out_replicas_that_are_not_faster(searched):
    plan, had, ended_s = searched({None: (1.0, LEAST_S), 2: (1.0, 0.1), 4: (1.0, 0.1)})
    assert [replicas for replicas, _ in had] == [None]
    assert (plan.prediction.gap, ended_s) == (0, 1.0)


@pytest.mark.parametrize(("replicas", "limit_s", "searches"), [(1, None, 2), (1, LIMIT_S, 1), ("auto", None, 1)])
def test_no_devices_are_taken_for_equal_where_one_search_has_them_all(device, monkeypatch, replicas, limit_s, searches):
    """On several hosts half the time went to devices with the least memory of their kind: a plan was refused."""
    devices = tuple(device(memory_bytes=size) for size in (1000, 1001, 1002, 1003))
    near, far = (Link(latency_s=0.0, bytes_per_s=speed) for speed in (1000.0, 100.0))
    hosts = Cluster(devices=devices, link=near, between=far, devices_per_host=2)
    asked: SettingKeywords = {"replicas": replicas, "micro_batch_sizes": [1], "time_limit_s": limit_s}
    problem = make_problem(profile_of_four(), hosts, batch_size=8, optimizer=None, settings=asked)
    had: list[Problem] = []
    monkeypatch.setattr(host_search, "best_plan", lambda one, unsettled: had.append(one))
    best_plan(problem)
    alike = [one for one in had if one.settings.replicas == problem.settings.replicas]
    assert alike[0].devices == problem.devices
    assert len(alike) == searches


def test_on_hosts_what_searches_leave_is_shared_by_those_that_follow(device, monkeypatch):
    """Each had a quarter of the limit, and what was refused after half of it had a plan."""
    near, far = (Link(latency_s=0.0, bytes_per_s=speed) for speed in (1000.0, 100.0))
    hosts = Cluster(devices=(device(),) * 4, link=near, between=far, devices_per_host=2)
    asked: SettingKeywords = {"replicas": 1, "stages": 4, "micro_batches": 4, "time_limit_s": LIMIT_S}
    asked |= {"micro_batches_per_stage": 1, "schedule": "gpipe"}
    problem = make_problem(profile_of_four(), hosts, batch_size=8, optimizer=None, settings=asked)
    had: list[float | None] = []
    monkeypatch.setattr(deadline, "_now_s", lambda: 0.0)
    monkeypatch.setattr(host_search, "balance_of_all", lambda one: had.append(one.settings.time_limit_s))
    assert best_plan(problem) is None
    assert had == [
        LIMIT_S / 4,
        LIMIT_S / 2,
        LIMIT_S / 2,
    ]  # over the faster link, the slower one, and with K and R given
