"""What the code under way has counted: how often it has taken a way, say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

_OURS = __name__.partition(".")[0]
_GROWING = (tuple, list, set, dict)


def counts_now() -> Mapping[str, int | float]:
    """Numbers, and lengths of tuples, lists, sets and dicts, that the model's functions hold at this moment.

    They are local variables, and attributes of modules and of other objects that these are, by a name that tells which.
    Booleans are left out, for they mostly remember the last answer only.
    """
    found: dict[str, int | float] = {}
    for depth, frame in enumerate(reversed(list(_frames()))):
        for name, value in frame.f_locals.items():
            for each, inner in {name: value, **_attributes(name, value)}.items():
                count = _count(inner)
                if count is not None:
                    found[f"{depth} {frame.f_code.co_name}: {each}"] = count
    return found


def _attributes(name: str, value: Any) -> dict[str, Any]:
    """The attributes of a module, and of helper objects that it holds."""
    if isinstance(value, Tensor) or not hasattr(value, "__dict__") or isinstance(value, type | ModuleType):
        return {}
    found = {f"{name}.{inner}": each for inner, each in vars(value).items()}
    if isinstance(value, nn.Module):
        helpers = {inner: each for inner, each in found.items() if not isinstance(each, nn.Module)}
        for inner, each in helpers.items():
            found.update(_attributes(inner, each))
    return found


def counted_apart(some: Mapping[str, int | float], others: Mapping[str, int | float]) -> str:
    """The name of what both hold and have counted otherwise; "" if there is none."""
    names = (name for name in some if name in others and some[name] != others[name])
    return next((name.rpartition(": ")[2] for name in names), "")


def _count(value: Any) -> int | float | None:
    if type(value) in (int, float):
        number: int | float = value
        return number
    return len(value) if type(value) in _GROWING else None


def _frames() -> Iterator[FrameType]:
    """The frames of code that is neither torch's nor ours, innermost first, within the trace that is under way."""
    frame: FrameType | None = sys._getframe(1)
    entered = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == _OURS and entered:
            return  # who has asked for the trace
        if package not in (_OURS, "torch"):
            entered = True
            yield frame
        frame = frame.f_back
