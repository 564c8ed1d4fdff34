"""Functions of a module's top level, by name.

"transformers.loss.loss_ctc:ForCTCLoss"       package.module:function
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FunctionType, ModuleType

SEPARATOR = ":"
"""Between module and function; no path of a module of a model holds it."""


def name_of_function(module: str, name: str, code: CodeType) -> str | None:
    """The name of the function of a module's top level that has this code; None if there is none such."""
    full = f"{module}{SEPARATOR}{name}"
    function = function_named(full)
    return full if function is not None and function.__code__ is code else None


def function_named(name: str) -> FunctionType | None:
    """The function, without what decorates it; None unless a module that is loaded has it.

    Nothing is imported, for names come from files, too.
    """
    module, _, own_name = name.partition(SEPARATOR)
    owner = sys.modules.get(module)
    found = vars(owner).get(own_name) if isinstance(owner, ModuleType) else None
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) and _is_plain(found) else None


def _is_plain(function: FunctionType) -> bool:
    """Whether it is a function of its arguments and its module's globals, which runs when it is called."""
    lazy = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return function.__closure__ is None and not function.__code__.co_flags & lazy


def name_in_file(file: str, name: str) -> str | None:
    """The name of the function that a loaded module from this file has; None if there is none such."""
    for module, loaded in list(sys.modules.items()):
        if isinstance(loaded, ModuleType) and vars(loaded).get("__file__") == file:  # to ask a lazy one would import it
            full = f"{module}{SEPARATOR}{name}"
            function = function_named(full)
            if function is not None and function.__code__.co_filename == file:
                return full
    return None
