"""How much time a search has left."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from planner.kernel.compiled import seconds_compiling
from planner.search_watch import current_watch
from planner.solve.problem import Problem

LABELS_PER_S = 5_000_000
"""Labels that `planner.kernel.search` tries in a second, at least [fitted: 10 to 50 million]."""
LATE_S = 5.0
"""Of a clock: past its limit a search without any plan goes on for as long again, at least so long [chosen]."""
LEAST_S = 1e-3
"""Seconds of a search where none is left."""
UNLIMITED = 2**62


class Deadline:
    """When a search must end; it runs from when it is made, and stands still while the search is compiled.

    The first search after an installation is compiled on the way, for some 20 s: with a limit of 5 s it would have
    ended with another plan than the second one.

    Args:
        limit_s: seconds until it is over; None for no limit.
        heeds_interrupt: whether it is over when somebody who watches the search interrupts it.
    """

    def __init__(self, limit_s: float | None, *, heeds_interrupt: bool = True) -> None:
        self._stop_at = None if limit_s is None else _now_s() + limit_s
        self._watch = current_watch() if heeds_interrupt else None

    @property
    def interrupted(self) -> bool:
        """Whether the best plan so far is asked for."""
        return self._watch is not None and self._watch.interrupted

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.interrupted or (self._stop_at is not None and _now_s() >= self._stop_at)

    def tell(self, step_s: float, bound_s: float, patience_s: float = np.inf) -> None:
        """Let who watches know the best step so far, what none is below, and how long a better one is looked for."""
        if self._watch is not None:
            self._watch.tell(step_s, bound_s, patience_s if self._stop_at is None else np.inf)

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        if self.interrupted:
            return 0.0
        return np.inf if self._stop_at is None else max(0.0, self._stop_at - _now_s())

    @property
    def labels(self) -> int:
        """Labels that a search may try in what is left."""
        if self._stop_at is None and not self.interrupted:
            return UNLIMITED
        return int(LABELS_PER_S * self.left_s)


def with_share(problem: Problem, deadline: Deadline, parts: float = 1) -> Problem:
    """The problem with its share of the time that is left, if there is a limit.

    What a search does not use goes to those that come after it.

    Args:
        problem: that is searched next.
        deadline: when all searches must have ended.
        parts: how many equal parts what is left falls into.
    """
    if problem.settings.time_limit_s is None:
        return problem
    share_s = max(deadline.left_s / parts, LEAST_S)
    return replace(problem, settings=replace(problem.settings, time_limit_s=share_s))


def _now_s() -> float:
    return time.monotonic() - seconds_compiling()


NO_DEADLINE = Deadline(None, heeds_interrupt=False)
"""It never ends."""
