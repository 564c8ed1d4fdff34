"""Functions that cannot be traced, as modules that call them, and noticed however they are reached.

While a model is traced, the code of such a function is another one, which hands the call on. So it does not matter
how the model comes by the function: by its name, from a table of losses, as a `functools.partial` or a default.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Handler = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

_HANDLERS: dict[str, Handler] = {}


class CalledFunction(nn.Module):
    """A function as a module without parameters, whose forward pass calls it. Arrays become tensors.

    Args:
        function: that is called, with the code that it has now.
    """

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        copied.__kwdefaults__ = function.__kwdefaults__
        self.original = copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return pytree.tree_map_only(np.ndarray, torch.from_numpy, self.original(*args, **kwargs))


@contextlib.contextmanager
def handed_on(name: str, function: FunctionType, handler: Handler) -> Iterator[None]:
    """Within, `handler(args, kwargs)` takes the place of each call of the function, in every thread."""
    code = function.__code__
    _HANDLERS[name] = handler
    constants = tuple(name if constant == _NAME else constant for constant in _hand_on.__code__.co_consts)
    function.__code__ = _hand_on.__code__.replace(
        co_consts=constants,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    try:
        yield
    finally:
        function.__code__ = code
        del _HANDLERS[name]


_NAME = "the name of the function"


def _hand_on(*args, **kwargs):  # type: ignore[no-untyped-def]  # runs with the globals of the function
    handlers = __import__("sys").modules["profiler.opaque.called_functions"]._HANDLERS
    return handlers["the name of the function"](args, kwargs)


class _Pickler(pickle.Pickler):
    def reducer_override(self, held: Any) -> Any:
        if isinstance(held, Tensor | nn.Module):
            raise pickle.PicklingError("it holds a tensor")
        return NotImplemented


def content_of(value: Any) -> bytes | None:
    """What an argument holds that is no tensor and no number, such as a configuration; None if that cannot be told.

    That of a function or a module cannot, nor what cannot be pickled or holds a tensor.
    """
    if isinstance(value, Tensor | nn.Module) or callable(value):
        return None
    memory = io.BytesIO()
    try:
        _Pickler(memory).dump(value)
    except Exception:  # code of the object's class runs, which may raise anything
        return None
    return memory.getvalue()
