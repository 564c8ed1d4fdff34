"""Profiles as frames, and several profiles as one."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from profiler import Profile, ProfileError, profile, trace

Case = tuple[nn.Module, Any]


def _profile(case: Case, sizes: list[int], **settings: Any) -> Profile:
    model, x = case
    given: dict[str, Any] = {"micro_batch_sizes": sizes, "time_budget_s": 0.0, "progress": False, **settings}
    return profile(trace(model, x), 1, sample=x, **given)


def test_frames_and_merged_profiles(make_case: Callable[[str], Case]) -> None:
    first = _profile(make_case("dropout"), [1, 2])
    frame = first.to_frame()
    assert first.from_frame(frame) == first
    slower = first.from_frame(frame.assign(forward_s=2 * frame["forward_s"]))
    assert [cost.forward_s for cost in slower.costs] == [2 * cost.forward_s for cost in first.costs]
    only = first.from_frame(frame[frame["micro_batch_size"] == 2])
    assert {cost.micro_batch_size for cost in only.costs} == {2}
    for broken, message in (
        (frame.drop(columns="kept_bytes"), "kept_bytes: Field required"),
        (frame.assign(speed=1), "speed: Extra inputs"),
        (frame.assign(forward_s=float("nan")), "forward_s: "),
        (frame.iloc[1:], "do not hold each of"),
    ):
        with pytest.raises(ProfileError, match=message):
            first.from_frame(broken)

    second = _profile(make_case("dropout"), [2, 4], optimizer="SGD")
    merged = first.merge(second)
    assert {cost.micro_batch_size for cost in merged.costs} == {1, 2, 4}
    assert {entry.name for entry in merged.optimizers} == {"AdamW", "SGD"}
    assert [c for c in merged.costs if c.micro_batch_size == 2] == [c for c in second.costs if c.micro_batch_size == 2]
    with pytest.raises(ProfileError, match="different models"):
        first.merge(_profile(make_case("masked"), [1]))
