"""Memory that holes between tensors hold goes back to the system before it runs short.

The C library fits a block into the holes that others left, and what does not fit it puts on top:

    params  ##..##  activations  ####....##..####......##  <- the process holds all of it, dots too

Without a limit that is best: nothing is faulted in twice. Near one it kills: an AmoebaNet-D whose tensors, code and
libraries take 980 MiB held 1,135 MiB [measured]. Holes come up within a step, so giving them back between steps changes
nothing. A thread next to the training looks how much room there is, the more often the less of it, and when it is tight
gives back what is free: some milliseconds each time, 1 % of that model's steps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from profiler.machine.allocator import give_back_freed_memory, has_glibc
from profiler.machine.host_memory import room

TIGHT = 1 / 8
"""Of the memory that processes may have: when less is left, holes are given back [chosen]."""
OF_WHAT_IS_LEFT = 2 / 3
"""They are again when less than that part is left of what the last time left [chosen]."""
FASTEST_BYTES_PER_S = 2**33
"""A core touches 1 to 2 GiB of new pages a second [measured]; several may at once."""
OFTENEST_S, SELDOMEST_S = 0.003, 1.0
PAUSES = 10
"""At most one part in so many of the time goes to giving back, where even that does not help [chosen]."""
LAST = 1 / 32
"""When less than that is left, half of the time may go to it: slow steps are better than none [chosen]."""


class Holes:
    """When to give back what is free.

    Args:
        room: says how many bytes there are, and how many of them are left.
        give_back: does it.
    """

    def __init__(
        self, room: Callable[[], tuple[int, int]] = room, give_back: Callable[[], None] = give_back_freed_memory
    ) -> None:
        self._room = room
        self._give_back = give_back
        self._least: float | None = None  # bytes that may be left before the next time

    def look(self) -> float:
        """Look once, and act if the room is tight; returns the seconds until the next look."""
        whole, left = self._room()
        least = TIGHT * whole if self._least is None else self._least
        took_s = 0.0
        if left < least:
            begun_s = time.perf_counter()
            self._give_back()
            took_s = time.perf_counter() - begun_s
            whole, left = self._room()
            self._least = min(TIGHT * whole, OF_WHAT_IS_LEFT * left)
        pause_s = took_s * (PAUSES if left >= LAST * whole else 1)
        return min(SELDOMEST_S, max(OFTENEST_S, left / FASTEST_BYTES_PER_S, pause_s))


def give_holes_back(owner: object) -> None:
    """From now on, as long as `owner` lives; where there is no glibc there is nothing to do."""
    if not has_glibc():
        return
    ended = threading.Event()
    weakref.finalize(owner, ended.set)
    threading.Thread(target=_watch, args=(Holes(), ended), daemon=True).start()


def _watch(holes: Holes, ended: threading.Event) -> None:
    pause_s = 0.0
    while not ended.wait(pause_s):
        pause_s = holes.look()
