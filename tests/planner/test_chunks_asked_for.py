"""Chunks with what is asked for beside them: several hosts, a number of stages or a limit of it, cuts.

Found by restricting problems at random: chunks of a rank were not added up where hosts have links of their own, and
where chunks are chosen the limit of stages was that of one chunk.
"""

import itertools
import random
import re
from typing import Any

import pytest

from planner import plan_from_profile
from planner.plan.schedules import SCHEDULES
from planner.settings import Settings
from profiler.device import Cluster, Link
from profiler.errors import ArgumentError, InfeasibleError
from tests.planner.made_up import build_profile

NEAR = Link(latency_s=0.0, bytes_per_s=1e3)
ASKED: dict[str, Any] = {"micro_batches": 8, "micro_batches_per_stage": 1}


def profile_of_layers(layers, kept=10, crossing=5, sizes=(1, 2)):
    """Equal layers whose gradients of parameters can wait."""
    rows = {
        ("a", size): [
            [size, size, 2 * size, kept * size, 0, *[crossing * size * (layer < layers - 1)] * 2]
            for layer in range(layers)
        ]
        for size in sizes
    }
    return build_profile(rows, links=(NEAR,), weights=[(0.5, 0.1)] * layers)


def hosts(device, number, memory_bytes=10**9, per_host=2):
    devices = (device("a", memory_bytes),) * number
    return Cluster(devices=devices, link=NEAR, between=NEAR.slowed(4.0), devices_per_host=per_host)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zb-v", 2)])
def test_on_several_hosts_all_chunks_of_a_rank_fit_together(device, schedule, chunks):
    """Each was held against the device alone: of 19 limits 14 had plans that needed up to 37 % more."""
    profile, planned = profile_of_layers(6), 0
    for limit in range(400, 1000, 60):
        try:
            plan = plan_from_profile(
                profile,
                hosts(device, 4, limit),
                batch_size=8,
                schedule=schedule,
                chunks=chunks,
                recompute="never",
                **ASKED,
            )
        except InfeasibleError:
            continue
        planned += 1
        assert max(memory.total for memory in plan.device_memories) <= limit
    assert planned


@pytest.mark.parametrize(("number", "per_host"), [(2, 1), (4, 2)])
def test_on_several_hosts_everything_may_be_chosen(device, number, per_host):
    """Orders of a schedule for two chunks were made for plans of one."""
    plan = plan_from_profile(
        profile_of_layers(6), hosts(device, number, per_host=per_host), batch_size=8, chunks="auto", **ASKED
    )
    one = plan_from_profile(profile_of_layers(6), hosts(device, number, per_host=per_host), batch_size=8, **ASKED)
    assert plan.prediction.step_s <= one.prediction.step_s * (1 + 1e-9)


def test_too_many_stages_are_told_of_chunks_where_these_would_do(device):
    """Where chunks were left out nothing was said of them, and ranks of given ones were called stages."""
    told = 0
    schedules = ("gpipe", "interleaved", "interleaved-lean", "auto")
    for schedule, stages, replicas in itertools.product(schedules, (3, 4, 5, 6, 8, 9, 12, 16, 20), (1, 2)):
        cluster = hosts(device, 4)  # over links of two kinds chunks are not chosen unless that is asked for
        asked: Any = {"schedule": schedule, "stages": stages, "replicas": replicas, **ASKED}
        try:
            Settings.of(cluster, 32, asked)
            continue
        except ArgumentError as problem:
            text = str(problem)
        numbers = [int(number) for number in re.findall(r"with chunks=(\d) or", text)]
        assert bool(numbers) == ('chunks="auto" a device has several' in text and schedule != "auto")
        for chunks in (*numbers, *["auto"] * ('chunks="auto"' in text)):
            told += 1
            assert Settings.of(cluster, 32, asked | {"chunks": chunks}).stages == stages
        if 'chunks="auto"' not in text and schedule != "gpipe":
            with pytest.raises(ArgumentError):
                Settings.of(cluster, 32, asked | {"chunks": "auto"})
    assert told > 10
    asked = {"schedule": "interleaved", "chunks": 2, "stages": 8, "replicas": 2, **ASKED}
    with pytest.raises(
        ArgumentError, match="replicas is 2 with 4 ranks of 2 chunks each, and there are 4 devices; 8 are"
    ):
        Settings.of(hosts(device, 4), 32, asked)


@pytest.mark.parametrize("schedule", ["interleaved", "auto"])
@pytest.mark.parametrize("most", [2, 3, 4, 6, 8, 9])
def test_where_chunks_are_chosen_a_limit_of_stages_holds(device, schedule, most):
    devices = [device()] * 4
    plan = plan_from_profile(
        profile_of_layers(12), devices, batch_size=8, schedule=schedule, chunks="auto", max_stages=most, **ASKED
    )
    assert most >= plan.K
    if most >= 8:
        assert len(devices) < plan.K


@pytest.mark.parametrize(
    ("stages", "schedule"), [(8, "interleaved"), (8, "auto"), (6, "auto"), (12, "interleaved"), (4, "auto")]
)
def test_where_chunks_are_chosen_a_number_of_stages_may_be_asked_for(device, stages, schedule):
    profile, devices = profile_of_layers(12), [device()] * 4
    plan = plan_from_profile(profile, devices, batch_size=8, schedule=schedule, chunks="auto", stages=stages, **ASKED)
    assert stages == plan.K
    for chunks in (2, 3, 4):
        if stages % chunks == 0 and 2 <= stages // chunks <= len(devices):
            restricted = plan_from_profile(
                profile, devices, batch_size=8, schedule="interleaved", chunks=chunks, stages=stages, **ASKED
            )
            assert plan.prediction.step_s <= restricted.prediction.step_s * (1 + 1e-9)


def test_stages_that_no_number_of_chunks_makes_are_refused(device):
    about: Any = {"batch_size": 8, "schedule": "interleaved", "chunks": "auto", **ASKED}
    with pytest.raises(ArgumentError, match=r"stages is 11, and there are 4 devices; .* 3 or 4 .*: stages=12 is the"):
        plan_from_profile(profile_of_layers(12), [device()] * 4, stages=11, **about)
    assert plan_from_profile(profile_of_layers(12), [device()] * 4, stages=12, **about).K == 12


def test_replicas_count_where_chunks_are_chosen(device):
    profile, devices = profile_of_layers(12), [device()] * 4
    asked: dict[str, Any] = {"replicas": 2, "micro_batches_per_stage": 1, "stages": 4, "chunks": "auto"}
    plan = plan_from_profile(profile, devices, batch_size=16, schedule="auto", **asked)
    assert (plan.K, plan.replicas, plan.chunks) == (4, 2, 2)


def test_more_cuts_than_devices_go_together_with_chunks_to_choose(device):
    profile = profile_of_layers(12)
    cuts = [profile.layers[place].module_paths[0] for place in (2, 4, 6, 8, 10)]
    plan = plan_from_profile(
        profile, [device()] * 3, batch_size=8, schedule="interleaved", chunks="auto", cut_at=cuts, **ASKED
    )
    assert {2, 4, 6, 8, 10} <= {stage.stop_layer for stage in plan.stages}


def test_cuts_at_the_beginning_or_in_one_place_take_no_more_chunks(device):
    """Paths were counted: one device was said to be too few for the first module, and two for one cut of two names."""
    profile = profile_of_layers(12)
    first, second = (profile.layers[place].module_paths[0] for place in (0, 4))
    asked: dict[str, Any] = {"schedule": "auto", "chunks": "auto", **ASKED}
    assert plan_from_profile(profile, [device()], batch_size=8, cut_at=[first], **asked).K == 1
    cuts = [first, second, second.rpartition(".")[0]]
    plan = plan_from_profile(profile, [device()] * 2, batch_size=8, cut_at=cuts, max_stages=2, **asked)
    assert [stage.first_layer for stage in plan.stages] == [0, 4]


def step_of(*given, **asked):
    """Seconds, or None where it is refused."""
    try:
        return plan_from_profile(*given, **asked).prediction.step_s
    except (ArgumentError, InfeasibleError):
        return None


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_chunks_that_are_chosen_for_cuts_are_the_best_that_could_be_named(device, seed):
    """Whatever else is asked for; where none can be named, none is chosen."""
    chance = random.Random(seed)
    layers, devices = chance.randint(4, 12), [device()] * chance.randint(2, 4)
    profile = profile_of_layers(layers, sizes=range(1, 9))
    cuts = chance.sample(range(layers), chance.randint(0, min(layers, 4)))
    asked: dict[str, Any] = {
        "batch_size": chance.choice([2, 4, 8, 8]),
        "cut_at": [profile.layers[place].module_paths[0] for place in cuts],
        "micro_batches_per_stage": chance.choice([1, 1, 1, 2]),
    }
    for name, choice in (("replicas", [1, 2, "auto"]), ("max_stages", range(1, 11)), ("micro_batches", [1, 2, 4, 8])):
        if chance.random() < 0.3:
            asked[name] = chance.choice(choice)
    named = [
        step_of(profile, devices, schedule=schedule, chunks=chunks, **asked)
        for schedule in SCHEDULES
        for chunks in (1, 2, 3, 4)
    ]
    best = min((step_s for step_s in named if step_s is not None), default=None)
    found = step_of(profile, devices, schedule="auto", chunks="auto", **asked)
    if found is None or best is None:
        assert found is best
    else:
        assert found <= best * (1 + 1e-9)
