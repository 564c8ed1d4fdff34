"""A plan by the problem that it was made for takes what it says, whatever devices of several hosts it leaves out."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import plan_from_profile
from planner.planned_for import as_it_is_s, problem_of
from profiler.device import Cluster, Device, Link
from tests.planner.made_up import build_profile
from tests.planner.restricted import planned, problems

CLOSE = 1e-9
NEAR, FAR = Link(latency_s=0.0, bytes_per_s=1024.0), Link(latency_s=0.5, bytes_per_s=8.0)


@pytest.mark.parametrize("chunks", [False, True])
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_plan_over_hosts_takes_what_it_says(chunks, data):
    asked = data.draw(problems(most_layers=6, most_devices=5, hosts=True, chunks=chunks))
    plan = planned(asked)
    if plan is not None:
        assert_devices_are_where_it_says(plan, asked.devices)
        found = as_it_is_s(problem_of(plan, asked.profile, asked.devices), plan)
        assert found == pytest.approx(plan.prediction.step_s, rel=CLOSE)


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
    assert as_it_is_s(problem_of(plan, profile), plan) == pytest.approx(plan.prediction.step_s, rel=CLOSE)
    assert "limits the step" in str(plan.explain(profile=profile))
