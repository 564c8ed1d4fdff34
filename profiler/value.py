"""What every public value has in common: frozen, validated when built, and JSON with deterministic bytes."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import ArgumentError, PlanError


class Value(BaseModel):
    """A frozen record; unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> str:
        """JSON text with sorted keys and a final newline: the same value always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1, allow_nan=False) + "\n"

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
            first = problem.errors(include_url=False)[0]
            path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            more = problem.error_count() - 1
            tail = f" (and {more} more)" if more else ""
            raise error(f"{source}: {path}: {first['msg']}{tail}") from problem


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, never meets half a file.

    Raises:
        ArgumentError: nothing can be written there.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ArgumentError(
            f"cannot write {path}: {problem.strerror or problem}; choose a file in a folder of yours"
        ) from problem
