"""A check in the graph: what the forward pass reads of a tensor must be what it was for the sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from profiler.errors import ExecutionError
from profiler.sample_spec import Decision

_MADE_UP: ContextVar[bool] = ContextVar("the values that layers are given are made up", default=False)


@contextlib.contextmanager
def values_made_up() -> Iterator[None]:
    """Within, in this thread, checks look at values and let each pass: they are measured on made-up ones."""
    token = _MADE_UP.set(True)
    try:
        yield
    finally:
        _MADE_UP.reset(token)


def are_made_up() -> bool:
    """Whether the values that layers are given in this thread are made up."""
    return _MADE_UP.get()


class Check:
    """One decision of the trace, looked at in every micro-batch, also when it is recomputed.

    It takes a tensor of one element, or what `numbers` takes. It waits for that value where a device runs ahead.

    Args:
        decision: which way the sample went.
        numbers: computes from tensors and extents the answer, and then the numbers that it depends on; None where the
            answer is the value itself.
    """

    def __init__(self, decision: Decision, numbers: Callable[..., tuple[Any, ...]] | None = None) -> None:
        self.decision = decision
        self.__name__ = f"check[{decision.code} is {decision.answer}]"
        self.__qualname__ = self.__name__
        self._numbers = numbers

    def __repr__(self) -> str:
        """The same in every process."""
        return self.__name__

    def __call__(self, *values: Any) -> None:
        """Compare.

        Raises:
            ExecutionError: this micro-batch goes another way.
        """
        if any(isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta) for value in values):
            return
        found, *numbers = (values[0].item(),) if self._numbers is None else self._numbers(*values)
        found = bool(found) if isinstance(self.decision.answer, bool) else found
        if found != self.decision.answer and not are_made_up():
            raise ExecutionError(self._text(found, numbers))

    def _text(self, found: Any, numbers: list[Any]) -> str:
        decision = self.decision
        of = f" (of {', '.join(map(str, numbers))})" if numbers else ""
        what = "condition" if isinstance(decision.answer, bool) else "number"
        advice = f"keep_together=[{decision.module!r}] has that module called as it is, whichever way it goes"
        return (
            f"in {decision}: the {what} is {found}{of} in this micro-batch and was {decision.answer} for the sample "
            f"that the plan was made with, and the traced graph holds no other way; "
            f"{advice if decision.module else 'move that part into a submodule and name it in keep_together'}, or plan "
            "with a sample that goes this way"
        )
