import re
from typing import Any

import pytest

from planner.from_profile import plan_from_profile
from planner.plan.bubble import bubble_parts
from planner.plan.plan import Plan
from planner.plan.report import plan_report, plan_summary
from planner.plan.stage import Segment
from profiler.device import Link

GOLDEN = """\
K = 2 stages, M = 8 micro-batches of 3 x 2 + 5 x 1 samples, batch 11, schedule gpipe, AdamW
predicted step 18.5 s (optimizer 1.01 s), 0.5941 samples/s
in doubt: step 17.0 s to 20.1 s, peak memory 95% to 100% of what is predicted
bubble 30.4%: fill and drain 11.1%, imbalance and messages 19.3%
1.37 x one device (25.4 s), proven optimal for these predictions
without the rule M >= 4K: K = 2, M = 3, step 14.3 s, 23% less; set micro_batches_per_stage=1 for it

stage  device  layers  modules        parameters  forward  recompute  backward     send         memory
    0  cuda:0     0-0  0.in .. 0.out      1.00 K   500 ms         no    750 ms  1.40 ms  1.34 MiB  88%
    1  cuda:1     1-2  1.in .. 2.out       264 K   1.00 s         no    1.50 s  1.40 ms  2.67 MiB  67%
seconds of one micro-batch of 2 samples; memory, and its share of the device's

predicted peak memory
stage  parameters  gradients  optimizer  activations  transient  receive buffers   reserve    device
    0    3.91 KiB   3.91 KiB   7.81 KiB      322 KiB      200 B         6.25 KiB  1.00 MiB  1.53 MiB
    1    1.01 MiB   7.91 KiB   15.8 KiB      647 KiB      200 B         3.12 KiB  1.00 MiB  4.00 MiB"""


def plan_of(profile_of, device):
    seconds, sizes = (0.125, 0.125, 0.25), (30_000, 100, 200, 200)
    rows = {
        ("a", size): [[0.25 + value * size for value in seconds] + [value * size for value in sizes]] * 3
        for size in (1, 4)
    }
    profile = profile_of(
        rows,
        parameters=[(4000, True), (4096, True), (2**20, False)],
        readers=[(0,), (1,), (0, 2)],
        optimizer=(1 / 8000, 2.0),
        links=(Link(latency_s=0.001, bytes_per_s=1e6),),
        input_bytes=8,
        reserve_bytes=2**20,
    )
    devices = [device("a", 1_600_000, name="cuda:0"), device("a", 2**22, name="cuda:1")]
    return plan_from_profile(profile, devices, batch_size=11, schedule="gpipe")


def test_the_report_fits_one_screen_and_says_this(profile_of, device):
    plan = plan_of(profile_of, device)
    text = repr(plan)
    assert max(len(line) for line in text.splitlines()) <= 110
    assert text == str(plan) == GOLDEN


@pytest.mark.parametrize("width", [60, 80, 100, 110, 200])
def test_the_report_is_as_wide_as_the_screen(profile_of, device, width):
    text = plan_report(plan_of(profile_of, device), width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = set(str(plan_of(profile_of, device)).split())
    assert {word for word in words if word[0].isdigit()} <= set(text.split())  # narrower, and complete


def with_stages(plan: Plan, count: int) -> Plan:
    """The same plan with so many stages, each a copy of the first; of these 7 is the slowest and 11 the fullest."""
    first = plan.stages[0]
    slow = tuple(entry.model_copy(update={"backward_s": 9.0}) for entry in first.times)
    full = first.memory.model_copy(update={"activations": first.memory.activations + 1000})
    changes: dict[int, dict[str, Any]] = {7: {"times": slow}, 11: {"memory": full}}
    stages = (
        first.model_copy(update={"first_layer": k, "stop_layer": k + 1, "rank": k, **changes.get(k, {})})
        for k in range(count)
    )
    return plan.model_copy(update={"stages": tuple(stages)})


@pytest.mark.parametrize(("count", "shown"), [(16, [*range(16)]), (64, [*range(4), 7, 11, *range(60, 64)])])
def test_of_many_stages_those_are_listed_that_matter(profile_of, device, count, shown):
    """The report of 64 stages had 280 lines of 80 columns."""
    plan = with_stages(plan_of(profile_of, device), count)
    parts = plan_report(plan, 80).partition("predicted peak memory")
    for part in (parts[0], parts[2]):
        numbers = re.findall(r"^ *(\d+)  ", part, re.MULTILINE)
        assert numbers == 2 * [*map(str, shown)]  # each table goes on below
    assert ("are left out" in parts[0]) == (count > 16)
    whole = plan_report(plan, 80, every_stage=True)
    assert sum(line.split()[:1] == ["40"] for line in whole.splitlines()) == (4 if count > 16 else 0)


def test_a_summary_says_what_limits_and_what_is_recomputed(profile_of, device):
    plan = with_stages(plan_of(profile_of, device), 64)
    stages = list(plan.stages)
    stages[3] = stages[3].model_copy(update={"recompute": (Segment(first=3, stop=4),)})
    text = plan_summary(plan.model_copy(update={"stages": tuple(stages)}), 80)
    words = " ".join(text.split())
    assert "fullest device: cuda:0, rank 11, 1.34 MiB of 1.53 MiB, 88%: parameters 3.91 KiB, gradients" in words
    assert "recompute: 1 of 64 layers, in 1 of 64 stages" in words
    assert "slowest stage: 7, " in words
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 24  # a screen


def test_the_bubble_is_that_of_filling_and_draining_and_of_imbalance(profile_of, device):
    """Equal stages and messages that take no time leave (K - 1) / (M + K - 1), arXiv 1811.06965, section 2.3."""
    row = (0.25, 0.25, 0.5, 10, 4, 0, 0)
    even = profile_of({("a", size): [[value * size for value in row]] * 4 for size in (1, 4)})
    plan = plan_from_profile(even, [device("a")] * 2, batch_size=8, stages=2, micro_batches=8)
    assert bubble_parts(plan) == pytest.approx((1 / 9, 0.0))
    uneven = plan_from_profile(even, [device("a")] * 2, batch_size=8, stages=2, micro_batches=8, cut_at=["blocks.1"])
    parts = bubble_parts(uneven)
    assert parts is not None
    assert parts.fill_and_drain == pytest.approx(1 / 9)
    assert sum(parts) == pytest.approx(uneven.prediction.bubble)
    assert parts.imbalance > 0.2


def test_one_device_that_could_not_hold_the_model_is_said_to_be(profile_of, device):
    row = (0.25, 0.25, 0.5, 10, 4, 0, 0)
    rows = {("a", size): [[value * size for value in row]] * 4 for size in (1, 4)}
    profile = profile_of(rows, parameters=[(1000, True)] * 4, readers=[(0,), (1,), (2,), (3,)])
    tight = plan_from_profile(profile, [device("a", 6000)] * 2, batch_size=8)
    assert "which could not hold the model" in str(tight)
    assert "which could not hold the model" not in str(
        plan_from_profile(profile, [device("a", 2**20)] * 2, batch_size=8)
    )
