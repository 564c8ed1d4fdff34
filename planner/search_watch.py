"""A search that somebody watches: how far it is, and whether Ctrl-C asked for the best plan so far.

    with watched(progress=True) as watch:
        plan = best_plan(problem)
    watch.interrupted                       # then the plan is the best so far

Every `Deadline` made within is over as soon as the search is interrupted.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType

import numpy as np
from tqdm import tqdm

from planner.kernel.compiled import compiling_since_s, seconds_compiling
from planner.plan.units import seconds_text
from profiler.progress_line import TerminalLine, columns

COMPILED_BY_THEN_S = 0.5
"""Seconds by which a function that is kept has been read; what takes longer is compiled anew [chosen]."""
FIRST_PLAN = "looking for a first plan"
COMPILING = "the search is compiled, once an installation"
LIMIT_IS_OVER = "time is up, making the plan"


class SearchWatch:
    """What is known of a search while it runs.

    Attributes:
        interrupted: whether Ctrl-C asked for the best plan so far.
    """

    def __init__(self, *, progress: bool, limit_s: float | None = None) -> None:
        self.interrupted = False
        self._besides_s, self._proven_s, self._best_s = np.inf, 0.0, np.inf
        self._follows = False  # whether other searches follow this one
        self._limit_s = limit_s
        self._pace = _Pace()
        self._start_s, self._compiled_s = time.monotonic(), seconds_compiling()
        self._line = TerminalLine(self._state, wanted=progress, stays=False)

    def tell(self, step_s: float, bound_s: float, patience_s: float = np.inf) -> None:
        """Of the best plan so far, and of what no plan is below: both in seconds, infinite where there is none.

        What was found and proven once stays so: a later search for plans of another kind begins anew, with a poor plan
        and a poor bound of its own.

        Args:
            step_s: of the best plan.
            bound_s: no plan of this search is below.
            patience_s: seconds, as the search counts them, until it ends if it finds nothing better; infinite where a
                limit says.
        """
        self._best_s = min(self._best_s, step_s)
        self._proven_s = max(self._proven_s, min(bound_s, self._besides_s))
        self._pace.tell(patience_s, time.monotonic())
        self._line.changed()

    def _state(self) -> tuple[str, float, None]:
        """The longest of what could be said that fits the terminal."""
        texts = [self._text(*how) for how in ((True, True), (True, False), (False, False))]
        room = columns() - 1
        chosen = next((text for text in texts if len(text) <= room), texts[-1])
        return chosen.replace("{", "{{").replace("}", "}}"), 0.0, None

    def _text(self, with_key: bool, with_gap: bool) -> str:
        """Time, which stands still while the search is compiled, as its limit does; what is found; what is left."""
        now_s = time.monotonic()
        gone_s = now_s - self._start_s - (seconds_compiling() - self._compiled_s)
        over = self._limit_s is not None and gone_s >= self._limit_s
        words = [f"plan: {tqdm.format_interval(round(gone_s))}"]
        if self._limit_s is not None and not over:
            words[0] += f" of {tqdm.format_interval(self._limit_s)}"
        if self._best_s < np.inf:
            words.append(f"step {seconds_text(self._best_s)}")
            if with_gap and 0 < self._proven_s <= self._best_s:
                words[-1] += f" (within {self._best_s / self._proven_s - 1:.1%} of the best)"
        left_s = self._pace.left_s(now_s)
        if compiling_since_s() > COMPILED_BY_THEN_S:
            words.append(COMPILING)
        elif self.interrupted:
            words.append("ending")
        elif over:
            words.append(LIMIT_IS_OVER)
        elif self._best_s == np.inf:
            words.append(FIRST_PLAN)
        elif self._limit_s is None and left_s is not None:
            words.append(f"{left_s:.0f} s left" + (" of this search" if self._follows else ""))
        takes_it = with_key and self._best_s < np.inf and not (over or self.interrupted)
        return ", ".join(words) + ("; Ctrl-C takes it" if takes_it else "")

    @contextmanager
    def others_follow(self) -> Iterator[None]:
        """See `others_follow`."""
        before, self._follows = self._follows, True
        try:
            yield
        finally:
            self._follows = before

    @contextmanager
    def besides(self, bound_s: float) -> Iterator[None]:
        """See `besides`."""
        before, self._besides_s = self._besides_s, min(self._besides_s, bound_s)
        try:
            yield
        finally:
            self._besides_s = before

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C ends the search at its first plan, or its best; the second ends the program."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        said = "interrupted: the search ends with the best plan so far; Ctrl-C again ends it without"
        tqdm.write(said, file=sys.stderr)

    def close(self) -> None:
        """Nothing is shown any more: the line is free for what follows."""
        self._line.close()


class _Pace:
    """How long a search goes on in vain by the clock: it counts in seconds of its own, which may be slow ones."""

    def __init__(self) -> None:
        self._told_s, self._patience_s = -np.inf, np.inf
        self._counted_s, self._taken_s = 0.0, 0.0

    def tell(self, patience_s: float, now_s: float) -> None:
        """So much patience is left now; more than before where a better plan was found, or another search begins."""
        if 0 < self._patience_s - patience_s < np.inf:
            self._counted_s += self._patience_s - patience_s
            self._taken_s += now_s - self._told_s
        self._told_s, self._patience_s = now_s, patience_s

    def left_s(self, now_s: float) -> float | None:
        """By the clock; None where nobody can know, or it takes longer than was thought."""
        if not 0 < self._patience_s < np.inf:
            return None
        slow = self._taken_s / self._counted_s if self._counted_s > 0 else 1.0
        left_s = self._patience_s * slow - (now_s - self._told_s)
        return left_s if left_s >= 1 else None


_CURRENT: ContextVar[SearchWatch | None] = ContextVar("the search that is watched", default=None)


def current_watch() -> SearchWatch | None:
    """Of the search that runs, if somebody watches it."""
    return _CURRENT.get()


def besides(bound_s: float) -> AbstractContextManager[None]:
    """Within, one of several searches runs, and what it proves holds for its own plans alone.

    Args:
        bound_s: what no other plan is below; 0 while others are to come, and then no gap is shown yet.
    """
    watch = current_watch()
    return nullcontext() if watch is None else watch.besides(bound_s)


def others_follow() -> AbstractContextManager[None]:
    """Within, a search runs that others follow: when it ends says nothing of when all is over."""
    watch = current_watch()
    return nullcontext() if watch is None else watch.others_follow()


@contextmanager
def watched(*, progress: bool, limit_s: float | None = None) -> Iterator[SearchWatch]:
    """Within, searches can be seen and interrupted; by Ctrl-C where Python's own answer to it is in force.

    Args:
        progress: show how far they are, on a terminal.
        limit_s: seconds that they may take, if there is a limit.
    """
    watch = SearchWatch(progress=progress, limit_s=limit_s)
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    token = _CURRENT.set(watch)
    if ours:
        signal.signal(signal.SIGINT, watch.interrupt)
    try:
        yield watch
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
        _CURRENT.reset(token)
        watch.close()
