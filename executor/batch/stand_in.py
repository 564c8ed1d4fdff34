"""What stands for a tensor on the ranks that do not have it: shape and dtype, no data.

    for x, y in pipe.batches(loader):
        x, y = x.to(device), y.to(device)        # as every training loop has it
        loss = pipe.step(x, target=y)

A plain tensor on the meta device would end such a loop, since it can be moved nowhere. A `StandIn` stays where it is,
and what is computed from it together with tensors that have data is a stand-in again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.machine.backend import BACKENDS

_MOVES = {Tensor.pin_memory, *(getattr(Tensor, kind) for kind in BACKENDS if hasattr(Tensor, kind))}
_META = torch.device("meta")


class StandIn(Tensor):
    """A tensor on the meta device that every move to a device leaves there."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch's on the meta device.

        Raises:
            ArgumentError: it fails, most likely since it needs the values.
        """
        if func in _MOVES:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = _META
        if func is Tensor.to:
            args = tuple(_META if isinstance(each, str | int | torch.device) else each for each in args)
        if not _writes(func, named):
            args, named = pytree.tree_map_only(Tensor, _without_data, (args, named))
        try:
            return super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as problem:
            raise ArgumentError(
                f"{getattr(func, '__name__', func)} failed on a stand-in for rank 0's batch ({problem}); batches gives "
                "other ranks shapes and dtypes alone: compute what needs the values in the loader, or on rank 0"
            ) from problem


def _writes(func: Callable[..., Any], named: Mapping[str, Any]) -> bool:
    """Whether a function may write into what it is given; that has to fail where it has data, and not be lost."""
    name = getattr(func, "__name__", "")
    return "out" in named or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _without_data(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, StandIn) or tensor.is_meta else tensor.detach().to(_META)
