"""How much time a search has left."""

from __future__ import annotations

import time

import numpy as np

LABELS_PER_S = 5_000_000
"""Labels that `planner.kernel.search` tries in a second, at least [fitted: 10 to 50 million]."""
UNLIMITED = 2**62


class Deadline:
    """When a search must end; it runs from when it is made.

    Args:
        limit_s: seconds until it is over; None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._stop_at = None if limit_s is None else time.monotonic() + limit_s

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return np.inf if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())

    @property
    def labels(self) -> int:
        """Labels that a search may try in what is left."""
        if self._stop_at is None:
            return UNLIMITED
        return int(LABELS_PER_S * self.left_s)


NO_DEADLINE = Deadline(None)
