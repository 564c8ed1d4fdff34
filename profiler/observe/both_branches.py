"""How our modes that watch operations deal with `torch.cond`: they see both branches.

Which branch a micro-batch takes depends on its data. So FLOPs and bytes are those of both, never too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_Mode = TypeVar("_Mode", bound=type[TorchDispatchMode])


def sees_both_branches(mode: _Mode) -> _Mode:
    """Let a mode watch the operations of both branches of a `torch.cond`; a decorator of its class."""
    torch.ops.higher_order.cond.py_impl(mode)(_run_both)
    return mode


class _Decomposing(TorchDispatchMode):
    """Below autograd, where branches run, composite operations have not been taken apart yet: the watch knows parts."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # a question about a tensor, which has no kernel to look for
            return func(*args, **(kwargs or {}))
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if parts is NotImplemented else parts


def _run_both(
    mode: TorchDispatchMode,
    condition: Any,
    when_true: Callable[..., Any],
    when_false: Callable[..., Any],
    operands: Sequence[Any],
) -> Any:
    with mode, _Decomposing():  # type: ignore[no-untyped-call]
        results = when_true(*operands), when_false(*operands)
    unknown = isinstance(condition, FakeTensor) or (isinstance(condition, torch.Tensor) and condition.is_meta)
    return results[0] if unknown or bool(condition) else results[1]
