"""How worker processes end: by themselves, as Python ends, and only where they do not, by force.

    R | threads, exit functions, output |             R: it has reported. It has `SECONDS_TO_END`
    R | an exit function without end ~~~~~~~ T ~~ K   it is asked (SIGTERM), then killed (SIGKILL), with a warning
    T | R | exit functions, output |                  it works: another has failed, or the caller was interrupted
    T ~~ K                                            it does not hear: stopped, or inside of a call that does not end

A worker that is asked raises `SystemExit` (`profiler.machine.worker_main`), so that its exit functions run too. What
workers have started themselves ends with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from profiler.machine.journal import Journal
from profiler.machine.start import Process

SECONDS_TO_END = 10.0  # experiment trackers hand over at exit what they still hold; without a network they take longer
SECONDS_TO_ANSWER = 0.5  # a signal reaches Python code within milliseconds, on a busy machine too
_CHUNK_BYTES = 2**20


@dataclass(slots=True)
class Worker:
    """A worker process, seen by its parent.

    Attributes:
        rank: of the worker.
        process: that it runs in, the leader of a group of its own.
        connection: over which it reports; its end closes with the process.
        journal: what it is at.
        reported: whether it has begun to report.
        ended: whether its end of the connection is closed.
    """

    rank: int
    process: Process
    connection: Connection
    journal: Journal
    reported: bool = False
    ended: bool = False

    def ask_to_end(self) -> None:
        """Interrupt what it does, so that its exit functions run."""
        self.process.send_signal(signal.SIGTERM)

    def drain(self) -> None:
        """Take from its connection, without waiting, what nobody reads any more."""
        try:
            data = os.read(self.connection.fileno(), _CHUNK_BYTES)
        except OSError:
            data = b""
        if data:
            self.reported = True
        else:
            self.ended = True

    def kill(self) -> None:
        """End it now, with the processes that it has started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ended_workers() -> Iterator[list[Worker]]:
    """A list of workers of which none is left at the end; those that have reported end by themselves if they do.

    Warns of a worker whose last output may be lost.
    """
    workers: list[Worker] = []
    late: list[Worker] = []
    try:
        yield workers
    finally:
        try:
            late += _end(workers)
        finally:  # also where an impatient user interrupts again
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.process.wait()
    for worker in workers:
        _warn_of(worker, len(workers), late=worker in late)


def how_it_ended(code: int) -> str:
    """A process' return code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _end(workers: Sequence[Worker]) -> list[Worker]:
    """Let the workers end by themselves; those that had the time and did not are returned."""
    working = [worker for worker in workers if not worker.reported]
    for worker in working:
        worker.ask_to_end()
    _wait_until(lambda worker: worker.reported or worker.ended, working, SECONDS_TO_ANSWER)
    late = _wait_until(lambda worker: worker.ended, [each for each in workers if each.reported], SECONDS_TO_END)
    for worker in late:
        worker.ask_to_end()
    _wait_until(lambda worker: worker.ended, late, SECONDS_TO_ANSWER)
    return late


def _wait_until(true_of: Callable[[Worker], bool], workers: Sequence[Worker], limit_s: float) -> list[Worker]:
    """Wait until something is true of all workers, but not longer than the limit; of which it is not."""
    deadline = time.monotonic() + limit_s
    while waiting := [worker for worker in workers if not true_of(worker)]:
        ready = wait([worker.connection for worker in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for worker in waiting:
            if worker.connection in ready:
                worker.drain()
    return waiting


def _warn_of(worker: Worker, world_size: int, *, late: bool) -> None:
    """Say that a worker that had reported did not come to a good end."""
    code = worker.process.wait()
    if not worker.reported or (code == 0 and not late):
        return
    what = (
        f"had not ended {SECONDS_TO_END:.0f} s later, so it was ended; let its threads and exit functions end"
        if late
        else f"then {how_it_ended(code)}, in an exit function or while its output was written"
    )
    warnings.warn(
        f"rank {worker.rank} of {world_size} had reported what its function returned or raised, but {what}. "
        "Its last output may be missing",
        stacklevel=5,  # where the workers were run
    )
