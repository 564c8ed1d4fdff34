"""Bodies for `hidden_state`: what lies in threads, contexts, the environment, files and clocks; in the graph or not."""

from __future__ import annotations

import contextvars
import datetime
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.hidden_state import FEATURES, Body, hides, late

_CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("a value of this file")
_THREAD = threading.local()
_VARIABLE = "HIDDEN_WORLD_CALLS"
_FILE = Path(tempfile.gettempdir()) / f"hidden_world_{os.getpid()}"


def _clean(part: Any) -> None:
    """All as at the beginning."""
    _CONTEXT.set({"calls": 0, "tensor": None})
    _THREAD.__dict__.clear()
    os.environ.pop(_VARIABLE, None)
    _FILE.unlink(missing_ok=True)
    part.where = SimpleNamespace(file=_FILE)


def both(name: str, *, draws: bool = False) -> Callable[[Body], Body]:
    """Sort a body in twice: as it is, and in a module that is called as it is."""

    def sort_in(body: Body) -> Body:
        hides(name, _clean, draws=draws)(body)

        @hides(f"{name}, called as it is", _clean, draws=draws)
        def _(part: Any, x: Tensor) -> Tensor:
            return body(part, x) + torch.from_numpy(np.tanh(x.detach().numpy()))

        return body

    return sort_in


@both("a counter in a context")
def _(part: Any, x: Tensor) -> Tensor:
    _CONTEXT.set({**_CONTEXT.get(), "calls": _CONTEXT.get()["calls"] + 1})
    return late(_CONTEXT.get()["calls"], x)


@both("a tensor kept in a context")
def _(part: Any, x: Tensor) -> Tensor:
    kept = _CONTEXT.get()["tensor"]
    _CONTEXT.set({**_CONTEXT.get(), "tensor": x.detach().mean()})
    return x if kept is None else x + kept


@both("a table kept in a context")
def _(part: Any, x: Tensor) -> Tensor:
    if _CONTEXT.get()["tensor"] is None:
        _CONTEXT.set({**_CONTEXT.get(), "tensor": torch.arange(FEATURES, dtype=x.dtype)})
    return x + _CONTEXT.get()["tensor"]


@both("a context set for a while")
def _(part: Any, x: Tensor) -> Tensor:
    token = _CONTEXT.set({"calls": 3, "tensor": None})
    y = x * _CONTEXT.get()["calls"]
    _CONTEXT.reset(token)
    return y


@both("a counter of the thread")
def _(part: Any, x: Tensor) -> Tensor:
    _THREAD.calls = getattr(_THREAD, "calls", 0) + 1
    return late(_THREAD.calls, x)


@both("a tensor kept by the thread")
def _(part: Any, x: Tensor) -> Tensor:
    kept = getattr(_THREAD, "tensor", None)
    _THREAD.tensor = x.detach().mean()
    return x if kept is None else x + kept


@both("a counter in the environment")
def _(part: Any, x: Tensor) -> Tensor:
    os.environ[_VARIABLE] = str(int(os.environ.get(_VARIABLE, "0")) + 1)
    return late(int(os.environ[_VARIABLE]), x)


@both("a setting in the environment")
def _(part: Any, x: Tensor) -> Tensor:
    return x * 2 if os.environ.get("HIDDEN_WORLD_FACTOR", "1") == "1" else x


@both("a counter in a file")
def _(part: Any, x: Tensor) -> Tensor:
    calls = int(part.where.file.read_text()) + 1 if part.where.file.exists() else 1
    part.where.file.write_text(str(calls))
    return late(calls, x)


@both("the time", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + time.time() % 1)


@both("seconds since", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + time.perf_counter() % 1)


@both("the hour", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + datetime.datetime.now().microsecond / 1e6)


@both("the time that it takes")
def _(part: Any, x: Tensor) -> Tensor:
    begin = time.perf_counter()
    y = part.linear(x)
    part.seconds = time.perf_counter() - begin
    return y


@both("the process's number")
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + os.getpid() % 7)


@both("a number of the system", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + uuid.uuid4().int % 1000 / 1000)


@both("an object's number", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + id(object()) % 4096 / 4096)


@both("a text's hash")
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + hash("a text") % 1000 / 1000)


@both("the order of a set")
def _(part: Any, x: Tensor) -> Tensor:
    for position, name in enumerate({"one", "two", "three"}):
        x = x + position * len(name)
    return x


@both("the thread's number")
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + threading.get_ident() % 1000 / 1000)
