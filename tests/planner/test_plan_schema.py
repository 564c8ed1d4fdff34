"""The schema and the page on the format are those of the classes; files of every version stay readable."""

import copy
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planner.plan.plan import PLAN_SCHEMA_VERSION, Plan
from planner.plan.plan_schema import PARTS, format_rows, format_table, plan_schema, schema_text
from profiler.errors import PlanFileError
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


def test_files_of_every_version_can_be_read() -> None:
    """A file here is never changed: whoever raises a version adds one, and the earlier ones stay readable."""
    plan = Plan.load(PLAN_FILE)
    assert (plan.K, plan.M, plan.schedule) == (4, 16, "1f1b")
    assert plan.prediction.step_s == pytest.approx(1.67, abs=0.01)
    assert plan.to_json() == PLAN_FILE.read_text()
    assert len(Profile.load(FORMATS / "profile-1.json").layers) == 3
