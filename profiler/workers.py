"""Worker processes on this machine: start them, give them a function, gather what it returns.

Workers are fresh interpreters, not forks (a fork after OpenMP has run hangs), and the function travels by value where
it must: functions and models that a script or a notebook defines need no importable home and no `__main__` guard.
Nothing hangs or is left behind: the first worker that fails ends all, and workers end with their parent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from profiler.errors import ExecutionError, PlanError
from profiler.journal import Entry, Journal

# glibc returns freed memory to the system at once by default and faults it in again in the next micro-batch; on a GPT
# of 3 M parameters that made forward passes 1.5 times as slow. Workers keep what they freed. [measured]
KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
SECONDS_FOR_OTHER_REPORTS = 0.4  # after the first failure, so that its cause is known and not only its echo


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is sent.

    Attributes:
        rank: of this worker.
        world_size: number of workers.
        port: of the store through which the workers find each other; the first worker holds it.
        listener: descriptor of the store's listening socket, in the first worker.
        threads: threads that torch computes with.
        timeout_s: seconds after which a message between workers counts as lost.
        cores: that the worker may run on; None for all.
        environment: further variables of its environment.
        seed: of the random numbers of torch, Python and numpy; None to leave them as they are.
        payload: `(function, args)`, pickled by value.
    """

    rank: int
    world_size: int
    port: int
    listener: int | None
    threads: int
    timeout_s: float
    cores: frozenset[int] | None
    environment: Mapping[str, str]
    seed: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker reports when its function raised.

    Attributes:
        message: type and text of the exception.
        trace: formatted traceback; "" for our own errors, whose message says it all.
        error: class of the exception if it is one of ours.
        echo: whether it only says that another worker is gone.
        first_rank: the rank that failed first, where the message names it.
    """

    message: str
    trace: str
    echo: bool
    error: type[PlanError] = ExecutionError
    first_rank: int | None = None


def run_workers(
    function: Callable[..., Any],
    args_of_rank: Sequence[tuple[Any, ...]],
    *,
    threads: int = 1,
    timeout_s: float = 60.0,
    own_cores: bool = True,
    environment: Mapping[str, str] | None = None,
    seed: int | None = None,
    describe: Callable[[Entry], str] = lambda _: "",
) -> list[Any]:
    """Call `function(*args_of_rank[rank])` in one process per rank, inside one `torch.distributed` world.

    Args:
        function: what to run.
        args_of_rank: one tuple of arguments per rank.
        threads: torch threads of each worker.
        timeout_s: how long a rank waits for a message of another.
        own_cores: give each worker cores of its own where together they occupy exactly those of this machine; see
            `cores_of_workers`.
        environment: further variables of the workers' environment.
        seed: of all workers' random numbers; None for others in each.
        describe: says in words what a worker's journal holds; "" for nothing. Of a worker that dies it is the last
            that is known.

    Returns:
        The results in rank order.

    Raises:
        PlanError: a worker raised one of our errors: of the same class, with the rank.
        ExecutionError: a worker raised anything else, with its traceback, or died.
    """
    world_size = len(args_of_rank)
    cores = cores_of_workers(world_size, threads) if own_cores else [None] * world_size
    with socket.create_server(("127.0.0.1", 0), backlog=world_size) as store, _ended_workers() as workers:
        for rank, args in enumerate(args_of_rank):
            payload = cloudpickle.dumps((function, args))
            listener = store.fileno() if rank == 0 else None
            port = store.getsockname()[1]
            variables = environment or {}
            task = Task(rank, world_size, port, listener, threads, timeout_s, cores[rank], variables, seed, payload)
            workers.append(_start(task))
        return _gather(workers, describe)


def cores_of_workers(count: int, threads: int) -> Sequence[frozenset[int] | None]:
    """Cores for each of `count` workers of `threads` threads each; None where a worker is to run on any.

    A worker has threads that wait for messages beside those that compute. Where workers occupy all cores, a thread
    that wakes up for a message can push a computing one onto the core of another worker, and all wait for these two:
    a step of K = 2 on two cores was 1.1 times as long [measured]. With cores to spare the system does better alone,
    and fixed cores would collide with those of another program.
    """
    usable = usable_cores()
    if count == 1 or count * threads != len(usable):
        return [None] * count
    return [frozenset(usable[rank * threads : (rank + 1) * threads]) for rank in range(count)]


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    journal: Journal


@contextlib.contextmanager
def _ended_workers() -> Iterator[list[_Worker]]:
    """A list of workers of which none is left at the end."""
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of it
                os.killpg(worker.process.pid, signal.SIGKILL)  # with the processes that it has started
        for worker in workers:
            worker.process.wait()


def _start(task: Task) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as page:
        page.truncate(mmap.PAGESIZE)
        environment = {
            **KEEP_FREED_MEMORY,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "",
            **os.environ,
            "OMP_NUM_THREADS": str(task.threads),
            "RANK": str(task.rank),
            "LOCAL_RANK": str(task.rank),
            "WORLD_SIZE": str(task.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(task.port),
            **task.environment,
        }
        inherited = [theirs.fileno(), page.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "profiler.worker", *map(str, inherited)],
            pass_fds=inherited if task.listener is None else [*inherited, task.listener],
            env={**environment, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C goes to the caller alone, and what a worker starts ends with it
        )
        journal = Journal(page.fileno())
    connection = Connection(ours.detach())
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a worker that died at once shows in _gather
        connection.send((task.rank, cloudpickle.dumps(task)))
    return _Worker(task.rank, process, connection, journal)


def _gather(workers: Sequence[_Worker], describe: Callable[[Entry], str]) -> list[Any]:
    """The workers' results in rank order, or the error of the worker that failed first."""
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    waiting = {worker.connection: worker for worker in workers}
    deadline: float | None = None
    while waiting:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), patience)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            worker = waiting.pop(connection)
            outcome = _outcome(worker, describe)
            if isinstance(outcome, Failure):
                failures[worker.rank] = outcome
                deadline = deadline or time.monotonic() + SECONDS_FOR_OTHER_REPORTS
                if not outcome.echo:
                    deadline = time.monotonic()
            else:
                results[worker.rank] = cloudpickle.loads(outcome)
    if failures:
        rank, failure = min(failures.items(), key=lambda item: item[1].echo)
        if failure.first_rank not in (None, rank):
            where = describe(workers[failure.first_rank].journal.read())
            failure = replace(failure, message=f"{failure.message}; rank {failure.first_rank} was at {where}")
        elif failure.first_rank is None:
            failure = replace(failure, message=f"rank {rank} of {len(workers)} failed: {failure.message}")
        raise failure.error(f"{failure.message}\n{failure.trace}".rstrip())
    return [results[worker.rank] for worker in workers]


def _outcome(worker: _Worker, describe: Callable[[Entry], str]) -> bytes | Failure:
    """What the worker reports, or how it ended."""
    try:
        outcome = worker.connection.recv()
    except (EOFError, OSError):
        code = worker.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        where = describe(worker.journal.read())
        return Failure(f"{where}{': ' if where else ''}its process {how} before it had finished", "", echo=False)
    assert isinstance(outcome, bytes | Failure)
    return outcome
