"""Single random numbers of Python and numpy as operations, so that a graph draws them anew each time.

random.random() < 0.1    becomes    drawn("random.random", 0, 1).item() < 0.1
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx

from profiler.conditions.chance import Lot
from profiler.errors import NotTraceableError
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, next_seed, seeded
from profiler.observe.source_place import keep_together_advice, place_of_node
from profiler.opaque.operators import LIBRARY

_PACKAGES = {"random": random, "numpy.random": np.random}
_DRAWS: dict[str, tuple[Callable[..., float], bool]] = {
    "random.random": (random.random, False),
    "random.uniform": (random.uniform, True),
    "numpy.random.rand": (np.random.rand, False),
    "numpy.random.random": (np.random.random, False),
    "numpy.random.random_sample": (np.random.random_sample, False),
    "numpy.random.uniform": (np.random.uniform, True),
}
"""Name -> what draws, and whether it takes two bounds."""

_WITHIN: ContextVar[bool] = ContextVar("drawn numbers become operations, in this thread", default=False)


def _drawn(name: str, low: float, high: float) -> Tensor:
    draw, takes_bounds = _DRAWS[name]
    seed = next_seed()
    with contextlib.nullcontext() if seed is None else seeded(OF_PYTHON_AND_NUMPY, seed):
        return torch.tensor(draw(low, high) if takes_bounds else draw(), dtype=torch.float64)


LIBRARY.define(
    "drawn(str name, float low, float high) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIBRARY.impl("drawn", _drawn, "CompositeExplicitAutograd")
torch.library.register_fake(
    "gpipe_autoplan::drawn", lambda name, low, high: torch.empty((), dtype=torch.float64), lib=LIBRARY
)


@contextlib.contextmanager
def drawn_as_operations() -> Iterator[None]:
    """Within, calls of these functions for one number become operations of the graph that is being traced."""
    token = _WITHIN.set(True)
    try:
        with contextlib.ExitStack() as patches:
            for name in _DRAWS:
                package, _, own_name = name.rpartition(".")
                found = getattr(_PACKAGES[package], own_name)
                patches.enter_context(mock.patch.object(_PACKAGES[package], own_name, _as_operation(name, found)))
            yield
    finally:
        _WITHIN.reset(token)


def refuse_numbers_left(graph: fx.Graph) -> None:
    """Refuse drawn numbers that are not only compared: an operation would have to take them as numbers.

    Raises:
        NotTraceableError: naming the line.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.gpipe_autoplan.drawn.default):
        if any(user.op == "call_function" and not isinstance(user.target, Lot) for user in node.users):
            place = place_of_node(node)
            raise NotTraceableError(
                f"cannot trace the model: in {place}: the forward pass computes with a number from Python's or numpy's "
                f"random generator, which a graph would freeze; {keep_together_advice(place.modules)}, or draw with "
                "torch",
                modules=place.modules,
            )


def _as_operation(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_bounds = _DRAWS[name][1]

    def draw(*args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and all(isinstance(bound, int | float) for bound in args)
        if not _WITHIN.get() or not plain or len(args) not in ((0, 2) if takes_bounds else (0,)):
            return function(*args, **kwargs)
        low, high = args or (0.0, 1.0)
        return torch.ops.gpipe_autoplan.drawn(name, float(low), float(high)).item()

    return draw
