"""A small share of the hostile inputs of `tests/benchmarks/test_fuzzing.py`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing.mutations import command_lines, documents
from tests.fuzzing.subjects import good_plan, good_profile, workplace
from tests.fuzzing.trial import Outcome, command_line, options_of_commands, plan_file, profile_file, tried

PLANS, PROFILES, LINES = 150, 70, 150


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


def test_hostile_plans(tmp_path: Path) -> None:
    check(of_files(documents(good_plan().to_json(), 1, PLANS), tmp_path / "plan.json", plan_file))


def test_hostile_profiles(tmp_path: Path) -> None:
    check(of_files(documents(good_profile().to_json(), 2, PROFILES), tmp_path / "profile.json", profile_file))


def test_hostile_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace(tmp_path, monkeypatch)
    lines = command_lines(options_of_commands(), 3, LINES)
    check([(line, tried(partial(command_line, line))) for line in lines])
