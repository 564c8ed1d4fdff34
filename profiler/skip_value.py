"""Values that may go past stages that do not read them, with their bytes at any micro-batch size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from profiler.field_types import Bytes, Index, Samples
from profiler.value import Value


class SkipValue(Value):
    """A value that some layer between two of its users does not read, so that it may go past a stage.

    Attributes:
        name: of the value.
        users: the layer that computes it and those that read it, ascending; the last layer stands for the model's
            output.
        has_gradient: whether a gradient comes back for it.
        size_bytes: (micro-batch size, bytes) for each size of the profile.
    """

    name: str
    users: tuple[Index, ...] = Field(min_length=2)
    has_gradient: bool
    size_bytes: tuple[tuple[Samples, Bytes], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name, numbers in (("users", self.users), ("sizes", [size for size, _ in self.size_bytes])):
            if list(numbers) != sorted(set(numbers)):
                raise ValueError(f"{name} {list(numbers)} of {self.name} do not ascend")
        if all(later - earlier == 1 for earlier, later in pairwise(self.users)):
            raise ValueError(f"every layer from {self.users[0]} to {self.users[-1]} uses {self.name}: it skips none")
        return self

    def bytes_at(self, size: int) -> int:
        """Bytes for a micro-batch of that size: on the line between sizes that are known, in proportion beyond them."""
        from profiler.between_sizes import on_line, whole_bytes

        known = dict(self.size_bytes)
        if size in known:
            return known[size]
        below = max((other for other in known if other < size), default=None)
        above = min((other for other in known if other > size), default=None)
        if below is None or above is None:
            nearest = max(known) if above is None else min(known)
            return int(whole_bytes(known[nearest] / nearest * size))
        return int(whole_bytes(on_line(known[below], known[above], (size - below) / (above - below))))


def merged_skips(parts: Sequence[tuple[SkipValue, ...] | None]) -> tuple[SkipValue, ...] | None:
    """The same values at all sizes; None where a profile does not say. Of a size that several hold, the last counts."""
    if any(values is None for values in parts):
        return None
    merged: dict[str, SkipValue] = {}
    for value in (value for values in parts for value in values or ()):
        known = dict(merged[value.name].size_bytes) if value.name in merged else {}
        sizes = tuple(sorted({**known, **dict(value.size_bytes)}.items()))
        merged[value.name] = value.model_copy(update={"size_bytes": sizes})
    return tuple(merged.values())
