"""Profiles as frames, and several profiles as one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from torch import nn

from profiler import ArgumentError, Profile, ProfileError, profile, trace
from profiler.value import Value

Case = tuple[nn.Module, Any]


def _profile(case: Case, sizes: list[int], **settings: Any) -> Profile:
    model, x = case
    given: dict[str, Any] = {"micro_batch_sizes": sizes, "time_budget_s": 0.0, "progress": False, **settings}
    return profile(trace(model, x), 1, sample=x, **given)


def test_files_of_profiles_are_those_of_any_value(make_case: Callable[[str], Case]) -> None:
    """The costs are written one by one, which is faster; no byte may differ: plans name the fingerprint."""
    found = _profile(make_case("dropout"), [1, 2])
    without = found.model_copy(
        update={"costs": tuple(cost.model_copy(update={"in_stage": None}) for cost in found.costs)}
    )
    assert any(cost.in_stage is not None for cost in found.costs)
    for profiled in (found, without):
        for left_out in (frozenset[str](), frozenset({"skips"}), frozenset({"costs"})):
            assert profiled.to_json(without=left_out) == Value.to_json(profiled, without=left_out)


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
        (frame.assign(forward_s=[pandas.Timestamp(0)] * len(frame)), "a cell holds no number"),
        (frame.assign(forward_s=[b"1"] * len(frame)), "a cell holds no number"),
        (frame.assign(forward_s=["fast"] * len(frame)), "forward_s: "),
    ):
        with pytest.raises(ProfileError, match=message):
            first.from_frame(broken)
    with pytest.raises(ArgumentError, match="NoneType is no frame"):
        first.from_frame(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="NoneType is no profile"):
        first.merge(None)  # type: ignore[arg-type]

    second = _profile(make_case("dropout"), [2, 4], optimizer="SGD")
    merged = first.merge(second)
    assert {cost.micro_batch_size for cost in merged.costs} == {1, 2, 4}
    assert {entry.name for entry in merged.optimizers} == {"AdamW", "SGD"}
    assert [c for c in merged.costs if c.micro_batch_size == 2] == [c for c in second.costs if c.micro_batch_size == 2]
    with pytest.raises(ProfileError, match="different models"):
        first.merge(_profile(make_case("masked"), [1]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"carried_bytes": [[99, 5]]}, r"costs\[1\]\.in_stage names layer 99 of \d+ layers"),
        ({"leaf_bytes": [[0, 1, 99, 5]]}, "names layer 99"),
        ({"carried_bytes": [[-1, 5]]}, r"carried_bytes\[0\]\[0\]: .*greater than or equal to 0"),
        ({"waiting_bytes": [[0, -1000000000]]}, r"waiting_bytes\[0\]\[1\]: .*greater than or equal to 0"),
    ],
)
def test_entries_of_a_stage_that_mean_nothing(
    make_case: Callable[[str], Case], tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    path = tmp_path / "profile.json"
    _profile(make_case("dropout"), [1]).save(path)
    data = json.loads(path.read_text())
    data["costs"][1]["in_stage"].update(entry)
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=message):
        Profile.load(path)
