"""What a model returns besides tensors and that no layer can return: it is left out.

Transformers return their cache of keys and values unless they are told not to, and training reads no cache. A value of
a type that `torch.export` does not know becomes `LeftOut` in what the model returns; whoever reads it is told so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError

_RETURNED = Tensor | int | float | str | torch.SymInt | torch.SymFloat | torch.SymBool | torch.ScriptObject | None


class LeftOut:
    """Stands in a model's output for a value that layers cannot return; it can be handed on, and not be read.

    Args:
        kind: its class, as in `transformers.cache_utils.DynamicCache`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<left out: {self.kind}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeftOut) and other.kind == self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by copy and pickle
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> Iterator[NoReturn]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ArgumentError(
            f"this part of the model's output is a {self.kind}, which layers cannot return: they return tensors in "
            "tuples, lists, dicts and the like; let the model return the tensors that are read"
        )


@contextlib.contextmanager
def left_out(model: nn.Module) -> Iterator[dict[int, LeftOut]]:
    """Within, the model returns None for what no layer can return; yields what that was, by its place in the output.

    A model that returns no tensor besides is left as it is, and refused.
    """
    found: dict[int, LeftOut] = {}
    forward, own = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def without(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten(output)
        foreign = [place for place, leaf in enumerate(leaves) if not isinstance(leaf, _RETURNED)]
        if not foreign or not any(isinstance(leaf, Tensor) for leaf in leaves):
            return output
        found.update((place, LeftOut(_kind(leaves[place]))) for place in foreign)
        return pytree.tree_unflatten([None if place in found else leaf for place, leaf in enumerate(leaves)], tree)

    model.forward = without
    try:
        yield found
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
