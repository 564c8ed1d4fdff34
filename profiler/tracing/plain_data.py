"""The `.data` of a tensor as operations: export follows none of what is done with it, and would freeze what it held.

x.data                    becomes    x.detach()
buffer.data.copy_(y)      becomes    buffer.detach().copy_(y), which writes the buffer
x.data = x.data.to(...)   is nothing, where `to` has nothing to change
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from profiler.errors import NotTraceableError
from profiler.observe.data_writes import PUT_DATA, READ_DATA
from profiler.observe.source_place import keep_together_advice, place_now
from profiler.torch_private import storage_of


class DataAsOperations(TorchFunctionMode):
    """Within, what the model does with the `.data` of tensors comes into the graph.

    Other than `.data`, `detach` counts writes: where autograd has saved the tensor before, the backward pass says so,
    where it would have computed with the new values.

    Args:
        model: that is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == READ_DATA and isinstance(args[0], FakeTensor):
            return args[0].detach()
        if func == PUT_DATA and isinstance(args[0], FakeTensor):
            return self._put(*args)
        return func(*args, **(kwargs or {}))

    def _put(self, owner: Tensor, value: Tensor) -> None:
        if _same_place(owner, value):
            return
        place = place_now(self._model)
        raise NotTraceableError(
            f"cannot trace the model: in {place}: the forward pass puts other memory into the .data of a tensor, "
            f"which a graph would lose; move and convert parameters before planning, or "
            f"{keep_together_advice(place.modules)}",
            modules=place.modules,
        )


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same numbers in the same memory."""
    if one.dtype != other.dtype or one.device != other.device or storage_of(one) != storage_of(other):
        return False
    alike = one.shape == other.shape and one.stride() == other.stride()
    return alike and one.storage_offset() == other.storage_offset()
