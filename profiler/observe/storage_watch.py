"""A watch on the bytes of the tensors that operations create, on real and on fake tensors alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.machine.backend import backend_of
from profiler.observe.both_branches import sees_both_branches
from profiler.observe.workspace_table import workspace_bytes
from profiler.record import Workspace
from profiler.torch_private import number_of_storage, schema_of, storage_of

Peaks = tuple[int, int]  # bytes without and with what kernels may allocate inside themselves


@sees_both_branches
class StorageWatch(TorchDispatchMode):
    """Counts the bytes of storages that operations create, for as long as they live.

    Attributes:
        live_bytes: of the storages alive now.
        peak_bytes: largest `live_bytes` since it was last set.
        peak_bytes_with_workspace: the same with what the kernel of the moment may allocate inside itself.
        workspaces: (number of its storage, what it is): what LSTM's kernels gave back since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_bytes_with_workspace = 0
        self.workspaces: list[tuple[int | None, Workspace]] = []
        self._known: dict[int, tuple[int, int]] = {}  # storage -> bytes, number
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = [*strided_in(args), *(strided_in(kwargs.values()) if kwargs else ())]
        storages = {storage_of(item) for item in arguments}
        storages.update(number_of_storage(item) for item in args if isinstance(item, torch.UntypedStorage))  # of `set_`
        out = func(*args, **(kwargs or {}))
        results = [*strided_in((out,))]
        for item in results:
            if storage_of(item) not in storages:
                self.follow(item)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and out[3] is not None:
            self.workspaces.append((self.number_of(out[3]), _lstm_workspace(args[0], out[0], out[3])))
        workspace = workspace_bytes(schema_of(func).name, (*arguments, *results))
        self.peak_bytes_with_workspace = max(self.peak_bytes_with_workspace, self.live_bytes + workspace)
        return out

    def restart(self) -> None:
        """Forget the peaks and workspaces so far."""
        self.workspaces = []
        self.peak_bytes = self.peak_bytes_with_workspace = self.live_bytes

    def peaks_above(self, live_bytes: int) -> Peaks:
        """The peaks, less what was alive before."""
        return self.peak_bytes - live_bytes, self.peak_bytes_with_workspace - live_bytes

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor; also one that no operation made, such as `torch.tensor(1)`."""
        storage, identity = tensor.untyped_storage(), storage_of(tensor)
        if identity not in self._known:
            self._number += 1
            size_bytes = storage_bytes(tensor)
            self._known[identity] = size_bytes, self._number
            weakref.finalize(storage, self._forget, identity)
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.peak_bytes_with_workspace = max(self.peak_bytes_with_workspace, self.live_bytes)

    def _forget(self, identity: int) -> None:
        self.live_bytes -= self._known.pop(identity)[0]

    def bytes_of(self, tensor: Tensor) -> int | None:
        """Bytes of the storage of a tensor; None if no operation under this watch created it."""
        found = self._known.get(storage_of(tensor))
        return None if found is None else found[0]

    def number_of(self, tensor: Tensor) -> int | None:
        """A number that no other storage under this watch has or had; None where `bytes_of` is."""
        found = self._known.get(storage_of(tensor))
        return None if found is None else found[1]


def _lstm_workspace(entering: Tensor, leaving: Tensor, workspace: Tensor) -> Workspace:
    """Of an LSTM over tensors of shape (steps, samples, features); not known yet whether it is kept."""
    steps, samples, features = entering.shape
    return Workspace(
        steps=steps,
        samples=samples,
        entering=features,
        width=leaving.shape[-1],
        size_bytes=storage_bytes(workspace),
        is_kept=False,
    )


def is_strided(item: Any) -> bool:
    """Whether it is a tensor with a storage; a sparse one lies on those of its indices and values."""
    return isinstance(item, Tensor) and item.layout == torch.strided


def strided_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors with a storage among an operation's arguments or results, in lists, tuples and dicts too.

    Each operation of each layer is asked several times: torch's general walk would take three times as long.
    """
    for value in values:
        if is_strided(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from strided_in(value)
        elif isinstance(value, dict):
            yield from strided_in(value.values())


def storage_bytes(tensor: Tensor) -> int:
    """Bytes that the allocator gives for the storage of a tensor, real or fake."""
    return allocated_bytes(tensor.untyped_storage().nbytes(), tensor.device)


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """What an allocator gives when asked for that many bytes.

    >>> allocated_bytes(700, torch.device("cuda"))
    1024
    """
    block = backend_of(device).block_bytes
    return -(-size_bytes // block) * block
