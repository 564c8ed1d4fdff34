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
from tqdm.auto import tqdm

from planner.kernel.compiled import compiling_since_s, seconds_compiling
from planner.plan.units import seconds_text
from profiler.machine.descriptors import hides_progress

DELAY_S = 1.0
"""Seconds until anything is shown: most searches are over by then [chosen]."""
REFRESH_S = 0.2
"""Seconds between two looks at the clock that are shown [chosen]."""
TICK_S = 1.0
"""Seconds after which the time is shown again, whatever the search does [chosen]."""
COMPILED_BY_THEN_S = 0.5
"""Seconds by which a function that is kept has been read; what takes longer is compiled anew [chosen]."""


class SearchWatch:
    """What is known of a search while it runs.

    Attributes:
        interrupted: whether Ctrl-C asked for the best plan so far.
        shows: whether anybody sees it.
    """

    def __init__(self, *, progress: bool, limit_s: float | None = None) -> None:
        self.interrupted = False
        self._besides_s, self._proven_s, self._best_s = np.inf, 0.0, np.inf
        self._shown_s = time.monotonic() + DELAY_S
        self._is_seen = False
        self._found = ""
        most = "" if limit_s is None else f" of {tqdm.format_interval(limit_s)}"
        self._bar = tqdm(
            bar_format=f"{{desc}}: {{elapsed}}{most}{{postfix}}",
            desc="plan",
            delay=DELAY_S,
            disable=hides_progress(progress),
        )
        self.shows = not self._bar.disable
        self._start_s, self._compiled_s = time.time(), seconds_compiling()
        self._over = threading.Event()
        self._ticks: threading.Thread | None = None
        if self.shows:
            self._ticks = threading.Thread(target=self._tick, name="autoplan-progress", daemon=True)
            self._ticks.start()

    def tell(self, step_s: float, bound_s: float, patience_s: float = np.inf) -> None:
        """Of the best plan so far, and of what no plan is below: both in seconds, infinite where there is none.

        What was found and proven once stays so: a later search for plans of another kind begins anew, with a poor plan
        and a poor bound of its own.

        Args:
            step_s: of the best plan.
            bound_s: no plan of this search is below.
            patience_s: seconds, about, until the search ends if it finds nothing better; infinite where a limit says.
        """
        if not self.shows:
            return
        self._best_s = step_s = min(self._best_s, step_s)
        self._proven_s = bound_s = max(self._proven_s, min(bound_s, self._besides_s))
        if time.monotonic() < self._shown_s:
            return
        self._shown_s = time.monotonic() + REFRESH_S
        if step_s < np.inf:
            at_most = f", within {step_s / bound_s - 1:.1%} of the best" if 0 < bound_s <= step_s else ""
            ends = f", {max(1, round(patience_s))} s left" if patience_s < np.inf else ""
            self._found = f"step {seconds_text(step_s)}{at_most}{ends}; Ctrl-C takes it"
        self._draw()

    def _draw(self) -> None:
        """The time, which stands still while the search is compiled as its limit does, and what is found or done."""
        self._bar.start_t = self._start_s + seconds_compiling() - self._compiled_s
        compiles = compiling_since_s() > COMPILED_BY_THEN_S
        words = "the search is compiled, once an installation" if compiles else self._found
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.refresh()
        self._is_seen = True

    def _tick(self) -> None:
        """Show that time goes on: between two findings there may be half a minute, and as much before the first."""
        if self._over.wait(DELAY_S):
            return
        self._draw()
        while not self._over.wait(TICK_S):
            self._draw()

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
        self._over.set()
        if self._ticks is not None:
            self._ticks.join()
        if self._is_seen:
            self._bar.clear()
        self._bar.close()


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
