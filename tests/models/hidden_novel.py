"""Still more bodies for `hidden_state`: memory in common, threads, objects that count, modes, unusual layers."""

from __future__ import annotations

import array
import asyncio
import contextvars
import copy
import ctypes
import decimal
import functools
import inspect
import multiprocessing.sharedctypes
import operator
import queue
import threading
import types
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models.hidden_state import FEATURES, OUTSIDE, hides, late

F64 = torch.float64

# Memory in common.


def _window(part: Any) -> None:
    part.window = part.table[:3]


@hides("a view of a buffer, written", _window)
def _(part: Any, x: Tensor) -> Tensor:
    part.window.add_(x.detach().mean())
    return x * part.table


@hides("a view of a buffer, written without gradient", _window)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.window.mul_(0.9)
    return x * part.table


def _halves(part: Any) -> None:
    part.register_buffer("left", part.table[:3])
    part.register_buffer("right", part.table[3:])


@hides("buffers that are views of a buffer, written", _halves)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.left.add_(x.mean())
    return x * part.table


@hides("buffers that are views of a buffer, of which the base is written", _halves)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.table.add_(x.mean())
    return x * torch.cat([part.left, part.right])


def _transposed(part: Any) -> None:
    part.back = nn.Parameter(part.linear.weight.data.t())


@hides("two parameters in one memory", _transposed)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) @ part.back


def _flat(part: Any) -> None:
    part.flat = nn.Parameter(torch.linspace(-0.5, 0.5, FEATURES * FEATURES, dtype=F64))
    part.square = part.flat.view(FEATURES, FEATURES)


@hides("a view of a parameter, made before", _flat)
def _(part: Any, x: Tensor) -> Tensor:
    return x @ part.square


def _data_alias(part: Any) -> None:
    part.alias = part.linear.weight.detach()


@hides("a parameter's memory without gradient", _data_alias)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) + x @ part.alias


def _as_numpy(part: Any) -> None:
    part.memory = part.table.numpy()


@hides("a buffer's memory, written by numpy", _as_numpy)
def _(part: Any, x: Tensor) -> Tensor:
    part.memory[0] += 1
    return x * part.table


@hides("a parameter's memory, read by numpy", lambda part: setattr(part, "memory", part.linear.weight.detach().numpy()))
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) * float(part.memory[0, 0])


def _tied_late(part: Any) -> None:
    part.other = nn.Linear(FEATURES, FEATURES, dtype=F64)
    part.other.weight = part.linear.weight
    del part.other._parameters["bias"]
    part.other.bias = part.linear.bias


@hides("a layer tied after it was made", _tied_late)
def _(part: Any, x: Tensor) -> Tensor:
    return part.other(torch.tanh(part.linear(x)))


@hides("tied in the call")
def _(part: Any, x: Tensor) -> Tensor:
    other = copy.copy(part.linear)
    other._parameters = dict(part.linear._parameters)
    return other(torch.tanh(part.linear(x)))


@hides("a deep copy in the call")
def _(part: Any, x: Tensor) -> Tensor:
    return copy.deepcopy(part.linear)(x)


@hides("memory set to another's")
def _(part: Any, x: Tensor) -> Tensor:
    y = torch.empty(0, dtype=x.dtype)
    y.set_(x.detach().clone())  # type: ignore[call-overload]
    return x + y


@hides("data put in place")
def _(part: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.data = y.data + 1
    return y


@hides("an argument's data put in place")
def _(part: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.data.mul_(3)
    return y * x


@hides("a stride of its own")
def _(part: Any, x: Tensor) -> Tensor:
    return x + torch.as_strided(x.contiguous(), (len(x), FEATURES), (FEATURES, 1)) * 2


# Objects of the interpreter that count.


def _put(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    def setup(part: Any) -> None:
        part.__dict__[name] = make()

    return setup


@hides("a number of C's", _put("cell", lambda: ctypes.c_int(0)))
def _(part: Any, x: Tensor) -> Tensor:
    part.cell.value += 1
    return late(part.cell.value, x)


@hides("a shared number", _put("cell", lambda: multiprocessing.sharedctypes.RawValue("i", 0)))
def _(part: Any, x: Tensor) -> Tensor:
    part.cell.value += 1
    return late(part.cell.value, x)


@hides("an array of Python's", _put("cells", lambda: array.array("i", [0])))
def _(part: Any, x: Tensor) -> Tensor:
    part.cells[0] += 1
    return late(part.cells[0], x)


@hides("a view of bytes", _put("cells", lambda: memoryview(bytearray(1))))
def _(part: Any, x: Tensor) -> Tensor:
    part.cells[0] += 1
    return late(part.cells[0], x)


def _turning() -> queue.Queue[float]:
    made: queue.Queue[float] = queue.Queue()
    for factor in (0.5, 1.0, 1.5):
        made.put(factor)
    return made


@hides("a queue that turns", _put("queue", _turning))
def _(part: Any, x: Tensor) -> Tensor:
    factor = part.queue.get()
    part.queue.put(factor)
    return x * factor


@hides("a semaphore that counts", _put("permits", lambda: threading.Semaphore(0)))
def _(part: Any, x: Tensor) -> Tensor:
    part.permits.release()
    return late(part.permits._value, x)


@hides("a module of Python's that counts", _put("space", lambda: types.ModuleType("space")))
def _(part: Any, x: Tensor) -> Tensor:
    part.space.calls = getattr(part.space, "calls", 0) + 1
    return late(part.space.calls, x)


def _sending() -> Any:
    def accumulate() -> Generator[int, int]:
        total = 0
        while True:
            total += yield total

    made = accumulate()
    next(made)
    return made


@hides("a generator that is sent to", _put("coroutine", _sending))
def _(part: Any, x: Tensor) -> Tensor:
    return late(part.coroutine.send(1), x)


@hides("a mapping proxy", _put("hidden", lambda: {"calls": 0}))
def _(part: Any, x: Tensor) -> Tensor:
    shown = types.MappingProxyType(part.hidden)
    part.hidden["calls"] += 1
    return late(shown["calls"], x)


class _Dying:
    def __del__(self) -> None:
        OUTSIDE.calls += 1


@hides("a count of what dies")
def _(part: Any, x: Tensor) -> Tensor:
    _Dying()
    return late(OUTSIDE.calls, x)


class _Metered(type):
    made = 0

    def __call__(cls, *args: Any) -> Any:
        OUTSIDE.calls += 1
        return super().__call__(*args)


class _Factor(metaclass=_Metered):
    def __init__(self) -> None:
        self.calls = OUTSIDE.calls


@hides("a class that counts its objects")
def _(part: Any, x: Tensor) -> Tensor:
    return late(_Factor().calls, x)


@hides("an attribute of a parameter")
def _(part: Any, x: Tensor) -> Tensor:
    weight = part.linear.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return late(weight.calls, part.linear(x))


@hides("an attribute of a buffer")
def _(part: Any, x: Tensor) -> Tensor:
    part.table.calls = getattr(part.table, "calls", 0) + 1
    return late(part.table.calls, x * part.table)


@hides("an attribute of an argument")
def _(part: Any, x: Tensor) -> Tensor:
    x.calls = getattr(x, "calls", 0) + 1  # type: ignore[attr-defined]
    return late(x.calls, x)  # type: ignore[attr-defined]


@hides("a setter that counts", _put("counts", dict))
def _(part: Any, x: Tensor) -> Tensor:
    operator.setitem(part.counts, "n", part.counts.get("n", 0) + 1)
    return late(operator.itemgetter("n")(part.counts), x)


@hides("the precision of decimals")
def _(part: Any, x: Tensor) -> Tensor:
    context = decimal.getcontext()
    before = context.prec
    context.prec = before + 1
    return late(before - 28, x)


@hides("a warning that is told once")
def _(part: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        warnings.warn("rare", stacklevel=1)
    return x * (2 if told else 1)


@hides("where numpy's errors go")
def _(part: Any, x: Tensor) -> Tensor:
    before = np.geterr()["over"]
    np.seterr(over="ignore" if before == "warn" else "warn")
    return x * (2 if before == "warn" else 1)


@hides("a copied context")
def _(part: Any, x: Tensor) -> Tensor:
    number: contextvars.ContextVar[float] = contextvars.ContextVar("number", default=1.0)

    def inside() -> Tensor:
        number.set(2.0)
        return part.linear(x) * number.get()

    return contextvars.copy_context().run(inside)


@hides("how deep the stack is")
def _(part: Any, x: Tensor) -> Tensor:
    frame = inspect.currentframe()
    assert frame is not None
    return x * (2 if frame.f_code.co_name == "_" else 1)


# Threads and coroutines.


@hides("a layer in another thread")
def _(part: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(part.linear, x).result()


@hides("a factor from another thread")
def _(part: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return x * thread.submit(lambda: part.table * 2).result()


@hides("a value from another thread")
def _(part: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return x * thread.submit(lambda: x.detach().abs().amax(1, keepdim=True)).result()


@hides("a layer in a coroutine")
def _(part: Any, x: Tensor) -> Tensor:
    async def run() -> Tensor:
        result: Tensor = part.linear(x)
        return result

    coroutine = run()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError


@hides("a layer in an event loop")
def _(part: Any, x: Tensor) -> Tensor:
    async def run() -> Tensor:
        await asyncio.sleep(0)
        result: Tensor = part.linear(x)
        return result

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


# Modes, patches and classes.


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


@hides("a mode that changes a function")
def _(part: Any, x: Tensor) -> Tensor:
    with _Doubling():
        return torch.tanh(x)


class _Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.tanh.default else result


@hides("a mode that changes an operation")
def _(part: Any, x: Tensor) -> Tensor:
    with _Rounding():
        return torch.tanh(x)


class _Counted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@hides("a mode that counts", _put("mode", _Counted))
def _(part: Any, x: Tensor) -> Tensor:
    with part.mode:
        y = torch.tanh(x)
    return late(part.mode.calls, y)


@hides("a function replaced for a while")
def _(part: Any, x: Tensor) -> Tensor:
    with mock.patch.object(functional, "relu", lambda value: value * 3):
        return functional.relu(x)


@hides("a class replaced for a while")
def _(part: Any, x: Tensor) -> Tensor:
    with mock.patch.object(nn.Linear, "forward", lambda self, value: value @ self.weight):
        return part.linear(x)


class _Scaled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.tanh else result


@hides("a tensor of its own class")
def _(part: Any, x: Tensor) -> Tensor:
    return torch.tanh(x.as_subclass(_Scaled)).as_subclass(Tensor)


@hides("a tensor of its own class, returned")
def _(part: Any, x: Tensor) -> Tensor:
    return torch.tanh(x.as_subclass(_Scaled))


def _own_weight(part: Any) -> None:
    part.special = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES, dtype=F64).as_subclass(_Scaled))


@hides("a parameter of its own class", _own_weight)
def _(part: Any, x: Tensor) -> Tensor:
    return x * torch.tanh(part.special)


def _evaluated(part: Any) -> None:
    exec("def step(x, factor):\n    return x * factor", part.__dict__.setdefault("space", {}))


@hides("code from a text", _evaluated)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = part.space["step"](x, part.table)
    return result


@hides(
    "code from a text that counts",
    lambda part: part.__dict__.update(code=compile("n += 1", "", "exec"), names={"n": 0}),
)
def _(part: Any, x: Tensor) -> Tensor:
    exec(part.code, part.names)
    return late(part.names["n"], x)


# Layers and functions that are seldom used.


def _embedded(part: Any, **settings: Any) -> None:
    part.embedding = nn.Embedding(4, FEATURES, dtype=F64, **settings)


def _looked_up(part: Any, x: Tensor) -> Tensor:
    found: Tensor = part.embedding((x.detach() > 0).sum(1) % 4)
    return x + found


@hides("a table with a norm", functools.partial(_embedded, max_norm=1.0))
def _(part: Any, x: Tensor) -> Tensor:
    return _looked_up(part, x)


@hides("a table with scaled gradients", functools.partial(_embedded, scale_grad_by_freq=True))
def _(part: Any, x: Tensor) -> Tensor:
    return _looked_up(part, x)


@hides("a table with a padding", functools.partial(_embedded, padding_idx=1))
def _(part: Any, x: Tensor) -> Tensor:
    return _looked_up(part, x)


@hides("a bag", lambda part: setattr(part, "bag", nn.EmbeddingBag(4, FEATURES, dtype=F64, mode="sum")))
def _(part: Any, x: Tensor) -> Tensor:
    return x + part.bag((x.detach() > 0).long())


def _complex_weight(part: Any) -> None:
    part.phase = nn.Parameter(torch.polar(torch.ones(FEATURES, dtype=F64), torch.linspace(0, 1, FEATURES, dtype=F64)))


@hides("a complex parameter", _complex_weight)
def _(part: Any, x: Tensor) -> Tensor:
    return (x * part.phase).abs() + torch.view_as_real(part.phase * x)[..., 0]


@hides("a Fourier transform with a complex parameter", _complex_weight)
def _(part: Any, x: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(x) * part.phase).real


@hides("whole numbers inside")
def _(part: Any, x: Tensor) -> Tensor:
    rounded = (x.detach() * 8).to(torch.int8).to(x.dtype) / 8
    return x + (rounded - x).detach()


@hides("a checkpoint in a checkpoint")
def _(part: Any, x: Tensor) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        return torch.tanh(part.linear(value))

    def outer(value: Tensor) -> Tensor:
        again: Tensor = checkpoint(inner, value, use_reentrant=False)
        return part.linear(again)

    result: Tensor = checkpoint(outer, x, use_reentrant=False)
    return result


@hides("a checkpoint with dropout in a checkpoint", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        return functional.dropout(part.linear(value), 0.5)

    def outer(value: Tensor) -> Tensor:
        again: Tensor = checkpoint(inner, value, use_reentrant=False)
        return functional.dropout(again, 0.5)

    result: Tensor = checkpoint(outer, x, use_reentrant=False)
    return result


@hides("checkpoints in a row", lambda part: setattr(part, "row", nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())))
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint_sequential(part.row, 2, x, use_reentrant=False)
    return part.linear(result)


@hides("a checkpoint that counts")
def _(part: Any, x: Tensor) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        part.runs = getattr(part, "runs", 0) + 1
        return late(part.runs, part.linear(value))

    result: Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


@hides("a checkpoint that writes a buffer")
def _(part: Any, x: Tensor) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        with torch.no_grad():
            part.table.mul_(0.9)
        return part.linear(value) * part.table.clone()

    result: Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


@hides("a loop as long as a buffer says", lambda part: part.register_buffer("times", torch.tensor(2)))
def _(part: Any, x: Tensor) -> Tensor:
    for _ in range(int(part.times)):
        x = torch.tanh(part.linear(x))
    return x


@hides("a loop as long as the data say")
def _(part: Any, x: Tensor) -> Tensor:
    for _ in range(int((x[0] > 0).sum())):
        x = torch.tanh(part.linear(x))
    return x


@hides("until it converges")
def _(part: Any, x: Tensor) -> Tensor:
    y = x
    for _ in range(50):
        again = torch.tanh(x + 0.1 * part.linear(y))
        if (again - y).abs().max() < 1e-3:
            break
        y = again
    return y


@hides("sorted by values")
def _(part: Any, x: Tensor) -> Tensor:
    order = torch.argsort(x.detach()[:, 0])
    return part.linear(x[order])[torch.argsort(order)]


@hides("unequal parts")
def _(part: Any, x: Tensor) -> Tensor:
    lengths = ((x.detach() > 0).sum(1)).tolist()
    rows = [row[:length].sum() * row for row, length in zip(x, lengths, strict=True)]
    return torch.stack(rows)


@hides("a tensor that maps itself")
def _(part: Any, x: Tensor) -> Tensor:
    y = x.detach().clone()
    y.apply_(lambda value: value * value)
    return x + y


@hides("a solved system")
def _(part: Any, x: Tensor) -> Tensor:
    matrix = part.linear.weight @ part.linear.weight.t() + torch.eye(FEATURES, dtype=x.dtype)
    return torch.linalg.solve(matrix, x.t()).t()


@hides("an adaptive loss of its own", lambda part: setattr(part, "scale", nn.Parameter(torch.ones((), dtype=F64))))
def _(part: Any, x: Tensor) -> Tensor:
    return x * part.scale if part.scale.requires_grad else x


@hides("gradients switched off for the layer in the call")
def _(part: Any, x: Tensor) -> Tensor:
    for parameter in part.linear.parameters():
        parameter.requires_grad_(False)
    y = part.linear(x)
    for parameter in part.linear.parameters():
        parameter.requires_grad_(True)
    return y


@hides("an empty gradient asked for")
def _(part: Any, x: Tensor) -> Tensor:
    known = part.linear.weight.grad
    return part.linear(x) * (1.0 if known is None else 2.0)


@hides("gradients set to zero in the call")
def _(part: Any, x: Tensor) -> Tensor:
    part.linear.zero_grad()
    return part.linear(x)


@hides("a gradient kept for the next call")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    if y.requires_grad:
        y.retain_grad()
    before, part.last = getattr(part, "last", None), y
    return y if before is None or before.grad is None else y * 2
