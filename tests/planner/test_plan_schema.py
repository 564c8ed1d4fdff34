"""The schema and the page on the format are those of the classes; files of every version stay readable."""

import copy
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planner.plan.plan import Plan
from planner.plan.plan_fields import PLAN_SCHEMA_VERSION
from planner.plan.plan_schema import PARTS, format_rows, format_table, plan_schema, schema_text
from profiler.errors import PlanFileError, ProfileError
from profiler.record import Profile

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ROOT / "tests" / "data" / "formats"
PLAN_FILE = FORMATS / f"plan-{PLAN_SCHEMA_VERSION}.json"


@pytest.fixture(scope="module")
def checker() -> Any:
    """nbformat, which executes the notebooks, brings this library."""
    return import_module("jsonschema").Draft202012Validator(plan_schema())


def test_the_shipped_schema_is_that_of_the_classes() -> None:
    """Renew it by `autoplan validate --schema > planner/plan/plan.schema.json`."""
    assert (ROOT / "planner" / "plan" / "plan.schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_page_holds_the_table_of_the_classes() -> None:
    page = (ROOT / "notebooks" / "plan_format.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n{format_table()}")


def test_every_part_and_field_has_its_meaning() -> None:
    assert {part.__name__ for part in PARTS} == {"Plan", *plan_schema()["$defs"]}
    assert all(row.meaning for row in format_rows())
    units = {(row.part, row.field): row.unit for row in format_rows()}
    assert units["StageMemory", "transient"] == units["Device", "memory_bytes"] == "bytes"
    assert (units["Prediction", "samples_per_s"], units["StageTimes", "forward_s"]) == ("1/s", "s")


def test_a_sound_file_satisfies_the_schema(checker: Any) -> None:
    checker.check_schema(checker.schema)
    for file in (PLAN_FILE, ROOT / "notebooks" / "plan.json"):
        assert [error.message for error in checker.iter_errors(json.loads(file.read_text()))] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("surprise",), 1),
        (("batch_size",), "32"),
        (("schema_version",), PLAN_SCHEMA_VERSION + 1),
        (("stages", 0, "first_layer"), -1),
        (("stages", 0, "times", 0, "forward_s"), None),
        (("prediction", "bubble"), 2.0),
        (("sample", "leaves"), {}),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(checker: Any, path: tuple[Any, ...], value: Any) -> None:
    wrong = copy.deepcopy(json.loads(PLAN_FILE.read_text()))
    place = wrong
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert not checker.is_valid(wrong)
    with pytest.raises(PlanFileError):
        Plan.parse_json(json.dumps(wrong), source="wrong", error=PlanFileError)


def places(whole: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Of every key in JSON, from the outside inwards."""
    parts = whole.items() if isinstance(whole, dict) else enumerate(whole) if isinstance(whole, list) else ()
    for key, part in parts:
        if isinstance(whole, dict):
            yield (*path, key)
        yield from places(part, *path, key)


@pytest.mark.parametrize("file", sorted(FORMATS.glob("plan-2*.json")), ids=lambda file: file.stem)
def test_a_key_may_be_left_out_by_the_schema_where_the_reader_allows_it(
    checker: Any, file: Path, tmp_path: Path
) -> None:
    whole = json.loads(Plan.load(file).to_json())
    assert checker.is_valid(whole)
    refused = 0
    for *outer, key in places(whole):
        less = copy.deepcopy(whole)
        place = less
        for part in outer:
            place = place[part]
        del place[key]
        (tmp_path / "less.json").write_text(json.dumps(less))
        said = ""
        try:
            Plan.load(tmp_path / "less.json")
        except PlanFileError as problem:
            said = str(problem)
        if checker.is_valid(less):
            assert not re.search(r"is missing|[Ff]ield required", said), (outer, key)
        else:
            assert said, (outer, key)
            refused += 1
    assert refused > 50


def test_a_profile_of_the_first_version_is_read() -> None:
    """A file here is never changed: whoever raises a version adds one, and the earlier ones stay readable."""
    assert len(Profile.load(FORMATS / "profile-1.json").layers) == 3


@pytest.mark.parametrize("version", [PLAN_SCHEMA_VERSION - 1, PLAN_SCHEMA_VERSION + 1])
def test_a_file_of_another_version_says_what_to_do(version: int) -> None:
    """Version 1 was the format of a day before anything was trained by a plan."""
    of_another = PLAN_FILE.read_text().replace(
        f'"schema_version": {PLAN_SCHEMA_VERSION}', f'"schema_version": {version}'
    )
    do = "make it anew" if version < PLAN_SCHEMA_VERSION else "read it with the release that wrote it"
    with pytest.raises(PlanFileError, match=rf"\$\.schema_version: .* version {version} of the format, .* {do}"):
        Plan.parse_json(of_another, source="plan.json", error=PlanFileError)


def test_a_plan_and_a_profile_are_told_apart() -> None:
    """A plan given as a profile was said to be of a later version of the format."""
    with pytest.raises(PlanFileError, match=r"profile-1\.json: \$: this is a profile, and a plan is asked for"):
        Plan.load(FORMATS / "profile-1.json")
    with pytest.raises(ProfileError, match=r"plan-2\.json: \$: this is a plan, and a profile is asked for"):
        Profile.load(PLAN_FILE)
