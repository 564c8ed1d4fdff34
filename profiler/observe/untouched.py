"""A model left as it was, whatever happens to it meanwhile.

Tracing runs the model's own code with other tensors in the place of its parameters, and that code may keep what it is
given: as a cache, in a list, under a new name. Everything that its modules hold is put back as it was, object by
object, also when an exception passes. So are the random generators.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from profiler.observe.elsewhere import Unwritten, constants_reached, put_spots_back, spots_of
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, state_of

_CONTAINERS = (list, set, dict, OrderedDict, defaultdict)  # plain ones: what others do when they are filled is unknown
_OTHERS = frozenset({"torch", "numpy", *sys.stdlib_module_names})  # packages whose objects are not looked into
_DEPTH = 2  # of objects in objects: a configuration may hold others


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within, the model may be changed; afterwards it is as it was before.

    That is each module's attributes, submodules, parameters, buffers, hooks and mode, and what lists, sets, dicts and
    objects among them (a configuration) hold, by identity; what else its code reaches (`profiler.observe.elsewhere`);
    and the states of random generators, its own and those of torch, numpy and Python. Of tensors that are neither
    parameters nor buffers values are put back: nothing stands in for those, and they may lie in a buffer's memory.
    """
    undo: dict[int, Callable[[], object]] = {}  # by identity of what it is about, which it keeps alive
    pending: list[tuple[Any, int]] = [(generator, 0) for generator in (torch.default_generator, *OF_PYTHON_AND_NUMPY)]
    pending.extend((module.__dict__, _DEPTH) for module in model.modules())
    while pending:
        found, depth = pending.pop()
        if type(found) is tuple:
            pending.extend((item, depth) for item in found)
        elif id(found) in undo:
            continue
        elif type(found) in _CONTAINERS:
            undo[id(found)] = partial(_put_back, found, found.copy())
            pending.extend((item, depth) for item in (found.values() if isinstance(found, dict) else found))
        elif (restore := state_of(found)) is not None:
            undo[id(found)] = restore
        elif depth and _is_looked_into(found):
            pending.append((found.__dict__, depth - 1))
    elsewhere = spots_of(model)
    constants = Unwritten(constants_reached(model))
    try:
        yield
    finally:
        constants.put_back()
        put_spots_back(elsewhere, spots_of(model))
        for restore in undo.values():
            restore()


def _is_looked_into(found: Any) -> bool:
    """Whether it is an object with attributes of somebody else's class; modules of the model are seen by themselves."""
    if isinstance(found, nn.Module | Tensor | type) or not isinstance(getattr(found, "__dict__", None), dict):
        return False
    return type(found).__module__.partition(".")[0] not in _OTHERS


def _put_back(container: Any, copy: Any) -> None:
    if _same(container, copy):
        return
    if isinstance(container, list):
        container[:] = copy
    else:
        container.clear()
        container.update(copy)


def _same(container: Any, copy: Any) -> bool:
    """Whether the container holds the same objects in the same order."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(key is kept and value is former for (key, value), (kept, former) in pairs)
    if isinstance(container, set):
        return {id(item) for item in container} == {id(item) for item in copy}
    return all(item is former for item, former in zip(container, copy, strict=True))
