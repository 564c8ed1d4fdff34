"""A call that does not fit a public function is refused as any other mistake is, with the name that is nearest."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

from profiler.errors import ArgumentError
from profiler.quantities import shown

Function = TypeVar("Function", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def meant(text: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """What may have been meant by a name that is none of the known ones, to go on a sentence; "" if none is near.

    >>> meant("los", ["loss_fn", "seed"]), meant("lr", ["loss_fn", "seed"])
    ('; did you mean loss_fn', '')
    """
    close = difflib.get_close_matches(text, list(known), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(close)}" if close else ""


def fits_its_arguments(function: Function, *, keywords: Collection[str] = ()) -> Function:
    """The function, which refuses a call that does not fit it.

    Args:
        function: to be called by users.
        keywords: names that its `**keywords` may have, where not all are welcome.

    Raises:
        ArgumentError: by the function, instead of Python's TypeError.
    """
    signature = inspect.signature(function)
    named = [parameter.name for parameter in signature.parameters.values() if parameter.kind in _NAMED]
    allowed = [*(name for name in named if name not in ("self", "cls")), *keywords]
    takes_others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        unknown = [name for name in given if name not in allowed]
        if unknown and (keywords or not takes_others):
            near = meant(unknown[0], allowed)
            known = near or f"; it takes {', '.join(allowed)}"
            raise ArgumentError(f"{_name(function)} takes no argument {shown(unknown[0])}{known}")
        try:
            signature.bind(*args, **given)
        except TypeError as problem:
            raise ArgumentError(f"{_name(function)}: {problem}; it takes {', '.join(allowed)}") from None
        return function(*args, **given)

    return cast("Function", called)


def _name(function: Callable[..., Any]) -> str:
    """As users call it."""
    return function.__qualname__.removesuffix(".__init__")
