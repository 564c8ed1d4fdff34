"""Worker processes on this machine: start them, give them a function, gather what it returns.

Workers are fresh interpreters, not forks (a fork after OpenMP has run hangs), and the function travels by value where
it must: functions and models that a script or a notebook defines need no importable home and no `__main__` guard.
Nothing hangs or is left behind: the first worker that fails ends all, and workers end with their parent. Nor is
anything lost: workers end as Python ends, with exit functions and output (`profiler.machine.ending`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from profiler.errors import ArgumentError, ExecutionError, PlanError
from profiler.machine.descriptors import hold_standard_descriptors
from profiler.machine.ending import SECONDS_TO_END, Worker, ended_workers, how_it_ended
from profiler.machine.journal import Entry, Journal
from profiler.machine.start import start_process
from profiler.quantities import shown
from profiler.text import raised_text

# glibc returns freed memory to the system at once by default and faults it in again in the next micro-batch; on a GPT
# of 3 M parameters that made forward passes 1.5 times as slow. Workers keep what they freed. [measured]
KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
SECONDS_FOR_OTHER_REPORTS = 0.4  # after the first failure: its cause becomes known, and others raise it themselves


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is sent.

    Attributes:
        rank: of this worker.
        world_size: number of workers.
        meeting_point: path of the file through which the workers find each other.
        threads: threads that torch computes with.
        timeout_s: seconds after which a message between workers counts as lost.
        cores: that the worker may run on; None for all.
        environment: further variables of its environment.
        seed: of the random numbers of torch, Python and numpy; None to leave them as they are.
        payload: `(function, args)`, pickled by value.
        search_path: where modules that the payload names are looked for; None for where the worker finds its own.
    """

    rank: int
    world_size: int
    meeting_point: str
    threads: int
    timeout_s: float
    cores: frozenset[int] | None
    environment: Mapping[str, str]
    seed: int | None
    payload: bytes
    search_path: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker reports when its function raised.

    Attributes:
        message: type and text of the exception.
        trace: formatted traceback; "" for our own errors, whose message says it all.
        error: class of the exception if it is one of ours.
        echo: whether it only says that another worker is gone.
        first_rank: the rank that failed first, where the message names it.
        cause: the user's own exception, pickled; None where there is none, or it cannot be.
    """

    message: str
    trace: str
    echo: bool
    error: type[PlanError] = ExecutionError
    first_rank: int | None = None
    cause: bytes | None = None


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
    users_modules: bool = True,
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
        users_modules: whether workers find modules where this process does; without, as Python alone finds them.

    Returns:
        The results in rank order.

    Raises:
        ArgumentError: the function or its arguments cannot go to another process.
        PlanError: a worker raised one of our errors: of the same class, with the rank.
        ExecutionError: a worker raised anything else, with its traceback, or died.
    """
    world_size = len(args_of_rank)
    cores = cores_of_workers(world_size, threads) if own_cores else [None] * world_size
    hold_standard_descriptors()
    _flush_output()
    payloads = [_pickled(function, args) for args in args_of_rank]
    with _meeting_point() as (meeting_point, inherited), ended_workers() as workers:
        for rank, payload in enumerate(payloads):
            variables = environment or {}
            task = Task(rank, world_size, meeting_point, threads, timeout_s, cores[rank], variables, seed, payload)
            if users_modules:
                task = replace(task, search_path=tuple(path or str(Path.cwd()) for path in sys.path))
            workers.append(_start(task, inherited))
        return _gather(workers, describe)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Modules whose class is one of their own go by name, as others do: `torch.backends.cudnn`, for instance."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _pickled(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """What a worker calls, with what.

    Raises:
        ArgumentError: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((function, args))
    except Exception as problem:  # whatever an object's own __reduce__ raises
        raise ArgumentError(
            f"{getattr(function, '__qualname__', shown(function))} and what it uses go to other processes, and cannot: "
            f"{raised_text(problem)}; make there what cannot be pickled, instead of using one made here"
        ) from problem
    return buffer.getvalue()


def cores_of_workers(count: int, threads: int) -> Sequence[frozenset[int] | None]:
    """Cores for each of `count` workers of `threads` threads each; None where a worker is to run on any.

    A worker has threads that wait for messages in addition to those that compute. Where workers occupy all cores, a
    thread that wakes up for a message can push a computing one onto the core of another worker, and all wait for these
    two: a step of K = 2 on two cores was 1.1 times as long [measured]. With cores to spare the system does better
    alone, and fixed cores would collide with those of another program.
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


@contextlib.contextmanager
def _meeting_point() -> Iterator[tuple[str, list[int]]]:
    """Path of an empty file that only this user can open, and descriptors that make it so in a worker.

    A file and no port of this machine: to that any user could connect, read all keys and write others. Where the
    system shows open files as files it has no name, so that nothing is left however the processes end.
    """
    if Path("/proc/self/fd").exists():
        with tempfile.TemporaryFile() as file:
            yield f"/proc/self/fd/{file.fileno()}", [file.fileno()]
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder, "meeting-point")), []


def _flush_output() -> None:
    """Write what was printed before the workers begin to print."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _start(task: Task, inherited: Sequence[int]) -> Worker:
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
            **task.environment,
        }
        own = [theirs.fileno(), page.fileno()]
        process = start_process(
            "profiler.machine.worker_main",
            *map(str, [*own, *inherited]),
            environment=environment,
            descriptors=[*own, *inherited],
        )
        journal = Journal(page.fileno())
    connection = Connection(ours.detach())
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a worker that died at once shows in _gather
        connection.send((task.rank, cloudpickle.dumps(task)))
    return Worker(task.rank, process, connection, journal)


def _gather(workers: Sequence[Worker], describe: Callable[[Entry], str]) -> list[Any]:
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
            else:
                results[worker.rank] = cloudpickle.loads(outcome)
    if failures:
        rank, failure = min(failures.items(), key=lambda item: item[1].echo)
        if failure.first_rank not in (None, rank):
            where = describe(workers[failure.first_rank].journal.read())
            failure = replace(failure, message=f"{failure.message}; rank {failure.first_rank} was at {where}")
        elif failure.first_rank is None:
            failure = replace(failure, message=f"rank {rank} of {len(workers)} failed: {failure.message}")
        raise failure.error(f"{failure.message}\n{failure.trace}".rstrip()) from _cause(failure)
    return [results[worker.rank] for worker in workers]


def _cause(failure: Failure) -> BaseException | None:
    """The user's own exception, if it can be made again in this process."""
    if failure.cause is None:
        return None
    try:
        cause = cloudpickle.loads(failure.cause)
    except Exception:  # whatever its class raises; the message has its text
        return None
    return cause if isinstance(cause, BaseException) else None


def _outcome(worker: Worker, describe: Callable[[Entry], str]) -> bytes | Failure:
    """What the worker reports, or how it ended."""
    try:
        outcome = worker.connection.recv()
    except (EOFError, OSError):
        worker.ended = True
        where = describe(worker.journal.read())
        return Failure(f"{where}{': ' if where else ''}its process {_how_it_went(worker)}", "", echo=False)
    worker.reported = True
    assert isinstance(outcome, bytes | Failure)
    return outcome


def _how_it_went(worker: Worker) -> str:
    try:
        return f"{how_it_ended(worker.process.wait(SECONDS_TO_END))} before it had finished"
    except subprocess.TimeoutExpired:
        return "has closed the connection over which it should report"
