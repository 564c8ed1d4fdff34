"""Writes to tensors through their `.data`, which no version counter shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiler.torch_private import storage_of

READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
PUT_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class DataWrites(TorchFunctionMode):
    """Within, tensors are remembered as they are when their `.data` is first read or put.

    Args:
        tensors: by name, to look after.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._before: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (READ_DATA, PUT_DATA) and args[0].layout == torch.strided:
            storage = storage_of(args[0])
            for name, tensor in self._tensors.items():
                if name not in self._before and tensor.layout == torch.strided and storage_of(tensor) == storage:
                    self._before[name] = tensor.detach().clone()
        return func(*args, **(kwargs or {}))

    def written(self) -> set[str]:
        """Names of the tensors that hold something else since then."""
        return {name for name, before in self._before.items() if not _equal(self._tensors[name], before)}


def _equal(now: Tensor, before: Tensor) -> bool:
    alike = now.shape == before.shape and now.dtype == before.dtype and now.device == before.device
    return alike and torch.equal(now, before)
