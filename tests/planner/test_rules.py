"""Rules about cuts and devices are kept, and those that clash are named."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner import autoplan
from planner.from_profile import plan_from_profile
from planner.rules import rules_of
from planner.settings import Settings
from profiler import profile as profile_model
from profiler import trace
from profiler.device import Cluster, Link
from profiler.errors import ArgumentError, InfeasibleError, PlanError

ROW = (0.25, 0.25, 0.5, 10, 4, 8, 8)


@pytest.fixture
def profile(profile_of):
    return profile_of(
        {
            (kind, size): [[value * size * speed for value in ROW[:3]] + [value * size for value in ROW[3:]]] * 6
            for kind, speed in (("fast", 1.0), ("slow", 2.5))
            for size in (1, 8)
        },
        links=(Link(latency_s=0.0, bytes_per_s=1e6),),
    )


def cuts_of(plan):
    return [stage.stop_layer for stage in plan.stages[:-1]]


def test_modules_stay_together(profile, device):
    devices = [device("fast")] * 2
    asked: Any = {"batch_size": 16, "chunks": 1}
    assert cuts_of(plan_from_profile(profile, devices, **asked)) == [3]
    plan = plan_from_profile(profile, devices, **asked, keep_together=["blocks.2", "blocks.3"])
    assert cuts_of(plan) == [3]  # a module of one layer forbids nothing
    assert cuts_of(plan_from_profile(profile, devices, **asked, keep_together=["blocks"])) == []


def test_cuts_are_where_they_must_be(profile, device):
    plan = plan_from_profile(profile, [device("fast")] * 3, batch_size=16, cut_at=["blocks.1", "blocks.5"], chunks=1)
    assert cuts_of(plan) == [1, 5]
    more = plan_from_profile(profile, [device("fast")] * 3, batch_size=16, cut_at=["blocks.1", "blocks.5"])
    assert {1, 5} < {*cuts_of(more)}  # several chunks a rank are faster


def test_a_module_runs_where_it_is_pinned(profile, device):
    devices = [device("fast", name="cuda:0"), device("slow", name="cuda:1"), device("fast", name="cuda:2")]
    plan = plan_from_profile(profile, devices, batch_size=24, pinned={"blocks.0": "cuda:2", "blocks.5": 1})
    assert plan.stages[0].device.name == "cuda:2"
    assert plan.stages[-1].device.name == "cuda:1"
    best_s = min(
        plan_from_profile(
            profile, devices, batch_size=24, pinned={"blocks.0": "cuda:2", "blocks.5": 1}, stages=K
        ).prediction.step_s
        for K in (2, 3)
    )
    assert plan.prediction.step_s == best_s


def test_micro_batches_have_allowed_sizes(profile, device):
    plan = plan_from_profile(profile, [device("fast")] * 2, batch_size=24, micro_batch_sizes=[3])
    assert set(plan.micro_batch_sizes) == {3}
    with pytest.raises(InfeasibleError, match=r"micro_batch_sizes allows \[5\] samples, and no M of a batch of 24"):
        plan_from_profile(profile, [device("fast")] * 2, batch_size=24, micro_batch_sizes=[5])


def test_each_device_may_have_its_own_limit(profile, device):
    plan = plan_from_profile(profile, [device("fast")] * 2, batch_size=16, memory_limit=[1000, None], stages=2)
    assert sorted(stage.device.memory_bytes for stage in plan.stages) == [1000, 10**9]


@pytest.mark.parametrize(
    ("rules", "named", "unnamed"),
    [
        (
            {"keep_together": ["blocks"], "cut_at": ["blocks.3"]},
            ["keep_together 'blocks'", "cut_at 'blocks.3'"],
            "stages",
        ),
        (
            {"cut_at": ["blocks.1", "blocks.3"], "stages": 2},
            ["cut_at 'blocks.1'", "'blocks.3'", "stages = 2"],
            "at most",
        ),
        (
            {"cut_at": ["blocks.1", "blocks.2", "blocks.4"], "keep_together": ["blocks.5"]},
            ["cut_at 'blocks.4'", "at most 3 stages"],
            "keep_together",
        ),
        ({"pinned": {"blocks.0": 0, "blocks.2": 1, "blocks.4": 0}}, ["'blocks.0' to device 0", "'blocks.2'"], "stages"),
        ({"pinned": {"blocks.0": 0, "blocks.1": 0}, "cut_at": ["blocks.1"]}, ["pinned 'blocks.1'", "cut_at"], "stages"),
        ({"pinned": {"blocks": 0, "blocks.4": 1}}, ["pinned 'blocks.4' to device 1 and pinned 'blocks' to"], "stages"),
    ],
)
def test_rules_that_clash_are_named(profile, device, rules, named, unnamed):
    with pytest.raises(InfeasibleError) as caught:
        plan_from_profile(profile, [device("fast")] * 3, batch_size=32, **rules)
    assert all(text in str(caught.value) for text in named)
    assert unnamed not in str(caught.value)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)

    def forward(self, x):
        return self.relu(self.last(torch.sin(self.first(x))) + x)


def test_activations_before_a_module_may_be_behind_a_cut_and_its_own_parts_may_not():
    """Of the blocks of a ResNet-101 37 of 39 were refused, for each one's last activation begins a layer."""
    model = nn.Sequential(nn.Linear(8, 8), *(Block(8) for _ in range(6)))
    sequence = trace(model, torch.zeros(4, 8), progress=False)
    cluster = Cluster.of("4xA100-40GB")
    first = [layer.module_paths for layer in sequence.layers]
    found = []
    for block in range(1, 7):
        rules = rules_of(sequence.layers, Settings.of(cluster, 16, {"cut_at": [str(block)]}))
        (place,) = np.flatnonzero(rules.demanded)
        found.append(first[place][0])
        assert any(path.startswith(f"{block}.") for path in first[place])
    assert found == ["1.first", *(f"{block}.relu" for block in range(1, 6))]
    assert first[-1] == ("6", "6.relu")
    with pytest.raises(ArgumentError, match=r"cut_at names '6.relu', which begins inside layer \d+ .* after '6'"):
        rules_of(sequence.layers, Settings.of(cluster, 16, {"cut_at": ["6.relu"]}))


class Stem(nn.Module):
    """A module `h` behind something with parameters, all of which do next to none of the work of `c`."""

    def __init__(self, before: str):
        super().__init__()
        self.one, self.h, self.before = nn.Linear(8, 8), nn.Linear(8, 8), before
        self.a = nn.Sequential(nn.Linear(8, 8192), nn.Linear(8192, 8)) if before != "first" else nn.Identity()
        self.c = nn.Sequential(nn.Linear(8, 8192), nn.Linear(8192, 8))
        if before == "shared":
            self.two = self.one
        self.w = nn.Parameter(torch.eye(8)) if before == "own" else None

    def forward(self, x):
        x = self.a(x)
        return self.c(self.h(self.one(x) if self.w is None else x @ self.w))


@pytest.mark.parametrize("before", ["first", "shared", "own"])
def test_a_cut_never_lies_before_other_parameters_than_those_of_the_module(before):
    """Layer 0 was not looked at; a parameter of two names, and the model's own one, were taken for none."""
    model, x, cluster = Stem(before), torch.zeros(16, 8), Cluster.of("2xA100-40GB")
    sequence = trace(model, x, progress=False)
    held = next(layer for layer in sequence.layers if "h" in layer.module_paths)
    assert (held.index == 0) is (before == "first")
    asked: Any = {"batch_size": 16, "stages": 2, "micro_batches": 4, "micro_batches_per_stage": 1, "cut_at": ["h"]}
    measured: Any = {"sample": x, "batch_size": 16, "loss_fn": nn.functional.mse_loss, "target": x}
    with pytest.raises(ArgumentError, match="cut_at names 'h', which begins inside layer"):
        plan_from_profile(profile_model(sequence, cluster, **measured), cluster, **asked)
    finer = trace(model, x, cut_at=["h"], progress=False)
    plan = plan_from_profile(profile_model(finer, cluster, **measured), cluster, **asked)
    assert finer.layers[plan.stages[1].first_layer].parameters[0] == "h.weight"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "auto"])
@pytest.mark.parametrize("memory_bytes", [10**9, 1200])
def test_a_time_limit_ends_the_search_and_says_so(profile, device, schedule, memory_bytes):
    devices = [device(kind, memory_bytes) for kind in ("fast", "slow", "slow")]
    whole = plan_from_profile(profile, devices, batch_size=60, schedule=schedule)
    short = plan_from_profile(profile, devices, batch_size=60, schedule=schedule, time_limit_s=1e-9)
    assert short.prediction.step_s >= whole.prediction.step_s
    assert short.prediction.lower_bound_s <= whole.prediction.step_s
    assert short.prediction.gap > 0 or short.prediction.step_s == whole.prediction.step_s


@pytest.mark.parametrize("roomy", [10**6, 110])
def test_more_unlike_devices_than_can_be_told_apart(profile_of, device, roomy):
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    rows = {("a", size): [[value * size * (1 + layer % 3) for value in row] for layer in range(24)] for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e4),))
    unlike = [device("a", roomy * 16 + 16 * index, name=f"cuda:{index}") for index in range(16)]
    plan = plan_from_profile(profile, unlike, batch_size=64, micro_batches=64)
    least, most = (
        plan_from_profile(profile, [device("a", roomy * 16 + more)] * 16, batch_size=64, micro_batches=64)
        for more in (0, 240)
    )
    assert most.prediction.step_s <= plan.prediction.step_s <= least.prediction.step_s * (1 + plan.prediction.gap)
    assert plan.prediction.lower_bound_s <= most.prediction.step_s * (1 + 1e-9) or plan.prediction.gap == 0
    assert len({stage.device.name for stage in plan.stages}) == plan.K
    assert all(stage.memory.total <= stage.device.memory_bytes for stage in plan.stages)


def test_more_unlike_kinds_than_can_be_told_apart(profile_of, device):
    kinds = [f"kind {number:02}" for number in range(14)]
    rows = {
        (kind, size): [[(1 + index / 20) * value * size for value in ROW[:3]] + [value * size for value in ROW[3:]]]
        * 20
        for index, kind in enumerate(kinds)
        for size in (1, 8)
    }
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: Any = {"batch_size": 64, "micro_batches": 56, "schedule": "gpipe"}
    plan = plan_from_profile(profile, [device(kind) for kind in kinds], **asked)
    assert 0 < plan.prediction.gap < 0.5
    alone = plan_from_profile(profile, [device(kinds[-1])] * 14, **asked)
    assert plan.prediction.step_s < alone.prediction.step_s


def test_two_fast_and_two_slow_devices_beat_every_plan_that_treats_them_alike(profile_of, device):
    """The example: times 1 and 2.5, memory 24 and 12 GB; the figure is in tests/benchmarks/README.md."""
    gigabyte = 10**9
    row = (0.01, 0.01, 0.02, 5 * 10**6, 10**6, 10**6, 10**6)
    profile = profile_of(
        {
            (kind, size): [[value * size * speed for value in row[:3]] + [value * size for value in row[3:]]] * 24
            for kind, speed in (("fast", 1.0), ("slow", 2.5))
            for size in (1, 4)
        },
        parameters=[(250 * 10**6, True)] * 24,
        readers=[(index,) for index in range(24)],
        optimizer=(0.0, 2.0),
        links=(Link(latency_s=1e-5, bytes_per_s=12e9),),
    )
    fast = device("fast", 24 * gigabyte, name="cuda:0")
    slow = device("slow", 12 * gigabyte, name="cuda:2")
    ours = plan_from_profile(profile, [slow, fast, slow, fast], batch_size=64, chunks=1)
    even = ["blocks.6", "blocks.12", "blocks.18"]  # what balances four equal devices
    assert [f"blocks.{cut}" for cut in cuts_of(plan_from_profile(profile, [slow] * 4, batch_size=64, chunks=1))] == even
    # even in the best order of the devices and with the best M
    alike = plan_from_profile(profile, [slow, fast, slow, fast], batch_size=64, cut_at=even, stages=4, chunks=1)
    assert ours.prediction.gap == 0
    gain = alike.prediction.step_s / ours.prediction.step_s
    print(f"\nours {ours.prediction.step_s:.2f} s; alike {alike.prediction.step_s:.2f} s: {gain:.2f} times as fast")
    assert gain > 1.3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pinned": {"1": 1}, "keep_together": ["2"], "cut_at": ["9"]}, "cut_at names '9', which is no module"),
        ({"keep_together": ["3"]}, "keep_together names '3', which is no module of the model"),
        ({"pinned": {"typing": 0}}, "pinned names 'typing', and no layer holds a module"),
        ({"pinned": {"0": 1, "1": 0, "2": 1}}, "no cuts satisfy pinned '0' to device 1 and pinned '1' to device 0"),
        ({"stages": 4}, "stages is 4, but the model has 3 layers"),
    ],
)
def test_rules_are_checked_before_anything_is_measured(settings, expected, monkeypatch):
    def measure(*_, **__):
        raise AssertionError("a mistake in a name is found first")

    monkeypatch.setattr("profiler.measure.profile", measure)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=expected):
        autoplan(model, torch.randn(32, 4), 4, progress=False, **settings)
