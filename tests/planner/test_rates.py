"""Tokens, FLOP/s and MFU of a plan, from the model's work and the devices' data sheets."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from profiler.datasheets import DATA_SHEETS, sheet_of_kind
from profiler.device import Device, Link
from profiler.errors import PlanFileError
from profiler.record import Profile
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.work import Work

TEXT = TensorLeaf(shape=(1, 128), dtype="int64", batch_dim=0)
MASK = TensorLeaf(shape=(1, 128), dtype="bool", batch_dim=0)
IMAGE = TensorLeaf(shape=(1, 3, 8, 8), dtype="float32", batch_dim=0)
LABEL = TensorLeaf(shape=(1,), dtype="int64", batch_dim=0)


def planned(profile_of: Callable[..., Profile], kinds: list[str], **known: Any) -> Plan:
    row = (0.25, 0.25, 0.5, 10, 4, 0, 0)
    rows = {(kind, size): [[v * size for v in row]] * 4 for kind in dict.fromkeys(kinds) for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e9),)).model_copy(update=known)
    devices = [Device(name=f"cuda:{n}", kind=kind, memory_bytes=2**30) for n, kind in enumerate(kinds)]
    return plan_from_profile(profile, devices, batch_size=16, stages=2, replicas=len(kinds) // 2)


def test_mfu_is_what_the_model_needs_of_what_the_sheets_promise(profile_of: Callable[..., Profile]) -> None:
    """Of both replicas; a step does three times the forward pass."""
    work = Work(forward_flops=1e15, dtype="bfloat16")
    plan = planned(profile_of, ["A100-40GB"] * 4, work=work)
    found = plan.prediction
    assert found.device_flops_per_s is not None and found.mfu is not None
    assert found.device_flops_per_s == pytest.approx(3 * 1e15 * 16 / found.step_s / 4)
    assert found.mfu == pytest.approx(found.device_flops_per_s / DATA_SHEETS["A100-40GB"].bfloat16_flops_per_s)
    single = planned(profile_of, ["A100-40GB"] * 4, work=Work(forward_flops=1e15, dtype="float32")).prediction
    assert single.mfu == pytest.approx(found.mfu * 312 / 19.5)
    assert f"TFLOP/s a device, MFU {found.mfu:.1%} (3 x" in str(plan)
    assert "tokens" not in str(plan)


def test_without_a_data_sheet_there_is_no_mfu_and_without_work_no_rate(profile_of: Callable[..., Profile]) -> None:
    here = planned(profile_of, ["A100-40GB", "a CPU"], work=Work(forward_flops=1e9, dtype="float32"))
    assert here.prediction.device_flops_per_s
    assert here.prediction.mfu is None
    assert "FLOP/s a device (3 x" in str(here)
    unknown = planned(profile_of, ["A100-40GB"] * 2)
    assert unknown.prediction.device_flops_per_s is None
    assert "FLOP" not in str(unknown) and "MFU" not in str(unknown)
    assert {"mfu", "tokens_per_s", "device_flops_per_s"}.isdisjoint(json.loads(unknown.to_json())["prediction"])


def test_a_driver_says_other_names_than_a_data_sheet() -> None:
    assert sheet_of_kind("NVIDIA H100 80GB HBM3") is DATA_SHEETS["H100-80GB"] is sheet_of_kind("H100-80GB")
    assert sheet_of_kind("NVIDIA H100 PCIe") is None  # whose rates are lower


@pytest.mark.parametrize(
    ("leaves", "tokens"),
    [((TEXT,), 128), ((TEXT, MASK), 128), ((IMAGE, LABEL), None), ((LABEL,), None), ((TEXT, IMAGE), None)],
)
def test_tokens_are_those_of_a_sample_that_is_text(
    profile_of: Callable[..., Profile], leaves: tuple[TensorLeaf, ...], tokens: int | None
) -> None:
    sample = SampleSpec(batch_size=1, tree="", leaves=leaves)
    plan = planned(profile_of, ["a", "a"], sample=sample)
    assert plan.prediction.tokens_per_s == (tokens and plan.prediction.samples_per_s * tokens)
    assert ("tokens/s" in str(plan)) == (tokens is not None)


def test_a_file_whose_tokens_and_samples_disagree_is_refused(profile_of: Callable[..., Profile]) -> None:
    plan = planned(profile_of, ["a", "a"], sample=SampleSpec(batch_size=1, tree="", leaves=(TEXT,)))
    fields = json.loads(plan.to_json())
    assert Plan.parse_json(json.dumps(fields), source="file", error=PlanFileError) == plan
    fields["prediction"]["tokens_per_s"] *= 2
    with pytest.raises(PlanFileError, match="samples_per_s of 128 tokens"):
        Plan.parse_json(json.dumps(fields), source="file", error=PlanFileError)


def test_plans_are_compared_by_what_is_known_of_either(profile_of: Callable[..., Profile]) -> None:
    fast = planned(profile_of, ["A100-40GB"] * 2, work=Work(forward_flops=1e12, dtype="float16"))
    plain = planned(profile_of, ["A100-40GB"] * 2)
    frame = fast.compare(plain)
    assert frame.loc["mfu", "this"] == fast.prediction.mfu
    assert "tokens_per_s" not in frame.index
    assert frame.loc["idle_devices", "this"] == 0
    assert "mfu" not in plain.compare(plain).index
