"""What kernels allocate inside themselves, from the allocator's record of each operation.

    watch = KernelMemory(device)
    watch.lap(forward)
    watch.lap(backward)
    watch.take()                         # [most bytes that an operation took beyond its results, of each call]

It has the face of a stopwatch, so a sweep over layers can be watched as well as timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch

# torch's light profiler; the other one takes milliseconds for each call and writes lines to the terminal.
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.both_branches import sees_both_branches
from profiler.storage_watch import is_strided, storage_bytes, storage_of

T = TypeVar("T")


class KernelMemory:
    """Watches the operations of calls.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most: list[float] = []

    def lap(self, call: Callable[[], T]) -> T:
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

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {storage_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if is_strided(leaf)}
        out, peak = peak_of(self._device, lambda: func(*args, **(kwargs or {})))
        results = {storage_of(leaf): leaf for leaf in pytree.tree_leaves(out) if is_strided(leaf)}
        made = sum(storage_bytes(leaf) for storage, leaf in results.items() if storage not in known)
        self.most_bytes = max(self.most_bytes, peak - made)
        return out


def can_watch(device: torch.device) -> bool:
    """Whether the allocator's record can be had; on CPUs there is one, and a profiler at work around us has it."""
    return device.type == "cuda" or not _profiler_enabled()


def peak_of(device: torch.device, call: Callable[[], T]) -> tuple[T, int]:
    """The call's result, and the most bytes that the allocator had given out within, above those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    of_memory_alone = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(of_memory_alone)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    taken = [event.cpu_memory_usage() for events in threads for event in events if str(event.kind()) == "memory_alloc"]
    return result, max(accumulate(taken), default=0)
