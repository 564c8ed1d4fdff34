"""The main program of a worker process, see `profiler.workers`."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import cloudpickle
import numpy
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from profiler.channel import default_backend
from profiler.errors import ExecutionError, PlanError
from profiler.journal import announce
from profiler.workers import Failure, Task

# What a rank sees when another rank is gone: gloo's words for a closed socket or a message that never came.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")


def main() -> None:
    """Receive a task over the inherited socket, run it, report the result."""
    connection = Connection(int(sys.argv[1]))
    announce(int(sys.argv[2]))
    os.register_at_fork(after_in_child=connection.close)  # or the parent would not see that this process has died
    _, pickled = connection.recv()
    task: Task = cloudpickle.loads(pickled)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    outcome = _run(task)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has had its error and ends all
        connection.send(outcome)
    if not isinstance(outcome, Failure):
        atexit._run_exitfuncs()  # what the function has registered; there is no public call
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group that lost a peer can hang in its destructor


def _seed(seed: int | None) -> None:
    """Let all random numbers that a training loop may draw begin at a seed."""
    if seed is None:
        return
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _end_with_parent(connection: Connection) -> None:
    """End this process when the socket closes: a parent that died must not leave workers behind."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # with what this worker has started


def _run(task: Task) -> bytes | Failure:
    if task.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)  # before the threads that compute and wait for messages begin
    torch.set_num_threads(task.threads)
    timeout = timedelta(seconds=task.timeout_s)
    try:
        store = TCPStore(
            "127.0.0.1",
            task.port,
            task.world_size,
            is_master=task.rank == 0,
            timeout=timeout,
            master_listen_fd=task.listener,
        )
        dist.init_process_group(
            default_backend(), store=store, rank=task.rank, world_size=task.world_size, timeout=timeout
        )
        _seed(task.seed)  # the function's own modules, imported now, may draw as well
        function, args = cloudpickle.loads(task.payload)
        _seed(task.seed)
        return bytes(cloudpickle.dumps(function(*args)))
    except PlanError as problem:
        # A connection that breaks within an action is wrapped as a failure of that action, and still an echo.
        elsewhere = problem.first_rank not in (None, task.rank)
        trace = traceback.format_exc() if isinstance(problem, ExecutionError) and not elsewhere else ""
        echo = elsewhere or any(echo in str(problem) for echo in ECHOES)
        return Failure(str(problem), trace, echo, type(problem), problem.first_rank)
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
        return Failure(message, traceback.format_exc(), any(echo in message for echo in ECHOES))


if __name__ == "__main__":
    main()
