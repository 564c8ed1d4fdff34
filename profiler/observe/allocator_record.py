"""What kernels allocate inside themselves, from the allocator's record of each operation.

    watch = KernelMemory(device)
    watch.lap(forward)
    watch.lap(backward)
    watch.take()                         # [most bytes that an operation took beyond its results, of each call]

It has the face of a stopwatch, so a sweep over layers can be watched as well as timed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.machine.backend import backend_of
from profiler.observe.both_branches import sees_both_branches
from profiler.observe.storage_watch import is_strided, storage_bytes
from profiler.torch_private import storage_of

T = TypeVar("T")


class KernelMemory:
    """Watches the operations of calls.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most: list[float] = []

    def lap(self, call: Callable[[], T], key: Hashable = None) -> T:
        """Call it and note the most that an operation took beyond its results."""
        operations = _Operations(self._device)
        with operations:
            result = call()
        self._most.append(float(operations.most_bytes))
        return result

    def take(self) -> list[float]:
        """Bytes of the calls since the last `take`, in order."""
        most, self._most = self._most, []
        return most


@sees_both_branches
class _Operations(TorchDispatchMode):
    """Notes the most bytes that an operation took beyond its results."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._device = device
        self._backend = backend_of(device)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {storage_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if is_strided(leaf)}
        out, peak = self._backend.peak_of(self._device, lambda: func(*args, **(kwargs or {})))
        results = {storage_of(leaf): leaf for leaf in pytree.tree_leaves(out) if is_strided(leaf)}
        made = sum(storage_bytes(leaf) for storage, leaf in results.items() if storage not in known)
        self.most_bytes = max(self.most_bytes, peak - made)
        return out
