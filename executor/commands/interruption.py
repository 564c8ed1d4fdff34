"""Ctrl-C while torch is imported: torch goes on without numpy where that fails, and a half of numpy stays behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruption_later() -> Iterator[None]:
    """Within, Ctrl-C waits for the end.

    Raises:
        KeyboardInterrupt: at the end, if someone has asked for it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
