"""The structure of a sample as text, read and written by ourselves: tuples, lists and dicts, and nothing else.

torch's own reader (`treespec_loads`) imports the modules that the text names. A plan may come from a stranger, so this
one has a closed vocabulary, and reading never imports or calls anything. The text has torch's form, which earlier
versions wrote.

    >>> text = dumps(((LEAF, {"mask": LEAF}), {}))
    >>> loads(text)
    ((Ellipsis, {'mask': Ellipsis}), {})
"""

from __future__ import annotations

import json
from collections import OrderedDict
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
_PROTOCOL: Final = 1  # of torch's form


class _Node(Value):
    """A container, or (without type and context) a leaf.

    Attributes:
        type: of the container.
        context: its keys as JSON, if it has any.
        children_spec: what it holds.
    """

    type: Literal["builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"] | None
    context: str | None
    children_spec: tuple[_Node, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type is None and (self.context is not None or self.children_spec):
            raise ValueError("a leaf holds something")
        if self.type is not None and self.has_keys:
            keys = self.keys()
            if len(keys) != len(self.children_spec) or len(set(keys)) != len(keys):
                raise ValueError(f"a {self.type} has {len(self.children_spec)} values for the keys {list(keys)}")
        elif self.type is not None and self.context not in ("null", None):
            raise ValueError(f"a {self.type} has keys")
        return self

    @property
    def has_keys(self) -> bool:
        """Whether it is some dict."""
        return self.type is not None and issubclass(CONTAINERS[self.type], dict)

    def keys(self) -> tuple[str | int, ...]:
        """Of a dict."""
        return _KEYS.validate_json(self.context or "")

    def built(self) -> Any:
        """The container with `LEAF` for its leaves."""
        if self.type is None:
            return LEAF
        children = [child.built() for child in self.children_spec]
        return CONTAINERS[self.type](zip(self.keys(), children, strict=True) if self.has_keys else children)


_KEYS: Final = TypeAdapter(tuple[str | int, ...])
_TEXT: Final = TypeAdapter(tuple[Literal[1], _Node])


def dumps(structure: Any) -> str:
    """The text of a structure of tuples, lists and dicts; what is none of these is a leaf.

    Raises:
        ValueError: a key is neither a string nor a whole number, or containers stand too deep inside each other.
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
    if type(structure) not in _NAMES:
        return 1
    return sum(map(leaf_count, structure.values() if isinstance(structure, dict) else structure))


def _depth(node: _Node) -> int:
    return 0 if node.type is None else 1 + max(map(_depth, node.children_spec), default=0)


def _node(structure: Any, depth: int) -> dict[str, Any]:
    name = _NAMES.get(type(structure))
    if name is None:
        return {"type": None, "context": None, "children_spec": []}
    if not depth:
        raise ValueError(f"containers stand more than {MOST_DEPTH} deep inside each other")
    context = "null"
    if isinstance(structure, dict):
        strange = [key for key in structure if type(key) not in (str, int)]
        if strange:
            raise ValueError(f"a dict has the key {strange[0]!r}, which is neither a string nor a whole number")
        context = json.dumps(list(structure))
    children = structure.values() if isinstance(structure, dict) else structure
    return {"type": name, "context": context, "children_spec": [_node(child, depth - 1) for child in children]}
