from typing import Any

import numpy as np
import pytest

from planner.from_profile import make_problem, plan_from_profile
from planner.plan.simulator import simulate_plan
from planner.solve import infeasible
from profiler.device import Cluster, Link
from profiler.errors import ArgumentError, InfeasibleError, ProfileError

ROW = (0.25, 0.25, 0.5, 10, 4, 8, 8)
FAST = (0.125, 0.125, 0.25, 10, 4, 8, 8)


@pytest.fixture
def profile(profile_of):
    return profile_of(
        {("a", size): [[value * size for value in ROW]] * 4 for size in (1, 8)},
        parameters=[(64, True)] * 4,
        readers=[(0,), (1,), (2,), (3,)],
        optimizer=(0.001, 2.0),
        links=(Link(latency_s=0.0, bytes_per_s=1e6),),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; give at least 1"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"batch_size": 2.0}, "batch_size is 2.0; give a whole number"),
        ({"batch_size": 16, "stages": 0}, "stages is 0"),
        ({"batch_size": 16, "stages": 3}, "stages is 3, and there are 2 devices"),
        ({"batch_size": 16, "stages": 2, "max_stages": 1}, "stages is 2 and max_stages is 1"),
        ({"batch_size": 16, "micro_batches": 17}, "micro_batches is 17, but the batch has 16 samples"),
        ({"batch_size": 16, "micro_batches": 3}, "K = 1 with .* at least 4; give more micro-batches, or a"),
        ({"batch_size": 16, "micro_batches": 7, "stages": 2}, "K = 2 .* at least 8; .*fewer stages"),
        ({"batch_size": 16, "memory_limit": -1}, "memory_limit is -1"),
        ({"batch_size": 16, "micro_batches_per_stage": 0}, "micro_batches_per_stage is 0"),
        ({"batch_size": 16, "recompute": "sometimes"}, "recompute is 'sometimes'; choose one of 'auto'"),
        (
            {"batch_size": 16, "schedule": "zigzag"},
            "schedule is 'zigzag'; choose one of 'gpipe', .*, 'auto'",
        ),
        ({"batch_size": 16, "replicas": 3}, "replicas is 3 with 1 stage each, and there are 2 devices"),
        ({"batch_size": 15, "replicas": 2}, "replicas is 2, which does not divide the batch of 15 samples"),
        ({"batch_size": 16, "memory_limit": [5]}, "memory_limit has 1 entry for 2 devices"),
        ({"batch_size": 16, "memory_limit": {"cuda:7": 5}}, "memory_limit names 'cuda:7'; the devices are cpu"),
        ({"batch_size": 16, "pinned": {"blocks.0": "cpu"}}, "'blocks.0' is pinned to 'cpu', which names 2 of the"),
        ({"batch_size": 16, "pinned": {"blocks.0": 2}}, "'blocks.0' is pinned to device 2, and there are 2 devices"),
        ({"batch_size": 16, "pinned": {"blocks.0": 1}, "replicas": 2}, "pinned names .* and replicas is 2"),
        ({"batch_size": 16, "cut_at": ["blocks.9"]}, "cut_at names 'blocks.9', and no layer holds a module"),
        ({"batch_size": 16, "keep_together": "blocks.1"}, "keep_together is 'blocks.1'; give a list"),
        ({"batch_size": 16, "micro_batch_sizes": []}, "micro_batch_sizes is empty"),
        ({"batch_size": 16, "time_limit_s": 0}, "time_limit_s is 0; give more than 0"),
        ({"batch_size": 16, "stagse": 2}, "plan_from_profile takes no argument 'stagse'; did you mean stages"),
        ({"batch_size": 16, "memory_limit": "24GiB"}, r"memory_limit is '24GiB'; give bytes, such as 24 \* 2\*\*30"),
    ],
)
def test_impossible_arguments_are_refused(profile, device, settings, message):
    with pytest.raises(ArgumentError, match=message):
        plan_from_profile(profile, [device(), device()], **settings)


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        ("ab", {}, "1 of 'a', 1 of 'b' make 0 such groups, at least 1 are needed"),
        ("aaab", {"stages": 2}, "3 of 'a', 1 of 'b' make 1 such groups, at least 2 are needed"),
    ],
)
def test_replicas_need_equal_devices(profile_of, device, kinds, settings, message):
    """The micro-batch sizes of the profile were blamed: "the profile covers 1 to 8", for sizes within."""
    profile = profile_of({(kind, size): [ROW] * 4 for kind in "ab" for size in (1, 8)}, parameters=[(64, True)] * 4)
    with pytest.raises(InfeasibleError, match=message):
        plan_from_profile(profile, [device(kind) for kind in kinds], batch_size=16, replicas=2, **settings)


def test_zero_devices_are_refused(profile):
    with pytest.raises(ArgumentError, match="got 0 devices"):
        plan_from_profile(profile, [], batch_size=8)


def test_more_stages_than_layers_are_refused(profile, device):
    with pytest.raises(ArgumentError, match="stages is 5, but the model has 4 layers"):
        plan_from_profile(profile, [device()] * 5, batch_size=32, stages=5)


def test_a_small_batch_gets_fewer_stages(profile, device):
    plan = plan_from_profile(profile, [device()] * 3, batch_size=9, chunks=1)
    assert (plan.K, plan.M) == (2, 9)


def test_a_batch_too_small_for_fixed_stages(profile, device):
    with pytest.raises(InfeasibleError, match=r"a batch of 9 samples is too small for K = 3: M must be at least 12"):
        plan_from_profile(profile, [device()] * 3, batch_size=9, stages=3)


def test_a_batch_too_small_for_one_stage(profile, device):
    with pytest.raises(InfeasibleError, match=r"a batch of 3 .* at least 4.*micro_batches_per_stage=3 or less"):
        plan_from_profile(profile, [device()] * 2, batch_size=3)
    assert plan_from_profile(profile, [device()] * 2, batch_size=3, micro_batches_per_stage=3).M == 3


def test_a_pipeline_needs_a_link(profile, device):
    unlinked = profile.model_copy(update={"links": ()})
    with pytest.raises(ProfileError, match="up to 2 stages need a link"):
        plan_from_profile(unlinked, [device()] * 2, batch_size=8)
    assert plan_from_profile(unlinked, [device()] * 2, batch_size=8, stages=1).K == 1
    cluster = Cluster(devices=(device(), device()), link=Link(latency_s=0.0, bytes_per_s=1e6))
    assert plan_from_profile(unlinked, cluster, batch_size=8, chunks=1).K == 2
    with pytest.raises(ProfileError, match="need a link"):
        plan_from_profile(unlinked, [device()] * 2, batch_size=8, max_stages=1, replicas="auto")


def test_one_device_needs_no_link(profile, device):
    """With any number of replicas allowed, one device was asked for the link between replicas."""
    unlinked = profile.model_copy(update={"links": ()})
    plan = plan_from_profile(unlinked, [device()], batch_size=8, replicas="auto")
    assert (plan.K, plan.replicas) == (1, 1)


def test_the_link_of_a_cluster_overrides_the_measured_one(profile, device):
    slow = Cluster(devices=(device(), device()), link=Link(latency_s=1e6, bytes_per_s=1.0))
    assert plan_from_profile(profile, slow, batch_size=8).K == 1


def test_micro_batches_beyond_the_profile(profile, device):
    with pytest.raises(ProfileError, match=r"needs micro-batches of 25 to 25 samples, and the profile covers 1 to 8"):
        plan_from_profile(profile, [device()], batch_size=100, micro_batches=4)
    with pytest.raises(ProfileError, match=r"needs micro-batches of 16 to 17 samples, and the profile covers 1 to 8"):
        plan_from_profile(profile, [device()], batch_size=99, micro_batches=6)
    assert plan_from_profile(profile, [device()], batch_size=100).micro_batch_sizes[0] <= 8


def test_a_profile_without_times_is_refused(profile_of, device):
    with pytest.raises(ProfileError, match="all layers of the profile take 0 seconds"):
        plan_from_profile(profile_of({("a", 1): [(0,) * 7]}), [device()], batch_size=4)


def test_prediction_follows_from_the_simulator(profile, device):
    plan = plan_from_profile(profile, [device()] * 2, batch_size=16, micro_batches=8, chunks=1)
    timeline = simulate_plan(plan)
    prediction = plan.prediction
    assert [(stage.first_layer, stage.stop_layer) for stage in plan.stages] == [(0, 2), (2, 4)]
    assert prediction.step_s == timeline.step_s == pytest.approx(9 * (1 + 2) + 2 * 16e-6 + 0.128)
    assert prediction.optimizer_s == pytest.approx(0.128)
    assert prediction.bubble == pytest.approx(1 / 9, rel=1e-4)
    assert prediction.one_device_s == pytest.approx(16 * 3 + 0.256)
    assert (prediction.gap, prediction.lower_bound_s) == (0, prediction.step_s)
    assert prediction.samples_per_s == pytest.approx(16 / prediction.step_s)


def test_ties_go_to_fewer_stages_then_fewer_micro_batches(profile_of, device):
    rows = [[size * value for value in ROW] for size in (1,)]
    one_layer = profile_of({("a", 1): rows, ("a", 8): [[8 * value for value in ROW]]})
    plan = plan_from_profile(one_layer, [device()] * 2, batch_size=16)
    assert (plan.K, plan.M) == (1, 4)


def test_a_stage_is_recomputed_only_where_it_does_not_fit(profile, device):
    roomy = plan_from_profile(profile, [device()] * 2, batch_size=16, stages=2)
    assert not any(stage.recompute for stage in roomy.stages)
    limit = max(stage.memory.total for stage in roomy.stages) - 1
    tight = plan_from_profile(profile, [device("a", limit), device()], batch_size=16, stages=2, micro_batches=8)
    assert [bool(stage.recompute) for stage in tight.stages][1] is False
    always = plan_from_profile(profile, [device()] * 2, batch_size=16, stages=2, recompute="always")
    assert [(stage.recompute[0].first, stage.recompute[0].stop) for stage in always.stages] == [(0, 2), (2, 4)]


def test_a_memory_limit_binds_every_device(profile, device):
    plan = plan_from_profile(profile, [device("a", 1000), device("a", 5000)], batch_size=8, memory_limit=2000, chunks=1)
    assert [stage.device.memory_bytes for stage in plan.stages] == [1000, 2000]
    assert all(stage.memory.total <= stage.device.memory_bytes for stage in plan.stages)


def test_when_nothing_fits_the_error_says_where_by_how_much_and_what_would_help(profile, device):
    with pytest.raises(InfeasibleError) as caught:
        plan_from_profile(profile, [device("a", 900)] * 2, batch_size=16, recompute="never", schedule="gpipe")
    assert str(caught.value) == (
        "no plan fits the memory. The nearest one has K = 2 stages and M = 16 micro-batches; its stage 0 (layers 0 to "
        "1, layer0 to layer1, not recomputed) needs 1.07 KiB and device cpu (a) has 900 B: 192 bytes (192 B) too many. "
        'Largest: activations 320 B, receive_buffers 256 B, optimizer 256 B. What would help: recompute="auto"; '
        'schedule="1f1b"; a smaller batch (8 samples fit)'
    )


def test_cures_are_tried_for_some_time_only_and_the_error_says_so(profile, device, monkeypatch):
    """Llama 70B under GPipe on 64 devices took minutes to say that nothing fits."""
    monkeypatch.setattr(infeasible, "MOST_CURES_S", 0.0)
    with pytest.raises(InfeasibleError, match=r"No cure was found in 0 s, which was not enough to try all$"):
        plan_from_profile(profile, [device("a", 900)] * 2, batch_size=16, recompute="never", schedule="gpipe")


def test_unlike_devices_share_the_work_by_speed(profile_of, device):
    profile = profile_of(
        {("slow", 1): [ROW] * 6, ("fast", 1): [FAST] * 6}, links=(Link(latency_s=0.0, bytes_per_s=1e9),)
    )
    plan = plan_from_profile(profile, [device("slow"), device("fast")], batch_size=8, micro_batches=8, chunks=1)
    assert [stage.stop_layer - stage.first_layer for stage in plan.stages] == [2, 4]


def test_equal_inputs_give_equal_bytes(profile, device):
    plans = [plan_from_profile(profile, [device()] * 3, batch_size=13).to_json() for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 10**20},
        {"batch_size": 10**5000},
        {"max_stages": 10**20},
        {"stages": 10**5000},
        {"micro_batches": 10**20},
        {"micro_batches_per_stage": 10**20},
        {"micro_batch_sizes": [10**20]},
        {"micro_batch_sizes": 4},
        {"replicas": 10**20},
        {"replicas": float("nan")},
        {"memory_limit": 10**400},
        {"memory_limit": float("inf")},
        {"time_limit_s": float("nan")},
        {"time_limit_s": float("inf")},
        {"time_limit_s": "soon"},
        {"keep_together": 5},
        {"cut_at": None, "pinned": 5},
        {"schedule": ["gpipe"]},
    ],
)
def test_a_setting_far_from_what_exists_is_an_argument(profile, device, given):
    """A batch of 10**20 samples was planned for without end; 5000 digits could not even be written in the message."""
    with pytest.raises(ArgumentError) as caught:
        plan_from_profile(profile, [device()], **{"batch_size": 16, **given})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["schedule", "recompute", "skips", "chunks", "replicas", "pinned", "stages"])
def test_an_array_is_no_single_value(profile, device, name):
    """Numpy's own error was raised, that an array is neither true nor false."""
    arrays: Any = {name: np.array([1, 2])}
    with pytest.raises(ArgumentError, match=f"{name} is array.*; give a single value, not an array"):
        plan_from_profile(profile, [device()], batch_size=16, **arrays)


@pytest.mark.parametrize("no_profile", ["profile.json", None, {"layers": []}])
def test_a_path_is_no_profile(device, no_profile):
    """Its layers were asked for, which a text has none of."""
    with pytest.raises(ArgumentError, match=r"profile is .*; pass a Profile, Profile.load\(path\) reads one"):
        plan_from_profile(no_profile, [device()], batch_size=16)


def test_as_many_micro_batches_are_tried_as_a_plan_may_have(profile_of, device):
    """Each M up to the batch was tried, so a batch of a million samples took a minute of planning."""
    profile = profile_of({("a", size): [[size * value for value in ROW]] for size in (1, 64)})
    problem = make_problem(profile, [device("a", 2**50)], batch_size=2**20, optimizer=None, settings={})
    counts = [candidate.split.count for candidate in problem.candidates()]
    assert (min(counts), max(counts)) == (2**14, 2**14)
    with pytest.raises(ProfileError, match="needs micro-batches of 1024 to 4194304 samples"):
        plan_from_profile(profile, [device("a", 2**50)], batch_size=2**24)


def test_a_schedule_as_people_write_it(profile, device):
    plan = plan_from_profile(profile, [device(), device()], batch_size=16, schedule="1F1B")
    assert plan.schedule == "1f1b"
