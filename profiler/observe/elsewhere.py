"""State that a model's code reaches and that is no attribute of its modules.

    self.helper.calls += 1          an attribute of an object that a module holds
    nonlocal calls; calls += 1      a variable of a closure
    next(self.factors)              the position of an iterator
    CALLS[0] += 1                   an item of a list of the file, whose name the code of the forward pass holds

It is found by walking from the modules' attributes and from the code of their forward passes; of classes and files only
what has a name that this code uses. Packages of torch, numpy and Python itself are not looked into, nor is einops: what
it keeps follows from its arguments, and it is used by so many models that a proof for each would cost a second trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.observe.held_values import set_attributes
from profiler.observe.python_state import attributes_of, key_of_value
from profiler.observe.walk import OF_MODULES, Spot, Spots, Walk, walk_from


def spots_of(model: nn.Module) -> Spots:
    """All that the model's code reaches, as it is now."""
    walk = Walk()
    for path, module in model.named_modules():
        walk.enter(path, module)
    return walk.spots


def changed_spots(before: Spots, after: Spots) -> list[Spot]:
    """Those of the first that hold something else later, under the name of what that is."""
    return [_named(spot, after[key]) for key, spot in before.items() if key in after and after[key].key != spot.key]


def lasting_spots(before: Spots, after: Spots) -> list[Spot]:
    """Those whose numbers, texts or lengths differ between the ends of two calls, as they are then."""
    return [
        _named(spot, before[key]) for key, spot in after.items() if key in before and before[key].plain != spot.plain
    ]


def _named(spot: Spot, other: Spot) -> Spot:
    """The spot under the name of the first item that differs."""
    names = (*spot.items, *other.items)
    name = next(
        (name for name in names if key_of_value(spot.items.get(name)) != key_of_value(other.items.get(name))), ""
    )
    if not isinstance(name, str):
        return replace(spot, name=f"{spot.name}[{name!r}]")
    return replace(spot, name=f"{spot.name}.{name}") if name and not spot.name.endswith(name) else spot


def put_spots_back(before: Spots, now: Spots) -> None:
    """Let all hold what they held before."""
    for spot in changed_spots(before, now):
        if spot.write is not None:
            with contextlib.suppress(AttributeError, TypeError):  # of an object that cannot be written, nor was
                spot.write(spot.items)


def generators_reached(module: nn.Module) -> tuple[Any, ...]:
    """The random generators among what a module's code reaches, those of torch, Python and numpy themselves apart."""
    return tuple(spot.holder for spot in spots_of(module).values() if spot.is_random)


def spots_of_function(code: Any) -> Spots:
    """What a function or module reaches, as it is now; of a module also what its attributes hold."""
    found = dict(walk_from(code).spots)
    if isinstance(code, nn.Module):
        found.update((f"attributes of {path}", _attributes_spot(path, part)) for path, part in code.named_modules())
    return found


def _attributes_spot(path: str, module: nn.Module) -> Spot:
    values = {name: value for name, value in module.__dict__.items() if name not in OF_MODULES}
    return Spot(path, path, module, values, functools.partial(set_attributes, module))


def arrays_reached(model: nn.Module) -> list[tuple[str, np.ndarray]]:
    """Arrays of numpy among what the model's code reaches, each with its name."""
    walk = Walk()
    for path, module in model.named_modules():
        walk.enter(path, module)
    return walk.arrays


def constants_reached(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are neither parameters nor buffers, among the attributes and among what else the code reaches."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    spots = [(spot.name, spot.items.values()) for spot in spots_of(module).values()]
    items = ((a.items or {"": a.value}) for a in attributes_of(module).values())
    spots += [
        (name, each.values() if isinstance(each, dict) else each)
        for name, each in zip(attributes_of(module), items, strict=True)
    ]
    return {
        f"{name}[{position}]": value
        for name, values in spots
        for position, value in enumerate(values)
        if isinstance(value, Tensor) and id(value) not in held and not value.is_inference()
    }


class Unwritten:
    """Tensors that nobody is to write: those that are written are put back.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = [(name, tensor, tensor._version, tensor.clone()) for name, tensor in tensors.items()]

    def put_back(self) -> list[str]:
        """Names of those that were written, also where torch does not note it (`tensor.data`)."""
        written = [
            (name, tensor, kept)
            for name, tensor, version, kept in self._kept
            if tensor._version != version or _unlike(tensor, kept)
        ]
        with torch.no_grad():
            for _, tensor, kept in written:
                tensor.copy_(kept)
        return [name for name, *_ in written]


def _unlike(tensor: Tensor, kept: Tensor) -> bool:
    """Whether values have changed of a tensor that has some in one piece; two that are no numbers are alike."""
    plain = type(tensor) in (Tensor, nn.Parameter)  # and no value of a trace, which a module may have kept
    if not plain or tensor.is_meta or tensor.layout != torch.strided or tensor.shape != kept.shape:
        return False
    return bool((tensor.ne(kept) & (tensor.eq(tensor) | kept.eq(kept))).any())
