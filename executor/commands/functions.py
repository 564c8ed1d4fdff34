"""The user's functions that arguments name: found, imported, and called with their own frames in what goes wrong."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from executor.commands.user_code import user_code
from profiler.errors import ArgumentError
from profiler.quantities import shown


def built_by(reference: str, function: Callable[[], Any]) -> tuple[Any, ...]:
    """What the user's function returns: model, sample and perhaps loss function and target."""
    check_call(reference, function)
    with user_code():
        built = function()
    if not isinstance(built, tuple) or len(built) not in (2, 4):
        kind = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise ArgumentError(
            f"{reference} returned {kind}; expected (model, sample) or (model, sample, loss_fn, target)"
        )
    return built


def check_call(reference: str, function: Callable[..., Any], *given: str) -> None:
    """Refuse a function that cannot be called with so many arguments.

    Raises:
        ArgumentError: naming what it is called with.
    """
    try:
        inspect.signature(function).bind(*given)
    except TypeError as problem:
        called = f"with {' and '.join(given)}" if given else "without arguments"
        raise ArgumentError(f"{reference} is called {called}, and that does not fit: {problem}") from problem
    except ValueError:  # a built-in function that does not say
        pass


def _refusal(reference: str, argument: str, reason: str) -> click.BadParameter:
    return click.BadParameter(f"{shown(reference)}: {reason}", param_hint=argument)


def check_place(reference: str, argument: str) -> tuple[str, str, Path | None]:
    """Module and function that a reference names, and the file if it names one; nothing is imported.

    Raises:
        click.BadParameter: it is no reference, or there is no such file.
    """
    place, colon, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    if not colon or not place or not name or not (is_file or all(map(str.isidentifier, place.split(".")))):
        raise _refusal(reference, argument, "write it as path/to/file.py:function or package.module:function")
    if not is_file:
        return place, name, None
    file = _file(place)
    if file is None:
        raise _refusal(reference, argument, f"there is no file {place}")
    if not all(file.stem.split(".")):
        raise _refusal(reference, argument, f"no module can have the name {file.stem}; rename the file")
    return file.stem, name, file


def named_function(reference: str, argument: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names.

    A file becomes a module of its own name with its folder on the path, as Python itself does for a script: then a
    spawned process, which inherits the path, can import it again.

    Raises:
        click.BadParameter: there is no such file, module or function.
    """
    module_name, name, file = check_place(reference, argument)
    sys.path.insert(0, str(Path.cwd() if file is None else file.parent))
    with user_code():
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as problem:
            if problem.name not in _ancestors(module_name):
                raise  # the module is there; something that it imports is not
            raise _refusal(reference, argument, f"there is no module {module_name}") from problem
    if file is not None and Path(module.__file__ or "").resolve() != file:
        taken = f"the name {module_name} is taken by {module.__file__ or 'a built-in module'}; rename the file"
        raise _refusal(reference, argument, taken)
    function = getattr(module, name, None)
    if not callable(function):
        raise _refusal(reference, argument, f"{module.__file__} has no function {name}")
    return function  # type: ignore[no-any-return]


def _file(place: str) -> Path | None:
    """The file of that name; None if there is none, or no file can have that name."""
    try:
        file = Path(place).resolve()
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long; links in a circle; a zero byte
        return None


def _ancestors(module_name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = module_name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
