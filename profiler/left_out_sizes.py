"""Micro-batch sizes that cannot be measured: the memory does not hold them, or the model cannot run them.

Batch normalization, for one, cannot normalize a single value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from profiler.errors import PlanError, ProfileError
from profiler.text import counted

NOT_FAKEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
CANNOT_RUN = (RuntimeError, ValueError, ArithmeticError, IndexError)  # what operations raise
ALLOCATOR_SAYS = ("not enough memory", "can't allocate memory")  # of torch on the CPU: on Windows, elsewhere


class Refusals:
    """The sizes that are left out because the model cannot run them.

    Attributes:
        reasons: by size, why.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    @contextmanager
    def noting(self, size: int) -> Iterator[None]:
        """Within, a failure that comes from the size, or from too little memory for it, is a warning."""
        try:
            yield
        except PlanError:
            raise
        except (MemoryError, *CANNOT_RUN) as problem:
            if is_out_of_memory(problem):
                self.no_memory(size)
                return
            reason = f"the model cannot run micro-batches of {counted(size, 'sample')}: {in_one_line(problem)}"
            self.reasons[size] = reason
            warnings.warn(f"{reason}; they are left out", stacklevel=4)

    def no_memory(self, size: int) -> None:
        """Warn that a size is left out for want of memory."""
        warnings.warn(f"no memory for micro-batches of {counted(size, 'sample')}; they are left out", stacklevel=5)

    def raise_first(self) -> None:
        """Say why no size is left, if that is not for memory.

        Raises:
            ProfileError: the model cannot run a size.
        """
        if self.reasons:
            raise ProfileError(
                f"no micro-batch size is left to plan with; {self.reasons[min(self.reasons)]}; see whether the model "
                "runs on the sample by itself"
            )


def in_one_line(problem: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    return ": ".join([type(problem).__name__, *str(problem).strip().splitlines()[:1]])


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that a device has no memory left."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(words in str(problem) for words in ALLOCATOR_SAYS)
