"""A plan by the problem that it was made for takes what it says, whatever devices of several hosts it leaves out."""

import math
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import plan_from_profile
from planner.from_profile import make_problem
from planner.plan.plan import Plan
from planner.planned_for import as_it_is_s, evaluated, own_positions, problem_of
from planner.solve.equal_groups import groupings, with_equal_groups
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, ForeignPlanError
from tests.planner.made_up import build_profile
from tests.planner.restricted import planned, problems

CLOSE = 1e-9
NEAR, FAR = Link(latency_s=0.0, bytes_per_s=1024.0), Link(latency_s=0.5, bytes_per_s=8.0)


@pytest.mark.parametrize("chunks", [False, True])
@given(data=st.data(), one_link=st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_plan_over_hosts_takes_what_it_says(chunks, data, one_link):
    """Also where all devices have one link, and in a file that does not say where they are."""
    asked = data.draw(problems(most_layers=6, most_devices=5, hosts=True, chunks=chunks))
    asked = replace(asked, devices=asked.devices.model_copy(update={"between": None})) if one_link else asked
    plan = planned(asked)
    if plan is None:
        return
    assert_devices_are_where_it_says(plan, asked.devices)
    unsaid = plan.model_copy(update={"positions": (), "devices_per_host": None})
    even = (
        not asked.devices.has_several_hosts or len(asked.devices.devices) % (asked.devices.devices_per_host or 1) == 0
    )
    for one in (plan, unsaid) if even else (plan,):  # whoever puts the last host first says so
        found = as_it_is_s(problem_of(one, asked.profile, asked.devices), one)
        assert found == pytest.approx(plan.prediction.step_s, rel=CLOSE)
    if asked.devices.has_unlike_links:
        own = own_positions(problem_of(plan, asked.profile, asked.devices), plan)
        assert tuple(map(tuple, own)) == plan.positions


@pytest.mark.parametrize(("memory", "one_link"), [([3500, 8000, 3500], True), ([3500, 3500, 8000, 3500], False)])
def test_replicas_that_are_chosen_on_unlike_memory_are_explained(memory, one_link):
    """Two of equal devices beside a third one were refused as no devices of the plan's cluster."""
    rows = {("a", size): [[size, size, size, 4, 0, 40, 40], [size, size, size, 4, 0, 0, 0]] for size in (1, 8)}
    profile = build_profile(rows, parameters=[(64, True)], readers=[[0]] * 2)
    cluster = on_hosts(memory, 2)
    cluster = cluster.model_copy(update={"between": None}) if one_link else cluster
    plan = plan_from_profile(profile, cluster, batch_size=8, replicas="auto", micro_batches_per_stage=1, stages=1)
    assert plan.replicas > 1
    assert as_it_is_s(problem_of(plan, profile), plan) == pytest.approx(plan.prediction.step_s, rel=CLOSE)


@pytest.mark.parametrize("pinned", [{"blocks.0": 0, "blocks.7": 3}, {"blocks.0": 3, "blocks.7": 0}])
def test_pinned_layers_over_hosts_are_explained(pinned):
    """The plan was refused as one of another cluster, as it is on no devices after each other."""
    plan = pinned_plan(pinned)
    explained = plan.explain()
    problem = problem_of(plan, plan.profile)
    assert as_it_is_s(problem, plan) == pytest.approx(plan.prediction.step_s, rel=CLOSE)
    for stage in range(plan.K - 1):
        cuts = [one.stop_layer + (place == stage) for place, one in enumerate(plan.stages[:-1])]
        said = explained["cut_later_s"][stage]
        assert math.isnan(said) == (plan.stages[stage + 1].stop_layer == cuts[stage])  # nothing would be left of it
        own_s = evaluated(problem, plan, cuts, lambda first, stop: ()).step_s
        assert math.isnan(said) or said == pytest.approx(own_s, rel=CLOSE)


def pinned_plan(pinned):
    rows = {("a", 1): [[1.0, 1.0, 1.0, 4, 0, sent, sent] for sent in (40, 40, 1, 1, 40, 40, 40, 0)]}
    profile = build_profile(rows, parameters=[(64, True)], readers=[[0]] * 8)
    asked: dict[str, Any] = {"batch_size": 8, "micro_batches_per_stage": 1, "recompute": "never", "schedule": "1f1b"}
    return plan_from_profile(profile, on_hosts([10**9] * 4, 2), stages=3, pinned=pinned, **asked)


def test_who_sends_nothing_between_hosts_must_say_what_is_between_them():
    """Its step agreed with the profile's one link, over which other cuts were priced: 33.5 s for 221.2."""
    rows = {("a", 1): [[1.0, 1.0, 1.0, 4, 0, 0, 0], [1.0, 1.0, 1.0, 4, 0, 40, 40], [1.0, 1.0, 1.0, 4, 0, 0, 0]]}
    profile = build_profile(rows, parameters=[(64, True)], readers=[[0], [], []], links=(NEAR,))
    cluster = on_hosts([10**9] * 2, 1)
    asked: dict[str, Any] = {"batch_size": 8, "micro_batches_per_stage": 1, "cut_at": ["blocks.1"], "stages": 2}
    plan = plan_from_profile(profile, cluster, schedule="1f1b", **asked)
    loaded = Plan.model_validate_json(plan.to_json())
    with pytest.raises(ArgumentError, match="2 hosts and sends 0 bytes between them"):
        loaded.explain(profile)
    assert loaded.explain(profile, cluster).equals(plan.explain())


def test_hosts_of_other_sizes_are_other_hosts():
    plan = pinned_plan({"blocks.0": 0})
    with pytest.raises(ForeignPlanError, match="for hosts of 2 devices, and these have 3"):
        plan.explain(plan.profile, on_hosts([10**9] * 4, 3))
    unsaid = plan.model_copy(update={"positions": (), "devices_per_host": None})
    slower = on_hosts([10**9] * 4, 2).model_copy(update={"between": FAR.slowed(2)})
    with pytest.raises(ForeignPlanError, match="does not say where its devices are, and on none of these 4 devices"):
        unsaid.explain(plan.profile, slower)


def assert_devices_are_where_it_says(plan, cluster):
    """Each rank of each replica has that device, and processes are in their order."""
    if cluster.devices_per_host is None or len(cluster.devices) <= cluster.devices_per_host:
        assert (plan.positions, plan.devices_per_host) == ((), None)
        return
    for rank, positions in enumerate(plan.positions):
        kinds = [cluster.devices[position].kind for position in positions]
        assert kinds == [device.kind for device in plan.stages[rank].devices]
    at = dict(zip(chain.from_iterable(plan.processes), chain.from_iterable(plan.positions), strict=True))
    assert [at[process] for process in range(plan.ranks * plan.replicas)] == sorted(at.values())
    hosts = [position // cluster.devices_per_host for position in at.values()]
    assert plan.processes_by_host == {host: hosts.count(host) for host in sorted(set(hosts))}


@given(data=st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_other_cuts_are_priced_on_the_devices_of_the_plan(data):
    """One that was left out had a faster link to the next one: 78.75 s where 81.875 are true."""
    asked = data.draw(problems(most_layers=6, most_devices=4, hosts=True))
    asked = replace(asked, settings=asked.settings | {"schedule": "1f1b", "replicas": 1})
    roomy = (one.model_copy(update={"memory_bytes": one.memory_bytes + 10**9}) for one in asked.devices.devices)
    asked = asked.on(tuple(roomy))
    plan = planned(asked)
    if plan is None:
        return
    problem, frame = problem_of(plan, asked.profile, asked.devices), plan.explain()
    for stage in range(plan.K - 1):
        for column, change in (("cut_earlier_s", -1), ("cut_later_s", 1)):
            cuts = [one.stop_layer + change * (place == stage) for place, one in enumerate(plan.stages[:-1])]
            if not math.isnan(said := frame[column][stage]):
                assert said == pytest.approx(evaluated(problem, plan, cuts, lambda first, stop: ()).step_s, rel=CLOSE)


def test_groups_by_memory_come_first():
    """Where all devices of a kind have the least memory of them, too, those within hosts did."""
    rows = {("a", 1): [[1.0, 1.0, 1.0, 4, 0, 40, 40]] * 3 + [[1.0, 1.0, 1.0, 4, 0, 0, 0]]}
    profile = build_profile(rows, parameters=[(64, True)], readers=[[0]] * 4)
    for memory in ([900, 500], [900, 500, 500, 500], [900, 800, 500, 500]):
        problem = make_problem(profile, on_hosts(memory, 1), batch_size=8, optimizer=None, settings={"replicas": 2})
        first, *_ = groupings(problem, 2)
        assert [one.memory_bytes for one in first.devices] == [
            one.memory_bytes for one in with_equal_groups(problem, 2).devices
        ]


def on_hosts(memory, per_host):
    devices = tuple(Device(name="cpu", kind="a", memory_bytes=size) for size in memory)
    return Cluster(devices=devices, link=NEAR, between=FAR, devices_per_host=per_host)


@pytest.mark.parametrize(
    ("memory", "per_host", "chosen"),
    [
        ([10**9] * 5, 3, {"stages": 4}),  # the first device stays idle
        ([8000, 4000, 3000, 2000], 2, {"replicas": 2}),  # stages on two devices that differ in memory
    ],
    ids=["idle at the front", "unlike memory"],
)
def test_it_is_explained_over_hosts(memory, per_host, chosen):
    rows = {("a", 1): [[1.0, 1.0, 1.0, 4, 0, sent, sent] for sent in (40, 40, 1, 1, 40, 40, 40, 0)]}
    profile = build_profile(rows, parameters=[(64, True)], readers=[[0]] * 8)
    asked: dict[str, Any] = {"batch_size": 8, "micro_batches_per_stage": 1, "recompute": "never", "schedule": "1f1b"}
    plan = plan_from_profile(profile, on_hosts(memory, per_host), **asked, **chosen)
    unsaid = plan.model_copy(update={"positions": (), "devices_per_host": None})  # as in files that did not say it
    for one in (plan, unsaid):
        found = as_it_is_s(problem_of(one, profile, plan.cluster), one)
        assert found == pytest.approx(plan.prediction.step_s, rel=CLOSE)
    assert "limits the step" in str(plan.explain(profile=profile))
