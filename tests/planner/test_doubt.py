"""How sure a prediction is: each cause counts, and the report says it."""

from __future__ import annotations

from typing import Any

import pytest

from planner import Plan, plan_from_profile
from planner.doubt import LESS_MEMORY, LESS_MEMORY_OF_PARTS, MODEL
from planner.plan.prediction import Doubt
from profiler.device import Cluster, Device, Link
from profiler.record import Estimate, Profile
from tests.planner.made_up import build_profile

DEVICES = tuple(Device(name="cpu", kind="a", memory_bytes=2**40) for _ in range(2))


def profile_with(link_error: float = 0.0, message: int = 0, **changes: Any) -> Profile:
    rows = {("a", size): [(0.1 * size**0.8, 0.1 * size**0.8, 0.2, 8, 8, message, message)] * 4 for size in (1, 4)}
    made = build_profile(
        rows, links=(Link(latency_s=0.0, bytes_per_s=1e3, error=link_error),), weights=[(0.4, 0.3)] * 4
    )
    return made.model_copy(update={"costs": tuple(cost.model_copy(update=changes) for cost in made.costs)})


def doubt_of(profile: Profile, **settings: Any) -> Doubt:
    plan = plan_of(profile, **settings)
    assert plan.prediction.doubt is not None
    return plan.prediction.doubt


def plan_of(profile: Profile, batch_size: int = 8, **settings: Any) -> Plan:
    asked = {"stages": 2, "schedule": "1f1b", "micro_batches": 8, **settings}
    return plan_from_profile(profile, Cluster(devices=DEVICES), batch_size=batch_size, **asked)


def test_a_quiet_profile_leaves_the_models_doubt() -> None:
    quiet = doubt_of(profile_with())
    assert quiet.step_less == pytest.approx(MODEL)
    assert MODEL < quiet.step_more < MODEL + 0.01
    assert (quiet.memory_less, quiet.memory_more) == (LESS_MEMORY, 0.0)
    usual = doubt_of(profile_with(spread=0.015))
    assert usual.step_less + usual.step_more <= 0.12


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"spread": 0.2}, {}),
        ({"slowdown": 0.5}, {}),
        ({}, {"batch_size": 16}),  # micro-batches of 2, between 1 and 4
        ({"link_error": 0.5, "message": 100}, {}),
    ],
)
def test_each_cause_counts(more: dict[str, Any], settings: dict[str, Any]) -> None:
    quiet, other = doubt_of(profile_with()), doubt_of(profile_with(**more), **settings)
    assert other.step_less > quiet.step_less + 0.01
    assert other.step_more > quiet.step_more + 0.01


def test_a_data_sheet_has_its_own_error() -> None:
    rates: dict[str, Any] = {f"{name}_flops_per_s": 1e12 for name in ("float32", "convolution", "half")}
    estimate = Estimate(device_kind="a", error=0.3, memory_bytes_per_s=1e12, launch_s=1e-6, **rates)
    profile = profile_with(spread=5.0).model_copy(update={"estimates": (estimate,)})
    assert doubt_of(profile).step_less == pytest.approx(0.3)


def test_moments_that_are_counted_together_leave_more_room() -> None:
    assert doubt_of(profile_with(), schedule="zb").memory_less == LESS_MEMORY_OF_PARTS


def test_the_report_says_it_and_asks_for_a_quiet_hour() -> None:
    calm, busy = str(plan_of(profile_with())), str(plan_of(profile_with(slowdown=0.45)))
    assert "in doubt: step " in calm
    assert "peak memory 95% to 100% of what is predicted" in calm
    assert "slower than usual" not in calm
    assert "the devices were 45% slower than usual while they were profiled" in busy.replace("\n  ", " ")
    assert 'cache="off"' in busy


def test_it_is_in_the_file() -> None:
    plan = plan_of(profile_with())
    again = Plan.parse_json(plan.to_json(), source="file", error=ValueError)  # type: ignore[arg-type]
    assert again == plan
    assert again.prediction.doubt == plan.prediction.doubt
