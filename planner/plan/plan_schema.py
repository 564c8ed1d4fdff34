"""The format of plan files, from the classes that read them: a JSON Schema, and a table for people.

plan_schema()["properties"]["batch_size"]
print(format_table())
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from planner.plan.plan import Plan
from planner.plan.plan_fields import PLAN_SCHEMA_VERSION
from planner.plan.prediction import Doubt, Prediction
from planner.plan.stage import Segment, Skip, SkipTimes, Stage, StageMemory, StageTimes
from planner.plan.unused import LooserPlan, Unused
from profiler.device import Device
from profiler.sample_spec import ConstantLeaf, Decision, SampleSpec, TensorLeaf

PARTS: Final[tuple[type[BaseModel], ...]] = (
    *(Plan, Prediction, Doubt, Stage, StageTimes, StageMemory, Segment, Device, Skip, SkipTimes, Unused, LooserPlan),
    *(SampleSpec, TensorLeaf, ConstantLeaf, Decision),
)
"""What a file consists of, the whole first."""
SYMBOLS: Final = {
    ("Plan", "batch_size"): "N",
    ("Plan", "micro_batch_sizes"): "its length is M",
    ("Plan", "stages"): "its length is K",
    ("Plan", "replicas"): "R",
    ("StageTimes", "forward_s"): "f_k",
    ("StageTimes", "recompute_s"): "r_k",
    ("StageTimes", "backward_s"): "b_k",
    ("StageTimes", "send_forward_s"): "c_k",
    ("StageTimes", "send_backward_s"): "c'_k",
    ("Prediction", "step_s"): "T",
}
"""Symbols of GPipe (Huang et al., arXiv 1811.06965; N, K and M) and of our page on planning (the others)."""
_UNITS: Final = (("_bytes", "bytes"), ("_per_s", "1/s"), ("_s", "s"))
_SIZES: Final = frozenset({"batch_size", "micro_batch_size", "micro_batch_sizes"})
_SHARES: Final = frozenset(
    {
        "bubble",
        "gap",
        "called_share",
        "mfu",
        "step_less",
        "step_more",
        "memory_less",
        "memory_more",
        "slowdown",
        "copied",
    }
)


class FormatRow(NamedTuple):
    """One field of a plan file.

    Attributes:
        part: the class that the field belongs to.
        field: its name.
        meaning: what it says.
        unit: of its number, or "".
        symbol: of the paper or our page, or "".
    """

    part: str
    field: str
    meaning: str
    unit: str
    symbol: str


def plan_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the files that `Plan.load` reads.

    It says which fields there are, which of them files may leave out, and what type and range each has; that they fit
    one another `Plan.load` checks.
    """
    schema = Plan.model_json_schema()
    for part in PARTS:
        place = schema if part is Plan else schema["$defs"][part.__name__]
        meanings = _meanings(part)
        for field, entry in place["properties"].items():
            entry["description"] = meanings[field]
        place["required"] = [name for name, field in part.model_fields.items() if field.exclude_if is None]
        place["description"] = (inspect.getdoc(part) or "").partition("\n\n")[0].replace("\n", " ")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **schema, "title": f"plan of gpipe-autoplan, version {PLAN_SCHEMA_VERSION}"}


def schema_text() -> str:
    """`plan_schema` as the file `plan.schema.json` holds it."""
    return json.dumps(plan_schema(), indent=1) + "\n"


def format_rows() -> Iterator[FormatRow]:
    """Every field of every part."""
    for part in PARTS:
        meanings = _meanings(part)
        for field in part.model_fields:
            symbol = SYMBOLS.get((part.__name__, field), "")
            yield FormatRow(part.__name__, field, meanings[field], _unit(part, field), symbol)


def format_table() -> str:
    """The same as tables in Markdown, one for each part."""
    lines: list[str] = []
    part = ""
    for row in format_rows():
        if row.part != part:
            part = row.part
            lines += ["", f"## {part}", "", "| field | meaning | unit | symbol |", "|---|---|---|---|"]
        lines.append(f"| `{row.field}` | {row.meaning.replace('|', '/')} | {row.unit} | {row.symbol} |")
    return "\n".join(lines[1:]) + "\n"


def _unit(part: type[BaseModel], field: str) -> str:
    if field in _SIZES:
        return "samples"
    if part is StageMemory:
        return "bytes"
    if field in _SHARES:
        return "share of 1"
    return next((unit for ending, unit in _UNITS if field.endswith(ending)), "")


def _meanings(part: type[BaseModel]) -> dict[str, str]:
    """What the class, or the one that it has its fields from, says of them in the section `Attributes`."""
    texts = (inspect.cleandoc(one.__doc__ or "") for one in part.__mro__)
    section = next(text for text in texts if "Attributes:\n" in text).partition("Attributes:\n")[2]
    entries = re.split(r"^    (?=\w+: )", section.partition("\n\n")[0], flags=re.MULTILINE)
    told = (entry.partition(": ") for entry in entries if entry.strip())
    return {name: " ".join(meaning.split()) for name, _, meaning in told}
