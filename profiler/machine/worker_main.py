"""The main program of a worker process, see `profiler.machine.workers`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle
import numpy
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from profiler.errors import ArgumentError, ExecutionError, PlanError
from profiler.machine.groups import join_group, leave_group
from profiler.machine.journal import announce
from profiler.machine.workers import Failure, Task
from profiler.text import raised_text
from profiler.torch_private import process_groups_of_this_process
from profiler.users_frames import in_users_code, users_way_to

_ANY_FILE = io.IOBase.__base__ or io.IOBase  # the plain class of all files, of which the abstract one is a subclass
SECONDS_TO_LEAVE, SECONDS_TO_LEAVE_EACH = 0.5, 0.25
"""Process groups; to leave one takes 0.025 s on busy cores [measured]."""
LONGEST_CAUSE = 2**20
"""Bytes of an exception that is sent back [chosen]."""
ASKED = "it was asked to end (SIGTERM)"
# What a rank sees when another rank is gone: gloo's words for a closed socket or a message that never came.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Wait timeout",
    "timed out",
    ASKED,
)


def main() -> None:
    """Receive a task over the inherited socket, run it, report the result; then this process ends as any of Python's.

    So its threads, exit functions and output come to their end; the parent sees to it that this does not take for ever
    (`profiler.machine.ending`). Its sign is the inherited descriptor, which closes with the process and not before.
    """
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a line is out if this is killed
    descriptor, journal, *others = map(int, sys.argv[1:])
    for inherited in (descriptor, journal, *others):
        os.set_inheritable(inherited, False)  # a program that this process starts may outlive it
    connection = Connection(os.dup(descriptor))
    announce(journal)
    os.register_at_fork(after_in_child=partial(_leave_to_parent, descriptor, connection))
    _keep_signals_while_forking()
    _, pickled = connection.recv()
    task: Task = cloudpickle.loads(pickled)
    signal.signal(signal.SIGTERM, _raise_exit)
    leaves: list[list[Any]] = []
    atexit.register(_end_last, leaves)  # before all others, since they run in reverse
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    outcome = _run(task)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has had its error and ends all
        connection.send(outcome)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it takes nothing
            stream.flush()  # now, since the threads that Python waits for first may never end
    groups = _kept_process_groups()
    if isinstance(outcome, bytes):
        leaves.append(groups)


def _end_last(leaves: Sequence[list[Any]]) -> None:
    """The last exit function: write what is open, and end gloo's threads.

    Where one waits for what never comes, the process ends here: Python would end it with SIGABRT for that thread.

    Args:
        leaves: the groups that this worker leaves, if it has ended well.
    """
    _write_open_files()
    for groups in leaves:
        seconds = SECONDS_TO_LEAVE + SECONDS_TO_LEAVE_EACH * len(groups)
        leaving = threading.Thread(target=_leave, args=(groups,), daemon=True)
        leaving.start()
        leaving.join(seconds)
        if leaving.is_alive():
            ctypes.CDLL(None).fflush(None)  # what libraries have written
            os._exit(0)


def _leave(groups: list[Any]) -> None:
    groups.clear()
    leave_group()


def _write_open_files() -> None:
    """Write what files hold that are still open, and let Python end without looking for them.

    It looks for garbage, which may hold such files, several times when a process ends: among all objects of torch and
    of what the function has loaded that took 0.6 of 0.85 s [measured].
    """
    for each in gc.get_objects():
        # Not of `io.IOBase` itself: an abstract class asks all its subclasses, once for each of 20000 types [0.5 s].
        if issubclass(type(each), _ANY_FILE):
            with contextlib.suppress(Exception):  # it is closed, or takes nothing; Python would only print that
                each.flush()
    gc.freeze()


def _leave_to_parent(descriptor: int, connection: Connection) -> None:
    """In a fork: what would hide the death of this process from its parent, or keep the fork from being ended."""
    if connection.closed:  # a fork of a fork
        return
    os.close(descriptor)
    connection.close()
    if signal.getsignal(signal.SIGTERM) is _raise_exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _keep_signals_while_forking() -> None:
    """Let no SIGTERM get lost that reaches a fork before it is ready: Python there drops what it has noted until then.

    Whoever ends a fork right after its start (a pool, a data loader) would wait for it without end. It waits until the
    fork unblocks it, by when `_leave_to_parent`, registered before, has left it to the system.
    """
    masks: dict[int, set[int]] = {}  # of threads that fork

    def block() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore)


def _raise_exit(signal_number: int, frame: FrameType | None) -> None:
    """End this process with its exit functions."""
    raise SystemExit(ASKED)


def _kept_process_groups() -> list[Any]:
    """Process groups that are destroyed when this list is emptied: one that has lost a peer may wait without end."""
    groups = [*process_groups_of_this_process()]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))
    return groups


def _seed(seed: int | None) -> None:
    """Let all random numbers that a training loop may draw begin at a seed."""
    if seed is None:
        return
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _end_with_parent(connection: Connection) -> None:
    """End this process when the socket closes: a parent that died must leave no workers."""
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
        store = FileStore(task.meeting_point, task.world_size)
        store.set_timeout(timeout)
        join_group(store, task.rank, task.world_size, timeout)
        _meet(store, task)
        if task.search_path is not None:
            sys.path[:] = task.search_path  # only now: all that this process itself is made of is there
        _seed(task.seed)  # the function's own modules, imported now, may draw as well
        function, args = cloudpickle.loads(task.payload)
        _seed(task.seed)
        return _pickled(function(*args))
    except PlanError as problem:
        # A connection that breaks within an action is wrapped as a failure of that action, and still an echo.
        elsewhere = problem.first_rank not in (None, task.rank)
        trace = _of_execution(problem) if isinstance(problem, ExecutionError) and not elsewhere else ""
        echo = elsewhere or any(echo in str(problem) for echo in ECHOES)
        return Failure(str(problem), trace, echo, type(problem), problem.first_rank, _of_user(problem.__cause__))
    except BaseException as problem:  # also sys.exit: whoever ends without a report may hang in an exit function
        message = "; ".join([raised_text(problem), *getattr(problem, "__notes__", ())])
        echo = any(echo in message for echo in ECHOES)
        return Failure(message, _from_the_function(problem), echo, cause=_of_user(problem))


def _of_user(cause: BaseException | None) -> bytes | None:
    """An exception as it is sent back; None where it cannot be, or is too long."""
    if cause is None:
        return None
    try:
        sent = bytes(cloudpickle.dumps(cause))
    except Exception:  # whatever it holds; its text is in the message
        return None
    return sent if len(sent) <= LONGEST_CAUSE else None


def _pickled(result: Any) -> bytes:
    """What the function returned, as it is sent back.

    Raises:
        ArgumentError: it cannot be.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as problem:
        raise ArgumentError(
            f"what the function returned, a {type(result).__name__}, cannot be sent back ({raised_text(problem)}); "
            "return tensors, numbers, strings and containers of these"
        ) from problem


def _meet(store: FileStore, task: Task) -> None:
    """Wait until all ranks are connected: one that had done its work by then broke connections that others still made.

    Over the store, since whoever is last in a barrier of the process group could lose a rank that has left it.
    """
    store.set(f"connected {task.rank}", "")
    store.wait([f"connected {rank}" for rank in range(task.world_size)])


def _of_execution(problem: ExecutionError) -> str:
    """The traceback; where the user's own code has failed, such as a loss function, with the user's frames alone."""
    cause = problem.__cause__
    return traceback.format_exc() if cause is None or not in_users_code(cause) else users_way_to(cause, problem)


def _from_the_function(problem: BaseException) -> str:
    """The traceback without the frame of this file, which is about no code of the function's."""
    trace = None if problem.__traceback__ is None else problem.__traceback__.tb_next
    return "".join(traceback.TracebackException(type(problem), problem, trace).format())
