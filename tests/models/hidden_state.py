"""Small modules that hide state where a graph does not look, or compute by means that a graph may lose.

Each is a function of one module `part`, which has a linear layer, and of a value (n, 6); a decorator sorts it in. What
lies beyond any model (a number of this file, say) begins anew with `fresh()`. A model is some of them in a row, each
after a layer: `hiding(["a counter in a helper", "weight norm"])`.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FEATURES = 6
OFTEN = 6  # calls until a counter matters: more than a trace and the comparison of a first step need
Body = Callable[[Any, Tensor], Tensor]
BODIES: dict[str, Body] = {}
SETUPS: dict[str, Callable[[Any], object]] = {}
DRAWING: set[str] = set()  # those that draw random numbers
OUTSIDE = SimpleNamespace()  # state of this file


def hides(name: str, setup: Callable[[Any], object] | None = None, *, draws: bool = False) -> Callable[[Body], Body]:
    """Sort a body in."""

    def sort_in(body: Body) -> Body:
        BODIES[name] = body
        if setup is not None:
            SETUPS[name] = setup
        if draws:
            DRAWING.add(name)
        return body

    return sort_in


def fresh() -> None:
    """All state of this file as at the beginning."""
    OUTSIDE.__dict__.clear()
    OUTSIDE.calls = 0
    OUTSIDE.seen = []
    OUTSIDE.chance = random.Random(7)
    OUTSIDE.numpy = np.random.default_rng(7)
    OUTSIDE.legacy = np.random.RandomState(7)
    OUTSIDE.torch = torch.Generator().manual_seed(7)
    OUTSIDE.tensor = torch.ones(FEATURES, dtype=torch.float64)
    globals()["_CALLS"] = 0
    counting_function.calls = 0  # type: ignore[attr-defined]
    remembering.__defaults__[0].clear()  # type: ignore[index]
    Part.calls = 0
    kept_of_value.cache_clear()
    _CONTEXT.set(0)
    _LOCAL.calls = 0


class Part(nn.Module):
    """A layer and a body."""

    calls = 0
    table: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.register_buffer("table", torch.linspace(0.5, 1.5, FEATURES, dtype=torch.float64))
        self.name = name
        if name in SETUPS:
            SETUPS[name](self)

    def forward(self, x: Tensor) -> Tensor:
        """From 6 features to 6."""
        return BODIES[self.name](self, x)


class Hiding(nn.Module):
    """Layers, each with a body after it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in names)
        self.parts = nn.ModuleList(Part(name) for name in names)
        self.last = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """From 6 features to 6."""
        for layer, part in zip(self.layers, self.parts, strict=True):
            x = part(torch.tanh(layer(x)))
        return self.last(x)


def hiding(names: Sequence[str]) -> Hiding:
    """A model, from the same numbers each time."""
    fresh()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return Hiding(names)


# Counters, in all places.


@functools.lru_cache
def kept_of_value(value: float) -> float:
    """A cache by value."""
    return value * 2


_CALLS = 0
_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
_LOCAL = threading.local()
_LOCAL.calls = 0


def late(count: int, x: Tensor) -> Tensor:
    """Something else from a certain call on."""
    return x * 2 if count > OFTEN else x


@hides("an attribute that counts")
def _(part: Any, x: Tensor) -> Tensor:
    part.count = getattr(part, "count", 0) + 1
    return late(part.count, x)


@hides("a private attribute that counts")
def _(part: Any, x: Tensor) -> Tensor:
    part._count = getattr(part, "_count", 0) + 1
    return late(part._count, x)


@hides("a counter that nothing reads")
def _(part: Any, x: Tensor) -> Tensor:
    part.count = getattr(part, "count", 0) + 1
    return x


def _helper(part: Any) -> None:
    part.helper = SimpleNamespace(calls=0)


@hides("a counter in a namespace", _helper)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.calls += 1
    return late(part.helper.calls, x)


class Helper:
    """Not a module."""

    def __init__(self) -> None:
        self.calls = 0
        self.history: list[float] = []
        self.tensor = torch.ones(FEATURES, dtype=torch.float64)

    def step(self, x: Tensor) -> Tensor:
        """Count and scale."""
        self.calls += 1
        return late(self.calls, x)


class Slotted:
    """Without a dict of attributes."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def helper(part: Any) -> None:
    part.helper = Helper()


@hides("a counter in a helper", helper)
def _(part: Any, x: Tensor) -> Tensor:
    return part.helper.step(x)


def _slots(part: Any) -> None:
    part.helper = Slotted()


@hides("a counter in slots", _slots)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.calls += 1
    return late(part.helper.calls, x)


def _bound(part: Any) -> None:
    part.step = Helper().step


@hides("a bound method of a helper", _bound)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


def _partial(part: Any) -> None:
    part.step = functools.partial(_count_and_scale, Helper())


def _count_and_scale(helper: Helper, x: Tensor) -> Tensor:
    return helper.step(x)


@hides("a partial with a helper", _partial)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


def _closure(part: Any) -> None:
    calls = 0

    def step(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return late(calls, x)

    part.step = step


@hides("a counter in a closure", _closure)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


def _in_a_closure(part: Any) -> None:
    seen: list[int] = []

    def step(x: Tensor) -> Tensor:
        seen.append(1)
        return late(len(seen), x)

    part.step = step


@hides("a list in a closure", _in_a_closure)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


def _list(part: Any) -> None:
    part.counts = [0]


@hides("a list that counts", _list)
def _(part: Any, x: Tensor) -> Tensor:
    part.counts[0] += 1
    return late(part.counts[0], x)


def _nested(part: Any) -> None:
    part.counts = {"a": [{"b": 0}]}


@hides("a nested container that counts", _nested)
def _(part: Any, x: Tensor) -> Tensor:
    part.counts["a"][0]["b"] += 1
    return late(part.counts["a"][0]["b"], x)


def _tuple(part: Any) -> None:
    part.seen = ()


@hides("a tuple that grows", _tuple)
def _(part: Any, x: Tensor) -> Tensor:
    part.seen += (1,)
    return late(len(part.seen), x)


def _deque(part: Any) -> None:
    part.seen = collections.deque(maxlen=2 * OFTEN)


@hides("a deque that grows", _deque)
def _(part: Any, x: Tensor) -> Tensor:
    part.seen.append(1)
    return late(len(part.seen), x)


def _counter(part: Any) -> None:
    part.seen = collections.Counter()


@hides("a Counter that counts", _counter)
def _(part: Any, x: Tensor) -> Tensor:
    part.seen["calls"] += 1
    return late(part.seen["calls"], x)


def _itertools(part: Any) -> None:
    part.counter = itertools.count()


@hides("an iterator that counts", _itertools)
def _(part: Any, x: Tensor) -> Tensor:
    return late(next(part.counter), x)


def _cycle(part: Any) -> None:
    part.factors = itertools.cycle([1.0] * OFTEN + [2.0])


@hides("a cycle of factors", _cycle)
def _(part: Any, x: Tensor) -> Tensor:
    return x * next(part.factors)


def _generator(part: Any) -> None:
    part.factors = (2.0 if count > OFTEN else 1.0 for count in range(10**6))


@hides("a generator of factors", _generator)
def _(part: Any, x: Tensor) -> Tensor:
    return x * next(part.factors)


@hides("a module-level number")
def _(part: Any, x: Tensor) -> Tensor:
    global _CALLS  # noqa: PLW0603 - which is what it is about
    _CALLS += 1
    return late(_CALLS, x)


@hides("a module-level object")
def _(part: Any, x: Tensor) -> Tensor:
    OUTSIDE.calls += 1
    return late(OUTSIDE.calls, x)


@hides("a module-level list")
def _(part: Any, x: Tensor) -> Tensor:
    OUTSIDE.seen.append(1)
    return late(len(OUTSIDE.seen), x)


@hides("an attribute of the class")
def _(part: Any, x: Tensor) -> Tensor:
    type(part).calls += 1
    return late(type(part).calls, x)


def counting_function(x: Tensor) -> Tensor:
    """Counts in an attribute of its own."""
    counting_function.calls += 1  # type: ignore[attr-defined]
    return late(counting_function.calls, x)  # type: ignore[attr-defined]


@hides("an attribute of a function")
def _(part: Any, x: Tensor) -> Tensor:
    return counting_function(x)


def remembering(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    """Counts in its default argument."""
    seen.append(1)
    return late(len(seen), x)


@hides("a default argument")
def _(part: Any, x: Tensor) -> Tensor:
    return remembering(x)


@hides("a context variable")
def _(part: Any, x: Tensor) -> Tensor:
    _CONTEXT.set(_CONTEXT.get() + 1)
    return late(_CONTEXT.get(), x)


@hides("a local of the thread")
def _(part: Any, x: Tensor) -> Tensor:
    _LOCAL.calls += 1
    return late(_LOCAL.calls, x)


def _comprehension(part: Any) -> None:
    part.seen = []


@hides("a count in a comprehension", _comprehension)
def _(part: Any, x: Tensor) -> Tensor:
    [part.seen.append(i) for i in range(2)]
    return late(sum(1 for _ in part.seen) // 2, x)


def _flag(part: Any) -> None:
    part.odd = False


@hides("a boolean that flips", _flag)
def _(part: Any, x: Tensor) -> Tensor:
    part.odd = not part.odd
    return x * 2 if part.odd else x


def _flag_in_helper(part: Any) -> None:
    part.helper = SimpleNamespace(odd=False)


@hides("a boolean in a helper that flips", _flag_in_helper)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.odd = not part.helper.odd
    return x * 2 if part.helper.odd else x


def _array(part: Any) -> None:
    part.numbers = np.zeros(2)


@hides("an array that counts", _array)
def _(part: Any, x: Tensor) -> Tensor:
    part.numbers += 1
    return late(int(part.numbers[0]), x)


@hides("parity of an array", _array)
def _(part: Any, x: Tensor) -> Tensor:
    part.numbers[1] = 1 - part.numbers[1]
    return x * (1 + float(part.numbers[1]))


def _bytes(part: Any) -> None:
    part.numbers = bytearray(1)


@hides("a byte that counts", _bytes)
def _(part: Any, x: Tensor) -> Tensor:
    part.numbers[0] += 1
    return late(part.numbers[0], x)
