"""Looks at the gradient that a parameter has so far: of a pipeline's stage it is another one, or not there yet.

What reads it (`weight.grad is None`) or takes it away (`zero_grad()`) in the forward pass depends on how many
micro-batches have come back, which no graph holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

_GRADIENT: Any = Tensor.grad
_LOOKS = (_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__)
READS_GRADIENT = "reads or sets the gradient that a parameter has so far, which other micro-batches have made"


class GradientsLeftAlone(TorchFunctionMode):
    """Within, code other than torch's own leaves the `.grad` of some tensors alone.

    Args:
        is_own: whether a tensor is one of them.
        refuse: is called where that is not so.
    """

    def __init__(self, is_own: Callable[[Tensor], bool], refuse: Callable[[], NoReturn]) -> None:
        super().__init__()
        self._is_own = is_own
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS and self._is_own(args[0]) and not _asked_by_torch():
            self._refuse()
        return func(*args, **(kwargs or {}))


def _asked_by_torch() -> bool:
    """Whether torch's own code does what a mode is told of; that of its modules is the model's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.startswith("torch.") and not name.startswith("torch.nn.")
