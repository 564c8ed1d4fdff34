"""Busy neighbours: processes that keep the other cores occupied while CPU layers are timed.

Training runs one worker per CPU device at the same time, and workers share caches, memory bandwidth and clock: each ran
8 to 11 % slower than one alone on a machine of two cores. Timed together with neighbours, layers take what they take in
training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from profiler.errors import ProfileError
from profiler.machine.busy_work import READY
from profiler.machine.start import Process, start_process
from profiler.machine.workers import KEEP_FREED_MEMORY


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """A busy process, and the connection that it ends with."""

    process: Process
    connection: socket.socket


@contextlib.contextmanager
def neighbours(count: int, *, threads: int = 1) -> Iterator[Callable[[], None]]:
    """Run `count` busy processes until the block ends, however it ends.

        with neighbours(3) as wait_until_busy:
            ...                                  # they start meanwhile, which takes a second or two
            wait_until_busy()

    Args:
        count: number of processes; 0 starts none.
        threads: threads that each computes with.

    Yields:
        A function that returns when all of them are at work; it raises `ProfileError` if one ended instead.
    """
    running: list[_Neighbour] = []
    try:
        for _ in range(count):
            running.append(_start(threads))
        yield lambda: _wait_until_busy(running)
    finally:
        for neighbour in running:
            neighbour.process.send_signal(signal.SIGKILL)
        for neighbour in running:
            neighbour.process.wait()
            neighbour.connection.close()


def _start(threads: int) -> _Neighbour:
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process(
            "profiler.machine.busy_work",
            str(threads),
            str(theirs.fileno()),
            environment={**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": str(threads)},
            descriptors=[theirs.fileno()],
        )
    return _Neighbour(process, ours)


def _wait_until_busy(running: list[_Neighbour]) -> None:
    for neighbour in running:
        if neighbour.connection.recv(len(READY)) != READY:
            raise ProfileError(
                f"a process that should keep the other cores busy while layers are timed ended with code "
                f"{neighbour.process.wait()} before it had begun; its error is above"
            )
