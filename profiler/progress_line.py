"""One line on a terminal that says what is done now, how far it is, and how long it will take: by the clock.

    with ProgressLine("profile", total=40, wanted=True) as line:
        line.now("link")
        ...
        line.update()

The line is drawn once a second, whatever the work does: what takes long is not taken for dead.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from tqdm import tqdm

DELAY_S = 1.0
"""Seconds until anything is shown: most work is done by then [chosen]."""
REFRESH_S = 0.2
"""Seconds between two times that the line is drawn, at least [chosen]."""
TICK_S = 1.0
"""Seconds after which the line is drawn again, whatever happened [chosen]."""
KNOWN_AFTER = 0.03
"""Share of the work after which its speed says how long the rest takes [chosen]."""
WIDTH, ROWS = 80, 24
"""Of a terminal that does not say how many it has."""


class TerminalLine:
    """A line on standard error, if that is a terminal.

    Args:
        state: gives what is shown, as `tqdm` has its `bar_format`, steps that are done, and how many there are.
        wanted: whether it is to be shown.
        stays: whether its last state is left on the terminal.
    """

    def __init__(self, state: Callable[[], tuple[str, float, float | None]], *, wanted: bool, stays: bool) -> None:
        self.shows = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._state, self._stays = state, stays
        self._bar: tqdm[Any] | None = None
        self._drawn_s = -float("inf")
        self._lock, self._over = threading.Lock(), threading.Event()
        self._ticks: threading.Thread | None = None
        self._begun_s = time.monotonic()
        if self.shows:
            self._ticks = threading.Thread(target=self._tick, name="autoplan-progress", daemon=True)
            self._ticks.start()

    def changed(self) -> None:
        """Draw the line anew, if it is time for that."""
        now_s = time.monotonic()
        if self.shows and now_s - self._begun_s >= DELAY_S and now_s - self._drawn_s >= REFRESH_S:
            self.draw()

    def draw(self) -> None:
        """Draw it now."""
        with self._lock:
            form, done, total = self._state()
            if self._bar is None:
                self._bar = tqdm(
                    bar_format=form, total=total, file=sys.stderr, leave=self._stays, ncols=columns() - 1, nrows=ROWS
                )
            self._bar.bar_format, self._bar.n, self._bar.ncols = form, done, columns() - 1
            self._bar.refresh()
            self._drawn_s = time.monotonic()

    def close(self) -> None:
        """Nothing is shown any more; what follows begins on a line of its own."""
        self._over.set()
        if self._ticks is not None:
            self._ticks.join()
        if self._bar is not None:
            if self._stays:
                self.draw()
            else:
                self._bar.clear()
            self._bar.close()

    def _tick(self) -> None:
        if self._over.wait(DELAY_S):
            return
        self.draw()
        while not self._over.wait(TICK_S):
            self.draw()


class TimeLeft:
    """How long the rest of some work takes: as long as the same share took, of the last half that was done.

    While nothing is done the time runs down, and grows again when that lasts longer than it ever should have: it never
    stands still, and is never negative.

    >>> left = TimeLeft(began_s=100.0)
    >>> left.reached(0.5, now_s=110.0)
    >>> left.seconds(now_s=110.0), left.seconds(now_s=114.0), left.seconds(now_s=130.0)
    (10.0, 6.0, 10.0)

    Args:
        began_s: of the clock that `now_s` is of.
    """

    def __init__(self, began_s: float) -> None:
        self._reached = [(0.0, began_s)]

    def reached(self, share: float, now_s: float) -> None:
        """So much of the work is done now; less than before where it begins anew."""
        if share < self._reached[-1][0]:
            self._reached = [(share, now_s)]
        elif share > self._reached[-1][0]:
            self._reached.append((share, now_s))

    def seconds(self, now_s: float) -> float | None:
        """What is left; None while nobody can know."""
        share, at_s = self._reached[-1]
        if share < KNOWN_AFTER or len(self._reached) == 1:
            return None
        before, before_s = next(one for one in reversed(self._reached) if one[0] <= share / 2)
        each_s = (at_s - before_s) / (share - before)
        waited_s = now_s - at_s
        return max((1 - share) * each_s - waited_s, (1 - share) * waited_s)


class ProgressLine:
    """A bar of work whose steps are counted.

    Args:
        name: of the work.
        total: its steps, about.
        wanted: whether it is shown, on a terminal.
    """

    def __init__(self, name: str, *, total: float, wanted: bool) -> None:
        self.total, self.done = total, 0.0
        self._name, self._words = name, ""
        self._began_s = time.monotonic()
        self._left, self._ends_s = TimeLeft(self._began_s), float("inf")
        self._line = TerminalLine(self._state, wanted=wanted, stays=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self, words: str, name: str | None = None) -> None:
        """This is done from now on."""
        self._words = words
        self._name = name or self._name
        self._line.changed()

    def ends_within(self, seconds: float) -> None:
        """Steps are left out where all of them would take longer than this."""
        self._ends_s = time.monotonic() + seconds

    def update(self, steps: float = 1.0) -> None:
        """So many more steps are done."""
        self.reached(self.done + steps)

    def reached(self, steps: float) -> None:
        """So many steps are done in all."""
        self.done = min(steps, self.total)
        self._left.reached(self.done / self.total, time.monotonic())
        self._line.changed()

    def close(self) -> None:
        """Nothing is shown any more."""
        self._line.close()

    def _state(self) -> tuple[str, float, float]:
        now_s = time.monotonic()
        left_s = self._left.seconds(now_s)
        if self.done >= self.total:
            left_s = None
        elif left_s is not None and now_s < self._ends_s:
            left_s = min(left_s, self._ends_s - now_s)
        left = "" if left_s is None else f", {tqdm.format_interval(round(left_s))} left"
        words = f": {self._words}".replace("{", "{{").replace("}", "}}") if self._words else ""
        gone = tqdm.format_interval(round(now_s - self._began_s))
        return f"{self._name}{words} {{percentage:3.0f}}%|{{bar}}| {gone}{left}", self.done, self.total


def columns() -> int:
    """Of the terminal that standard error is; 80 where that says nothing, or 0, or nonsense."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return WIDTH
