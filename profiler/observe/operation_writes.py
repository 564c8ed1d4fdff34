"""What an operation writes, by its schema: known before it runs, and inside code where no version counter moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.observe.storage_watch import is_strided
from profiler.torch_private import schema_of, storage_of


def written_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors with a storage among the arguments that an operation writes."""
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if is_strided(leaf))


class WritesRefused(TorchDispatchMode):
    """Within, an operation that would write one of these tensors, or a view of one, does not run.

    Args:
        tensors: by name.
        refuse: is called with the name in its place, and raises.
    """

    def __init__(self, tensors: Mapping[str, Tensor], refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {storage_of(tensor): name for name, tensor in tensors.items() if is_strided(tensor)}
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if storage_of(tensor) in self._names:
                self._refuse(self._names[storage_of(tensor)])
        return func(*args, **(kwargs or {}))
