"""Output that nothing depends on: it may be closed, full or stalled, and whoever speaks goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

SPEAK_S = 0.5  # a terminal or file takes a line within milliseconds; a pipe that nobody reads never does


def without_waiting(write: Callable[[], object]) -> None:
    """Call what writes output, and go on whether it fails or does not return.

    Args:
        write: writes and flushes. It runs in a thread of its own, which may wait for ever: for the reader of a pipe, or
            for the lock of a stream that another thread writes to.
    """

    def attempt() -> None:
        with contextlib.suppress(Exception):  # nobody is left whom it could be told
            write()

    with contextlib.suppress(Exception):  # no thread can be started any more, or for lack of memory
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(SPEAK_S)
