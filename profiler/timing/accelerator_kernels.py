"""Operations as accelerators run them, where fake tensors on the host would run others.

Attention that drops shares has no fused kernel on a CPU: torch multiplies in float32 there, and keeps all shares. On an
accelerator one kernel does all of it, and what it lays out otherwise stays so. Dropout is three kernels on a CPU and
one on an accelerator, which keeps a byte for each element in place of a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiler.tracing.leaving_values import in_traced_order

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_DROPOUT_PLACE = 4
"""Position of the share that is dropped among the arguments of `_ATTENTION`."""


class AcceleratorKernels(TorchFunctionMode):
    """While it is active, layers of fake tensors call what an accelerator has a kernel for.

    Shapes and types of what they compute stay the same.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation, or its stand-in."""
        if func is in_traced_order:
            value: Tensor = args[0]
            return value
        named = dict(kwargs or {})
        if func is aten.dropout.default and not named and _drops(*args):
            dropped, _ = aten.native_dropout.default(*args)
            return dropped
        if func is _ATTENTION:  # what it drops changes neither its products nor the bytes that it keeps
            if "dropout_p" in named:
                named["dropout_p"] = 0.0
            args = tuple(0.0 if place == _DROPOUT_PLACE else value for place, value in enumerate(args))
        return func(*args, **named)


def _drops(_: Tensor, share: float, training: bool) -> bool:
    """Whether this dropout drops anything but not all; else an accelerator has no kernel for it either."""
    return training and 0 < share < 1
