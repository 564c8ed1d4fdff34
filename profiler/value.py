"""What every public value has in common: frozen, validated when built, and JSON with deterministic bytes."""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from profiler.errors import ArgumentError, PlanError
from profiler.files import replace_file
from profiler.quantities import shown

LARGEST_FILE_BYTES = 2**28  # a profile of a thousand layers has some ten million


FILE_KINDS = {"plan": "stages", "profile": "costs"}
"""Files that may be taken for one another, each with a field that only it has."""


class Value(BaseModel):
    """A frozen record; unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    file_kind: ClassVar[str | None] = None
    """What people call its files, if it has any: a key of `FILE_KINDS`."""

    def __init__(self, **fields: Any) -> None:
        """Raises ArgumentError: a field is missing, unknown, or has a value that means nothing."""
        try:
            super().__init__(**fields)
        except ValidationError as problem:
            raise ArgumentError(f"{type(self).__name__}: {first_problem(problem)}") from problem

    # Values inside of values and files are validated without __init__, so that messages keep the path to the field.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("schema_version", mode="before", check_fields=False)
    @classmethod
    def _readable(cls, given: Any) -> Any:
        ours = cls.model_fields["schema_version"].default
        if type(given) is not int or given == ours:
            return given
        do = "make it anew" if given < ours else "read it with the release that wrote it, or a later one"
        raise ValueError(f"the file has version {shown(given)} of the format, and this release reads {ours}; {do}")

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
            value = cls.model_validate_json(text)
        except ValidationError as problem:
            other = _kind_of(text)
            mistaken = other != cls.file_kind and None not in (other, cls.file_kind)
            wrong = f"$: this is a {other}, and a {cls.file_kind} is asked for" if mistaken else first_problem(problem)
            raise error(f"{source}: {wrong}") from problem
        twice = first_twice(text)
        if twice is not None:
            raise error(f"{source}: {twice}: stands twice, and only one of the two can count; remove the other")
        return value


def _kind_of(text: str) -> str | None:
    """Which of `FILE_KINDS` a JSON text seems to be."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = [kind for kind, field in FILE_KINDS.items() if isinstance(fields, dict) and field in fields]
    return found[0] if len(found) == 1 else None


def first_problem(problem: ValidationError) -> str:
    """The JSON path of the first thing that is wrong, what is wrong with it, and how many more things are."""
    first = problem.errors(include_url=False, include_input=False)[0]
    more = problem.error_count() - 1
    wrong = first["msg"].removeprefix("Value error, ")  # pydantic's words before ours
    return f"{_json_path(first['loc'])}: {wrong}{f' (and {more} more)' if more else ''}"


def _json_path(parts: Iterable[str | int]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


class _Twice(dict[str, Any]):
    """An object of JSON in which a key stands twice."""

    key: str


def first_twice(text: str) -> str | None:
    """The JSON path of the first key that an object has twice; None if there is none.

    Readers of JSON take one of the two without a word, and not all the same one.

    Args:
        text: JSON that is well formed, and no deeper than pydantic reads.
    """
    found = False

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        whole = dict(pairs)
        if len(whole) == len(pairs):
            return whole
        found = True
        twice = _Twice(whole)
        twice.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return twice

    whole = json.loads(text, object_pairs_hook=fields, parse_int=len, parse_float=len)  # digits do not matter here
    return _json_path(_first_twice(whole) or ()) if found else None


def _first_twice(whole: Any) -> tuple[str | int, ...] | None:
    if isinstance(whole, _Twice):
        return (whole.key,)
    parts: Iterable[tuple[str | int, Any]] = (
        whole.items() if isinstance(whole, dict) else enumerate(whole) if isinstance(whole, list) else ()
    )
    for place, part in parts:
        found = _first_twice(part)
        if found is not None:
            return (place, *found)
    return None


def first_missing(written: Any, given: Any) -> str | None:
    """The JSON path of the first key that is in what `to_json` writes, and not in what was given; None if all are.

    Args:
        written: JSON of a value, read again.
        given: JSON that it was read from.
    """
    found = _first_missing(written, given)
    return None if found is None else _json_path(found)


def _first_missing(written: Any, given: Any) -> tuple[str | int, ...] | None:
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(written, dict) and isinstance(given, dict):
        parts = written.items()
    elif isinstance(written, list) and isinstance(given, list):
        parts = enumerate(written)
    for place, part in parts:
        if isinstance(given, dict) and place not in given:
            return (place,)
        found = _first_missing(part, given[place])
        if found is not None:
            return (place, *found)
    return None


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
        return _bytes_of(path).decode("utf-8-sig")  # some editors put a mark before the text
    except UnicodeDecodeError as problem:
        raise error(f"cannot read the {what} {str(path)!r}: it is no text ({problem})") from problem
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot read the {what} {str(path)!r}: {reason}") from problem


def _bytes_of(path: Path) -> bytes:
    """What a file holds, if it is a file and not endless."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file but a pipe or a device")
        text = file.read(LARGEST_FILE_BYTES + 1)
    if len(text) > LARGEST_FILE_BYTES:
        raise ValueError(f"it holds more than {LARGEST_FILE_BYTES} bytes")
    return text


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _path_of(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise ArgumentError(f"{path!r} is no path; pass the name of a file")
    return Path(path)
