"""The structure of a sample as text, read and written by ourselves: tuples, named ones too, lists and dicts.

torch's own reader (`treespec_loads`) imports the modules that the text names. A plan may come from a stranger, so this
one has a closed vocabulary, and reading never imports anything, nor calls what it finds. The text has torch's form,
which earlier versions wrote.

A named tuple is read as one of the class that wrote it, if that is known in this process, as it is where the model is
planned. Elsewhere, as in a process that trains and in which the class has come by value, it is one with the same name
and fields; a model that asks for the class itself then traces to another graph, whose fingerprint is refused.

    >>> text = dumps(((LEAF, {"mask": LEAF}), {}))
    >>> loads(text)
    ((Ellipsis, {'mask': Ellipsis}), {})
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, namedtuple
from functools import cache
from typing import Any, Final, Literal, Self

from pydantic import TypeAdapter, ValidationError, model_validator

from profiler.value import Value, first_problem

LEAF: Final = ...
"""Stands where the sample has a tensor or a constant."""
MOST_DEPTH: Final = 32
"""Containers inside each other; jiter, which reads the JSON, goes no deeper than about 200 objects and lists."""
CONTAINERS: Final[dict[str, type]] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
}
_NAMES: Final = {container: name for name, container in CONTAINERS.items()}
_NAMED_TUPLE: Final = "collections.namedtuple"
_PROTOCOL: Final = 1  # of torch's form


class _Node(Value):
    """A container, or (without type and context) a leaf.

    Attributes:
        type: of the container.
        context: its keys as JSON, if it has any; of a named tuple where its class is, and its fields.
        children_spec: what it holds.
    """

    type: (
        Literal["builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", "collections.namedtuple"]
        | None
    )
    context: str | None
    children_spec: tuple[_Node, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type is None and (self.context is not None or self.children_spec):
            raise ValueError("a leaf holds something")
        if self.type == _NAMED_TUPLE:
            self.named_tuple()
        elif self.type is not None and self.has_keys:
            keys = self.keys()
            if len(keys) != len(self.children_spec) or len(set(keys)) != len(keys):
                raise ValueError(f"a {self.type} has {len(self.children_spec)} values for the keys {list(keys)}")
        elif self.type is not None and self.context not in ("null", None):
            raise ValueError(f"a {self.type} has keys")
        return self

    @property
    def has_keys(self) -> bool:
        """Whether it is some dict."""
        return self.type is not None and issubclass(CONTAINERS.get(self.type, tuple), dict)

    def keys(self) -> tuple[str | int, ...]:
        """Of a dict."""
        return _KEYS.validate_json(self.context or "")

    def named_tuple(self) -> Any:
        """The class of one."""
        place, *fields = _FIELDS.validate_json(self.context or "")
        if len(fields) != len(self.children_spec):
            raise ValueError(f"a named tuple has {len(self.children_spec)} values for the fields {fields}")
        known = _class_at(place)
        if known is not None and known._fields == tuple(fields):
            return known
        return _stand_in(place.rpartition(":")[2].rpartition(".")[2], tuple(fields))

    def built(self) -> Any:
        """The container with `LEAF` for its leaves."""
        if self.type is None:
            return LEAF
        children = [child.built() for child in self.children_spec]
        if self.type == _NAMED_TUPLE:
            return tuple.__new__(self.named_tuple(), children)
        return CONTAINERS[self.type](zip(self.keys(), children, strict=True) if self.has_keys else children)


_KEYS: Final = TypeAdapter(tuple[str | int, ...])
_FIELDS: Final = TypeAdapter(tuple[str, ...])
_TEXT: Final = TypeAdapter(tuple[Literal[1], _Node])


def is_container(value: Any) -> bool:
    """Whether it is no leaf."""
    return type(value) in _NAMES or is_named_tuple(type(value))


def is_named_tuple(kind: type) -> bool:
    """Whether values of a class are named tuples, and nothing more: a class of its own may build them otherwise."""
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple) and hasattr(kind, "_make")


def alike(one: Any, other: Any) -> bool:
    """Whether two structures are the same, whichever classes their named tuples have."""
    if is_named_tuple(type(one)) and is_named_tuple(type(other)):
        same = type(one)._fields == type(other)._fields
        return same and all(map(alike, one, other))
    if type(one) not in _NAMES or type(other) not in _NAMES:
        return not is_container(one) and not is_container(other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):  # their order is that of the leaves
        return [*one] == [*other] and all(map(alike, one.values(), other.values()))
    return all(map(alike, one, other))


def dumps(structure: Any) -> str:
    """The text of a structure of tuples, lists and dicts; what is none of these is a leaf.

    Raises:
        ValueError: a key is neither a string nor a whole number, containers stand too deep inside each other, or a
            named tuple's class is at no place that has a name.
    """
    return json.dumps([_PROTOCOL, _node(structure, MOST_DEPTH)])


def loads(text: str) -> Any:
    """The structure that `dumps` wrote, with `LEAF` for its leaves.

    Raises:
        ValueError: it is no such text.
    """
    try:
        node = _TEXT.validate_json(text)[1]
        if _depth(node) > MOST_DEPTH:
            raise ValueError(f"containers stand more than {MOST_DEPTH} deep inside each other")
        return node.built()
    except ValidationError as problem:
        raise ValueError(
            f"is no structure of tuples, lists and dicts, plan again ({first_problem(problem)})"
        ) from problem


def leaf_count(structure: Any) -> int:
    """How many leaves a structure has."""
    if not is_container(structure):
        return 1
    return sum(map(leaf_count, structure.values() if isinstance(structure, dict) else structure))


def _depth(node: _Node) -> int:
    return 0 if node.type is None else 1 + max(map(_depth, node.children_spec), default=0)


def _node(structure: Any, depth: int) -> dict[str, Any]:
    name = _NAMED_TUPLE if is_named_tuple(type(structure)) else _NAMES.get(type(structure))
    if name is None:
        return {"type": None, "context": None, "children_spec": []}
    if not depth:
        raise ValueError(f"containers stand more than {MOST_DEPTH} deep inside each other")
    context = "null"
    if name == _NAMED_TUPLE:
        context = json.dumps([_place_of(type(structure)), *type(structure)._fields])
    if isinstance(structure, dict):
        strange = [key for key in structure if type(key) not in (str, int)]
        if strange:
            raise ValueError(f"a dict has the key {strange[0]!r}, which is neither a string nor a whole number")
        context = json.dumps(list(structure))
    children = structure.values() if isinstance(structure, dict) else structure
    return {"type": name, "context": context, "children_spec": [_node(child, depth - 1) for child in children]}


def _place_of(kind: type) -> str:
    """Where the class of a named tuple is: `module:name`. A spawned process has the script under two names."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    place = f"{module}:{kind.__qualname__}"
    if _class_at(place) is not kind:
        raise ValueError(
            f"the named tuple {kind.__name__} is not to be found as {kind.__qualname__} in {kind.__module__}; define "
            "it there, outside of functions, or pass a tuple"
        )
    return place


def _class_at(place: str) -> Any:
    """The class of named tuples of that place, if its module is loaded; nothing is imported or called."""
    module, _, name = place.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and is_named_tuple(found) else None


@cache
def _stand_in(name: str, fields: tuple[str, ...]) -> type:
    """A class of named tuples; ValueError if these are no names."""
    return namedtuple(name, fields)
