"""Python attributes of modules: what a forward pass must not change, for a graph holds them as constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from profiler.observe.random_states import Generator, is_generator, key_of

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward"}
_OF_EVERY_RNN = frozenset({"_flat_weights", "_flat_weight_refs"})  # its parameters again: the list follows them
CONTAINERS = (list, tuple, set, dict)
_COMPARED = bool | int | float | str | bytes | Generator


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute at one moment.

    Attributes:
        owner: the module.
        value: the object itself.
        items: a shallow copy, if it is a plain container.
        key: equal if neither the object nor its items have changed.
        plain: equal if no number, string or random generator has changed, and no container's length.
    """

    owner: nn.Module
    value: Any
    items: Any
    key: Any
    plain: Any


def attributes_of(module: nn.Module) -> dict[str, Attribute]:
    """Dotted name -> attribute, of all that are no parameter, buffer or submodule."""
    return {
        f"{path}.{name}" if path else name: _described(part, value)
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
        if name not in _OF_EVERY_MODULE and not (name in _OF_EVERY_RNN and isinstance(part, nn.RNNBase))
    }


def _described(owner: nn.Module, value: Any) -> Attribute:
    if type(value) not in CONTAINERS:
        return Attribute(owner, value, None, key_of_value(value), plain_of_value(value))
    items = value if isinstance(value, tuple) else value.copy()
    keys = frozenset(map(key_of_value, value)) if isinstance(value, set) else tuple(map(key_of_value, value))
    held = list(value.values() if isinstance(value, dict) else value)
    plain = (len(value), *map(plain_of_value, held))
    return Attribute(owner, value, items, (type(value), keys, tuple(map(key_of_value, held))), plain)


def plain_of_value(value: Any) -> Any:
    """Equal of two values if no number, string or random generator has changed; of others their class."""
    return key_of_value(value) if value is None or isinstance(value, _COMPARED) else type(value)


def key_of_value(value: Any) -> Any:
    """Equal of one object, and of plain values and random generators that are equal."""
    if is_generator(value):
        return key_of(value)
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    return (type(value), repr(value)) if plain else id(value)  # of NaN, which differs from itself, the text


def changed_names(before: dict[str, Attribute], after: dict[str, Attribute]) -> list[str]:
    """Names of the attributes that were added, removed or changed."""
    names = dict.fromkeys((*before, *after))
    return [n for n in names if n not in before or n not in after or before[n].key != after[n].key]


def lasting_changes(earlier: Mapping[str, Attribute], later: Mapping[str, Attribute]) -> list[str]:
    """Names of the numbers, strings and containers' lengths that differ between the ends of two calls."""
    return [name for name in later if name in earlier and later[name].plain != earlier[name].plain]


def put_back(before: Mapping[str, Attribute], names: Iterable[str]) -> None:
    """Make these attributes what they were, the items of plain containers included; new ones stay."""
    for name in names:
        if name not in before:
            continue
        attribute = before[name]
        value = attribute.value
        if isinstance(value, list) and attribute.items is not None:
            value[:] = attribute.items
        elif isinstance(value, dict | set) and attribute.items is not None:
            value.clear()
            value.update(attribute.items)
        attribute.owner.__dict__[name.rpartition(".")[2]] = value


def put_all_back(before: Mapping[str, Attribute], now: Mapping[str, Attribute]) -> None:
    """Make all attributes what they were before; what has been added since is taken away."""
    changed = [name for name in now if name not in before or before[name].key != now[name].key]
    put_back(before, [*changed, *(name for name in before if name not in now)])
    for name in changed:
        if name not in before:
            now[name].owner.__dict__.pop(name.rpartition(".")[2], None)


def tensors_held(module: nn.Module) -> dict[str, int]:
    """Dotted name -> identity of each parameter, and 0 of each buffer: another tensor in its place is written to it."""
    return {
        f"{path}.{name}" if path else name: 0 if held is part._buffers else id(tensor)
        for path, part in module.named_modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    }


def attributes_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Name -> numbers and texts that code has put on a tensor itself (`weight.calls = 0`)."""
    return {
        name: {own: key_of_value(value) for own, value in held.items() if _is_put_there(own, value)}
        for name, tensor in tensors.items()
        if (held := getattr(tensor, "__dict__", None))
    }


def _is_put_there(name: str, value: Any) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    return plain and not hasattr(FakeTensor, name) and "_memo" not in name and not name.startswith("_dynamo")


def put_on_tensors(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Dotted names of what has been put on tensors since, or taken away."""
    return [
        f"{name}.{own}"
        for name in dict.fromkeys((*before, *after))
        for own in dict.fromkeys((*before.get(name, {}), *after.get(name, {})))
        if before.get(name, {}).get(own) != after.get(name, {}).get(own)
    ]


def replaced(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names of parameters that are new, or gone or replaced, and of buffers that are gone."""
    gone = [name for name, tensor in before.items() if after.get(name) != tensor]
    return gone + [name for name, tensor in after.items() if name not in before and tensor]
