"""What the code of a layer calls to hand on a value that is the same whether or not it is sent to another process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from profiler.machine.backend import HOST
from profiler.torch_private import is_view, storage_of


def in_traced_order(value: Tensor, order: Sequence[int]) -> Tensor:
    """The value with its dimensions in that order in memory, from the outermost to the innermost: itself if they are.

    Operations may give their results another order than their fake kernels, and `profiler.observe.kernel_orders` does
    not find all of these. Later ones give other bits then, so each cut would have its own. On accelerators results
    differ in their last bits anyhow, and it stays as it is: a copy for each attention would take 3 % of a GPT's time.

    >>> import torch
    >>> in_traced_order(torch.zeros(2, 3, 4), (0, 2, 1)).stride()
    (12, 1, 3)
    """
    shape, strides, expected = value.shape, value.stride(), 1
    for dim in reversed(order):
        if shape[dim] != 1:
            if strides[dim] != expected:
                break
            expected *= shape[dim]
    else:
        return value
    if value.device.type != HOST.type:
        return value
    if has_torch_function_unary(value):  # `profiler.timing.accelerator_kernels` stands in for accelerators
        moved: Tensor = handle_torch_function(in_traced_order, (value,), value, order)
        return moved
    return value.permute(*order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def apart_from(value: Tensor, *others: Tensor) -> Tensor:
    """The value in memory that none of the others has: a copy if it shares theirs."""
    own = storage_of(value)
    return value.clone() if any(storage_of(other) == own for other in others) else value


def no_view(value: Tensor) -> Tensor:
    """A value that a later layer writes, as something other than autograd's view of something.

    A write to a view goes into the history of its base, and gradients of readers before and after the write are summed
    there in an order of its own. A stage writes a copy of what it receives, which is no view; so nothing else is one.
    """
    return value.clone() if is_view(value) else value
