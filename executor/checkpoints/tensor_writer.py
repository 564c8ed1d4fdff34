"""How a rank writes its tensors: as torch does, but that it fails with what the file system says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from executor.checkpoints.failures import causes_of, is_of_the_machine


@contextmanager
def disk_named() -> Iterator[None]:
    """Raise what the file system said where torch hides it behind positions in a file ("unexpected pos 704 vs 598").

    Other ranks are told of an exception without what it was raised while handling.
    """
    handled = sys.exception()
    try:
        yield
    except RuntimeError as problem:
        for cause in causes_of(problem, handled):
            if is_of_the_machine(cause):
                raise cause from problem
        raise


class TensorWriter(FileSystemWriter):
    """Torch's, which fails with what the file system says."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's tensors; the results are for the metadata."""
        with disk_named():
            return super().write_data(plan, planner)
