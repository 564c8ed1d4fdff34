"""The costs of a profile as text: nearly all of its file, which plans name by its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Sequence

from profiler.value import Value

_ONE_COST = json.JSONEncoder(sort_keys=True, separators=(",\n   ", ": "), allow_nan=False)
_IN_STAGE = "in_stage"
_PAIRS = json.JSONEncoder(separators=(",\n      ", ": "), allow_nan=False)
_OPEN, _NEXT, _CLOSE = "[\n     [\n      ", "\n     ],\n     [\n      ", "\n     ]\n    ]"


def costs_text(costs: Sequence[Value]) -> str:
    """The costs as they stand in a profile's file, byte for byte what `Value.to_json` writes."""
    names = [name for name in type(costs[0]).model_fields if name != _IN_STAGE]
    known: dict[Value, str] = {}  # layers of one kind have the same

    def within(entry: Value) -> str:
        if entry not in known:
            known[entry] = _in_stage_text(entry)
        return known[entry]

    rows = []
    for cost in costs:
        plain = {name: getattr(cost, name) for name in names}
        text = _ONE_COST.encode({**plain, _IN_STAGE: None})
        in_stage = getattr(cost, _IN_STAGE)
        if in_stage is not None:
            text = text.replace(f'"{_IN_STAGE}": null', f'"{_IN_STAGE}": {within(in_stage)}')
        rows.append(f"  {{\n   {text[1:-1]}\n  }}")
    return ",\n".join(rows)


def _in_stage_text(entry: Value) -> str:
    """Whole numbers and lists of lists of them, which json would indent number by number, in four times as long."""
    fields = []
    for name in sorted(type(entry).model_fields):
        value = getattr(entry, name)
        if isinstance(value, int):
            text = str(value)
        elif not value:
            text = "[]"
        elif isinstance(value[0], Value):
            return entry.to_json().rstrip().replace("\n", "\n   ")
        else:
            text = _OPEN + _PAIRS.encode(value)[2:-2].replace("],\n      [", _NEXT) + _CLOSE
        fields.append(f'    "{name}": {text}')
    return "{\n" + ",\n".join(fields) + "\n   }"
