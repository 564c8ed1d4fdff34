"""Which of some tensors are read: those of a model that a part of it has no business to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.observe.storage_watch import is_strided
from profiler.torch_private import storage_of

UNNAMED = "a parameter"


class Reads(TorchDispatchMode):
    """Notices operations on tensors, also through views of them, and on parameters that are not among some others.

    Args:
        tensors: by name.
        own: tensors that may be read.

    Attributes:
        names: of those that an operation has taken.
    """

    def __init__(self, tensors: Mapping[str, Tensor], own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._own = {storage_of(tensor) for tensor in own if is_strided(tensor)}
        self._names = {storage_of(tensor): name for name, tensor in tensors.items() if is_strided(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if is_strided(leaf):
                storage = storage_of(leaf)
                if storage in self._names:
                    self.names.add(self._names[storage])
                elif isinstance(leaf, nn.Parameter) and storage not in self._own:
                    self.names.add(UNNAMED)
        return func(*args, **(kwargs or {}))
