"""Busy neighbours: processes that keep the other cores occupied while CPU layers are timed.

Training runs one worker per CPU device at the same time, and workers share caches, memory bandwidth and clock: each ran
8 to 11 % slower than one alone on a machine of two cores. Timed together with neighbours, layers take what they take in
training.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator

from profiler.errors import ProfileError
from profiler.machine.busy_work import READY
from profiler.machine.start import python_command
from profiler.machine.workers import KEEP_FREED_MEMORY


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
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(_start(threads))
        yield lambda: _wait_until_busy(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _start(threads: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("profiler.machine.busy_work", str(threads)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": str(threads)},
    )


def _wait_until_busy(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != READY:
            raise ProfileError(
                f"a process that should keep the other cores busy while layers are timed ended with code "
                f"{process.wait()} before it had begun; its error is above"
            )
