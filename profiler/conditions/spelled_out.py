"""Calls that read a tensor's value on the way, with that reading spelled out.

torch.arange(n)      becomes    torch.arange(n.item())
x[:, :n]             becomes    x[:, : n.item()]
one_hot(classes)     becomes    one_hot(classes, classes.max().item() + 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

_TAKE_EXTENTS = frozenset(
    {
        torch.arange,
        torch.zeros,
        torch.ones,
        torch.empty,
        torch.full,
        torch.rand,
        torch.randn,
        torch.narrow,
        Tensor.narrow,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.expand,
        Tensor.repeat,
        Tensor.view,
        Tensor.reshape,
        Tensor.unflatten,
    }
)
"""Make numbers of tensors among their arguments, as extents and ends of ranges."""


def spelled_out(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: Callable[[Tensor], Any]
) -> Arguments:
    """The arguments of a call with numbers in the place of tensors of which it would make numbers.

    Args:
        func: a function of torch's.
        args: of the call.
        kwargs: of the call.
        number: reads a tensor of one element.
    """

    def read(leaf: Any) -> Any:
        return number(leaf) if isinstance(leaf, Tensor) and leaf.dim() == 0 and not leaf.is_floating_point() else leaf

    if func is functional.one_hot:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        tensor = args[0] if args else kwargs["tensor"]
        return (tensor, number(tensor.max()) + 1 if isinstance(classes, int) and classes == -1 else classes), {}
    if func in _TAKE_EXTENTS:
        own, rest = (args[:1], args[1:]) if args and isinstance(args[0], Tensor) and args[0].dim() else ((), args)
        return (*own, *pytree.tree_map(read, rest)), pytree.tree_map(read, dict(kwargs))
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, slice) for part in index):
            parts = tuple(_read_slice(part, read) if isinstance(part, slice) else part for part in index)
            return (args[0], parts if isinstance(args[1], tuple) else parts[0]), kwargs
    return args, kwargs


def _read_slice(part: slice, read: Callable[[Any], Any]) -> slice:
    return slice(read(part.start), read(part.stop), read(part.step))
