"""A small share of the hostile inputs of `tests/benchmarks/test_fuzzing.py`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing.mutations import command_lines, documents
from tests.fuzzing.subjects import good_plans, good_profile, workplace
from tests.fuzzing.trial import (
    Outcome,
    command_line,
    options_of_commands,
    plan_file,
    profile_file,
    said_otherwise,
    tried,
)

PLANS, PROFILES, LINES = 40, 70, 150


def check(outcomes: list[tuple[Any, Outcome]]) -> None:
    wrong = [f"{given!r:.2000}\n{outcome.wrong}" for given, outcome in outcomes if outcome.wrong]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}, the first: {wrong[0]}"
    kinds = {outcome.what for _, outcome in outcomes}
    assert len(kinds) > 1, "inputs that all end alike try nothing"


def of_files(texts: Any, path: Path, read: Callable[[Path], str]) -> list[tuple[Any, Outcome]]:
    outcomes = []
    for text in texts:
        path.write_bytes(text)
        outcomes.append((text, tried(lambda: read(path))))
    return outcomes


@pytest.mark.parametrize("number", range(len(good_plans())))
def test_hostile_plans(number: int, tmp_path: Path) -> None:
    good = good_plans()[number].to_json()
    texts = [good.encode(), *documents(good, number, PLANS)]
    check(of_files(texts, tmp_path / "plan.json", plan_file))


@pytest.mark.parametrize(
    ("written", "read", "place"),
    [
        ({"a": "1"}, {"a": 1}, "$.a"),
        ({"a": [True]}, {"a": [1]}, "$.a[0]"),
        ({"a": [1, 2]}, {"a": [1]}, "$.a"),
        ({"surprise": 1}, {}, "$.surprise"),
        ({}, {"interrupted": True}, "$.interrupted"),
    ],
)
def test_what_is_said_otherwise_is_found(written: Any, read: Any, place: str) -> None:
    assert [one.split()[0] for one in said_otherwise(written, read)] == [place]


def test_what_a_file_may_leave_out_says_nothing() -> None:
    assert not list(said_otherwise({"replicas": 1}, {"interrupted": False, "replicas": 1.0}))


def test_hostile_profiles(tmp_path: Path) -> None:
    check(of_files(documents(good_profile().to_json(), 2, PROFILES), tmp_path / "profile.json", profile_file))


def test_hostile_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace(tmp_path, monkeypatch)
    lines = command_lines(options_of_commands(), 3, LINES)
    check([(line, tried(partial(command_line, line))) for line in lines])
