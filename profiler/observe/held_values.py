"""How a walk over what code reaches reads values, and puts back what containers and objects held."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def set_attributes(owner: Any, items: Mapping[str, Any]) -> None:
    """Give an object these attributes again, where it has others."""
    for name, value in items.items():
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)


def refill_plainly(container: Any, items: Mapping[Any, Any]) -> None:
    """By the class that it is derived from."""
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, items)
    else:
        list.__setitem__(container, slice(None), list(items.values()))


def refill(fill: Callable[[Any], object], container: Any, items: Any) -> None:
    """Let a container hold what it held."""
    container.clear()
    fill(items)


def is_ordered(value: Any) -> bool:
    """Whether its items have positions."""
    return isinstance(value, list | tuple)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or nothing."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def read(value: Any, name: str) -> Any:
    """An attribute; None where there is none, or its class makes an error of the question."""
    try:
        return getattr(value, name)
    except Exception:
        return None


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class."""
    return [
        name
        for each in kind.__mro__
        for name, held in vars(each).items()
        if isinstance(held, types.MemberDescriptorType) and each.__module__ != "builtins"
    ]


@functools.cache
def names_used(code: types.CodeType) -> tuple[str, ...]:
    """All names of variables, functions and attributes in a function's code and in the functions inside it."""
    inner = [
        name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in names_used(constant)
    ]
    return tuple(name for name in dict.fromkeys((*code.co_names, *inner)) if name.isidentifier())  # not pytest's own


def numbers(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Those variables that hold numbers and texts."""
    return {name: value for name, value in variables.items() if is_plain(value)}


def position(iterator: Iterator[Any]) -> str:
    """Text that differs after an iterator has gone on, as far as it lets that be seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns that some will not say so for ever
        try:
            return repr(iterator.__reduce__()[1:])
        except Exception:
            return repr(iterator)
