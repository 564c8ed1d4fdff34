"""What every public value has in common: frozen, validated when built, and JSON with deterministic bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import ArgumentError, PlanError
from profiler.files import replace_file


class Value(BaseModel):
    """A frozen record; unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        """Raises ArgumentError: a field is missing, unknown, or has a value that means nothing."""
        try:
            super().__init__(**fields)
        except ValidationError as problem:
            raise ArgumentError(f"{type(self).__name__}: {first_problem(problem)}") from problem

    # Values inside of values and files are validated without __init__, so that messages keep the path to the field.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def to_json(self, *, without: frozenset[str] = frozenset()) -> str:
        """JSON text with sorted keys and a final newline: the same value always gives the same bytes.

        Args:
            without: fields to leave out.
        """
        fields = self.model_dump(mode="json", exclude=set(without))
        return json.dumps(fields, sort_keys=True, indent=1, allow_nan=False) + "\n"

    @classmethod
    def parse_json(cls, text: str, *, source: str, error: Callable[[str], PlanError]) -> Self:
        """The value that `to_json` wrote.

        Args:
            text: JSON text.
            source: where the text comes from, for the message.
            error: builds the error to raise from its message.

        Raises:
            PlanError: what `error` builds, with the JSON path of the first thing that is wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as problem:
            raise error(f"{source}: {first_problem(problem)}") from problem


def first_problem(problem: ValidationError) -> str:
    """The JSON path of the first thing that is wrong, what is wrong with it, and how many more things are."""
    first = problem.errors(include_url=False)[0]
    path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    more = problem.error_count() - 1
    return f"{path}: {first['msg']}{f' (and {more} more)' if more else ''}"


def write_atomically(path: str | Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, never meets half a file; see `profiler.files`.

    Raises:
        ArgumentError: nothing can be written there.
    """
    path = _path_of(path)
    try:
        replace_file(path, text.encode())
    except (OSError, ValueError) as problem:  # ValueError: a zero byte in the path
        reason = getattr(problem, "strerror", None) or problem
        raise ArgumentError(f"cannot write {str(path)!r}: {reason}; choose a file in a folder of yours") from problem


def read_file(path: str | Path, what: str, error: Callable[[str], PlanError]) -> str:
    """The text of a file.

    Args:
        path: where it is.
        what: it holds, for the message.
        error: builds the error to raise from its message.

    Raises:
        ArgumentError: that is no path.
        PlanError: what `error` builds; there is no such file, or it holds no text.
    """
    path = _path_of(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise error(f"cannot read the {what} {str(path)!r}: {problem}") from problem


def _path_of(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise ArgumentError(f"{path!r} is no path; pass the name of a file")
    return Path(path)
