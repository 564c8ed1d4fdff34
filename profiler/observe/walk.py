"""The walk from a model to all that its code reaches, each thing that can change noted as a spot (see `elsewhere`)."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import functools
import multiprocessing.sharedctypes
import os
import queue
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.observe.held_values import (
    is_ordered,
    is_plain,
    names_used,
    numbers,
    position,
    read,
    refill,
    refill_plainly,
    set_attributes,
    slots_of,
)
from profiler.observe.python_state import CONTAINERS, key_of_value, plain_of_value
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, Generator, is_generator, key_of, state_of

_OURS = __name__.partition(".")[0]
_NOT_LOOKED_INTO = frozenset({_OURS, "torch", "numpy", "sympy", "mpmath", "einops", *sys.stdlib_module_names})
_HOLDERS = (  # of the standard library
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    threading.Semaphore,
    queue.Queue,
    multiprocessing.sharedctypes.SynchronizedBase,
)
_NUMBERS_OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_CACHED_FUNCTION = type(functools.lru_cache(len))
_ORDERED = (list, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, defaultdict, collections.Counter)
_WRAPPED_MAPPINGS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, collections.UserDict)
_OF_THE_ENVIRONMENT = frozenset({"environ", "getenv", "putenv"})
_LARGEST_ARRAY_BYTES = 2**20  # that is compared; larger ones are data [chosen]
_ENDS: tuple[Any, ...] = (torch.default_generator, *OF_PYTHON_AND_NUMPY)  # others look at these


@dataclass(frozen=True, slots=True)
class Spot:
    """Something that holds values, at one moment.

    Attributes:
        name: dotted, from the module or the file.
        module: path of the module whose code reaches it first.
        holder: kept, so that its identity stays its own.
        items: what it holds, by name or position.
        write: puts items in the place of what it holds; None if that cannot be.
        is_random: whether it is a random generator.
    """

    name: str
    module: str
    holder: Any
    items: Mapping[Any, Any]
    write: Callable[[Mapping[Any, Any]], object] | None
    is_random: bool = False

    @property
    def key(self) -> object:
        """Equal if it holds the same objects, and numbers and texts of the same value."""
        return {name: key_of_value(value) for name, value in self.items.items()}

    @property
    def plain(self) -> object:
        """Equal if no number, text or random generator has changed, nor how much it holds."""
        return {name: plain_of_value(value) for name, value in self.items.items()}


Spots = Mapping[Hashable, Spot]


class Walk:
    """Goes from the model to all that it reaches, each once.

    Attributes:
        spots: found so far.
        ends: Python's and numpy's random generators, where a function of theirs is reached.
        names: that the code uses.
        functions: that were reached.
        arrays: of numpy that were reached, by name.
    """

    def __init__(self) -> None:
        self.spots: dict[Hashable, Spot] = {}
        self.ends: dict[int, Any] = {}
        self._seen: dict[int, Any] = {id(end): end for end in _ENDS}
        self.names: set[str] = set()
        self.functions: list[types.FunctionType] = []
        self.arrays: list[tuple[str, np.ndarray]] = []
        self._unused: dict[str, list[tuple[str, str, Any, Any]]] = defaultdict(list)  # until the code uses the name
        self._seen_classes: dict[int, type] = {}
        self._module = ""

    def enter(self, path: str, module: nn.Module) -> None:
        """Walk from a module of the model: what its attributes hold, and its class; the attributes have their own look.

        Args:
            path: of the module.
            module: its parameters, buffers and submodules are none of what is looked for.
        """
        self._module = path
        self._seen[id(module)] = module
        for name, value in list(module.__dict__.items()):
            if name in OF_MODULES:
                self._hooks(f"{path}.{name}", value)
            elif type(value) in CONTAINERS:
                self._seen[id(value)] = value
                for each in list(value.values() if isinstance(value, dict) else value):
                    self.walk(f"{path}.{name}", each)
            else:
                self.walk(f"{path}.{name}", value)
        for found in self.of_class(type(module), "forward", "__call__"):
            self.walk(*found)

    def _hooks(self, name: str, value: Any) -> None:
        if name.endswith(("_forward_hooks", "_forward_pre_hooks")):
            for hook in list(value.values()):
                self.walk(name, hook)

    def walk(self, name: str, value: Any) -> None:
        """Note what a value holds, and go on from there."""
        pending = [(name.lstrip("."), value)]
        while pending:
            name, value = pending.pop()
            if is_plain(value):
                continue
            if id(value) in self._seen:
                if any(value is end for end in OF_PYTHON_AND_NUMPY):
                    self.ends[id(value)] = value
                continue
            self._seen[id(value)] = value
            pending.extend(self._held_by(name, value))

    def _held_by(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note a spot, if the value is one; what it holds, each with a name."""
        kind = type(value)  # what a stand-in says of its class may be an error
        if issubclass(kind, types.FunctionType):
            yield from self._function(name, value)
        elif issubclass(kind, types.MethodType):
            yield from ((name, value.__self__), (name, value.__func__))
        elif issubclass(kind, types.BuiltinMethodType):
            yield name, value.__self__
        elif issubclass(kind, functools.partial):
            yield from ((name, value.func), (name, value.args), (name, value.keywords))
        elif issubclass(kind, staticmethod | classmethod):
            yield name, value.__func__
        elif issubclass(kind, property):
            yield from ((name, value.fget), (name, value.fset))
        elif issubclass(kind, _CACHED_FUNCTION):
            yield name, value.__wrapped__  # what it keeps follows from its arguments
        elif issubclass(kind, type):
            yield from self.of_class(value)
        elif issubclass(kind, types.ModuleType):
            yield from self._file(value)
        elif issubclass(kind, Tensor):
            return
        elif issubclass(kind, tuple | frozenset):
            yield from ((f"{name}[{position}]", item) for position, item in enumerate(value))
        else:
            yield from self._object(name, value)

    def _object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if issubclass(kind, Generator) and is_generator(value):
            restore = state_of(value)
            self._note(name, value, {"": repr(key_of(value))}, lambda _: restore and restore(), is_random=True)
        elif kind in _MAPPINGS or value is os.environ:
            self._note(name, value, dict(value), functools.partial(refill, value.update, value))
            yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
        elif kind in _ORDERED:
            self._note(name, value, dict(enumerate(value)), lambda items: refill(value.extend, value, items.values()))
            yield from ((f"{name}[{position}]", item) for position, item in enumerate(list(value)))
        elif kind is contextvars.ContextVar:
            yield from self._context(name, value)
        elif issubclass(kind, dict | list):  # of a class of somebody's, which may do what it likes when it is filled
            if isinstance(value, dict):  # whose copy() would ask its own __getitem__, which may make what is asked for
                items = {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}
            else:
                items = dict(enumerate(list.copy(value)))
            self._note(name, (value, "items"), items, functools.partial(refill_plainly, value))
            yield from ((f"{name}[{key!r}]", item) for key, item in items.items())
            yield from self._instance(name, value)
        elif issubclass(kind, _WRAPPED_MAPPINGS):
            self._note(name, value, dict(value.items()), functools.partial(refill, value.update, value))
            yield from ((f"{name}[...]", item) for item in list(value.values()))
        elif not self._by_content(name, value):
            yield from self._other(name, value)

    def _by_content(self, name: str, value: Any) -> bool:
        """Note what holds nothing that could hold something else, if it is such."""
        kind = type(value)
        if kind is np.ndarray:
            self.arrays.append((name, value))
        if kind is set:
            self._note(name, value, dict.fromkeys(value), functools.partial(refill, value.update, value))
        elif kind is np.ndarray and value.nbytes <= _LARGEST_ARRAY_BYTES and value.dtype.kind in "biufc":
            content = value.copy()
            self._note(name, value, {"": content.tobytes()}, lambda _: np.copyto(value, content))
        elif kind is bytearray:
            self._note(name, value, {"": bytes(value)}, lambda items: value.__init__(items[""]))
        elif kind is array.array:
            elements = value[:]
            self._note(name, value, {"": value.tobytes()}, lambda _: value.__setitem__(slice(None), elements))
        elif kind is memoryview and value.contiguous:
            self._note(name, value, {"": value.tobytes()}, functools.partial(_write_bytes, value))
        elif issubclass(kind, _NUMBERS_OF_C):
            self._note(name, value, {"": bytes(value)}, functools.partial(_write_bytes, memoryview(value)))
        elif issubclass(kind, types.GeneratorType):
            frame = value.gi_frame
            self._note(name, value, {"": "" if frame is None else f"{frame.f_lasti} {numbers(frame.f_locals)}"})
        elif issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools"):
            self._note(name, value, {"": position(value)})
        else:
            return False
        return True

    def _other(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if issubclass(kind, weakref.ReferenceType):
            yield name, value()
        elif issubclass(kind, types.CellType):
            yield from self._cell(name, value)
        elif issubclass(kind, _HOLDERS) or kind.__module__.partition(".")[0] not in _NOT_LOOKED_INTO:
            yield from self._instance(name, value)

    def _cell(self, name: str, cell: types.CellType) -> Iterator[tuple[str, Any]]:
        try:
            content = cell.cell_contents
        except ValueError:  # nothing is in it yet
            return
        self._note(name, cell, {"": content}, lambda items: setattr(cell, "cell_contents", items[""]))
        yield name, content

    def _context(self, name: str, variable: contextvars.ContextVar[Any]) -> Iterator[tuple[str, Any]]:
        """A variable of the context, and what its value holds: many put a new dict there in place of the last one."""
        content = variable.get(None)
        plain = content if isinstance(content, dict) else dict(enumerate(content)) if is_ordered(content) else {}
        items = {"": content} | {f"[{key!r}]": item for key, item in plain.items()}
        self._note(name, variable, items, lambda items: variable.set(items[""]))
        yield name, content

    def _instance(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """An object of somebody's class, a module that is none of the model's among them."""
        held = read(value, "__dict__")
        if type(held) is dict:
            self._note(name, value, dict(held), functools.partial(refill, held.update, held))
            yield from ((f"{name}.{key}", item) for key, item in list(held.items()))
        found = {slot: read(value, slot) for slot in slots_of(type(value))}
        slots = {slot: content for slot, content in found.items() if content is not None}
        if slots:
            self._note(name, (value,), slots, functools.partial(set_attributes, value))
            yield from ((f"{name}.{key}", item) for key, item in slots.items())
        yield from self.of_class(type(value), *_IMPLICIT)

    def _function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        package = str(function.__globals__.get("__name__", "")).partition(".")[0]
        if package == _OURS:
            return
        self.functions.append(function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield f"{name}.{variable}", cell
        yield from ((f"{name}()", value) for value in function.__defaults__ or ())
        yield from ((f"{name}()", value) for value in (function.__kwdefaults__ or {}).values())
        if function.__dict__:
            held = function.__dict__
            self._note(name, function, dict(held), functools.partial(refill, held.update, held))
            yield from ((f"{name}.{key}", item) for key, item in held.items())
        if package in _NOT_LOOKED_INTO:  # a decorator's, say
            return
        file = str(function.__globals__.get("__name__", ""))
        for used in names_used(function.__code__):
            yield from self._use(used)
            if used in function.__globals__:
                yield from self._variable(file, function.__globals__, used)

    def _variable(self, file: str, variables: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
        """A variable of a file, or of a file that is imported there: of that only what has a name that is used."""
        value = variables[name]
        if isinstance(value, types.ModuleType):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                yield from self._file(value)
            return
        if is_plain(value):
            self._note(
                f"{file}.{name}",
                (variables, name),
                {name: value},
                lambda items: variables.__setitem__(name, items[name]),
            )
        yield f"{file}.{name}", value

    def _file(self, file: types.ModuleType) -> Iterator[tuple[str, Any]]:
        """What has a name there that the code uses; all of one that was made by hand, and is no file's."""
        if sys.modules.get(file.__name__) is not file:
            held = vars(file)
            self._note(file.__name__, file, dict(held), functools.partial(refill, held.update, held))
            yield from ((f"{file.__name__}.{name}", value) for name, value in held.items() if name != "__builtins__")
        elif file.__name__.partition(".")[0] not in _NOT_LOOKED_INTO:
            for inner in list(vars(file)):
                yield from self._later(inner, file.__name__, vars(file), vars(file)[inner])

    def of_class(self, kind: type, *implicit: str) -> Iterator[tuple[str, Any]]:
        """What a class holds under names that the code uses; methods and plain values."""
        for each in kind.__mro__:
            if each.__module__.partition(".")[0] in _NOT_LOOKED_INTO or id(each) in self._seen_classes:
                continue
            self._seen_classes[id(each)] = each
            for name, value in list(vars(each).items()):
                yield from self._later(name, f"{each.__module__}.{each.__qualname__}", each, value)
        for name in implicit:
            yield from self._use(name)

    def _later(self, name: str, prefix: str, owner: Any, value: Any) -> Iterator[tuple[str, Any]]:
        """Go on to a value as soon as the code uses its name."""
        self._unused[name].append((prefix, name, owner, value))
        if name in self.names:
            yield from self._use(name, again=True)

    def _use(self, name: str, *, again: bool = False) -> Iterator[tuple[str, Any]]:
        if name in self.names and not again:
            return
        self.names.add(name)
        if name in _OF_THE_ENVIRONMENT:
            yield "os.environ", os.environ
        for prefix, _, owner, value in self._unused.pop(name, ()):
            if isinstance(owner, dict):
                yield from self._variable(prefix, owner, name)
                continue
            if is_plain(value) and not name.startswith("__"):
                self._note(f"{prefix}.{name}", (owner, name), {name: value}, functools.partial(set_attributes, owner))
            yield f"{prefix}.{name}", value

    def _note(
        self,
        name: str,
        holder: Any,
        items: Mapping[Any, Any],
        write: Callable[[Mapping[Any, Any]], object] | None = None,
        *,
        is_random: bool = False,
    ) -> None:
        key = (
            tuple(id(part) if not isinstance(part, str) else part for part in holder)
            if type(holder) is tuple
            else id(holder)
        )
        self.spots[key] = Spot(name, self._module, holder, items, write, is_random)


def _write_bytes(memory: memoryview, items: Mapping[Any, Any]) -> None:
    if not memory.readonly:
        memory.cast("B")[:] = items[""]


OF_MODULES = frozenset(nn.Module().__dict__)
_IMPLICIT = ("__call__", "__getattr__", "__getitem__", "__setitem__", "__iter__", "__next__", "__enter__", "__exit__")


def walk_from(code: Any, methods: Sequence[str] = ()) -> Walk:
    """The walk from a function or module, or from a class by these methods."""
    walk = Walk()
    if isinstance(code, type):
        for found in walk.of_class(code, *methods):
            walk.walk(*found)
    elif isinstance(code, nn.Module):
        for path, module in code.named_modules():
            walk.enter(path, module)
    else:
        walk.walk("", code)
    return walk
