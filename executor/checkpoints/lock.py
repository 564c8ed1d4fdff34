"""One run at a time saves into a folder: a lock that ends with the process, however that ends.

    checkpoints/.lock      stays; what counts is who has it locked, not that it is there

The lock is `flock`, on a local disk and on NFS (where the system makes a lock of the server's of it), so runs on
several hosts exclude each other too. A killed run leaves none behind, a host that lost power none once the server's
lease is over. The file says who holds it, for the message to the other run.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import time
import warnings
import weakref
from datetime import UTC, datetime
from pathlib import Path

from profiler.errors import ExecutionError, PlanError
from profiler.value import Value

LOCK = ".lock"
WAIT_S = 10.0  # a killed run keeps its lock until the workers of its data loaders notice that it is gone: every 5 s
_PAUSE_S = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_LONGEST_BYTES = 4096  # of what a holder says


class _Holder(Value):
    """Who holds a lock."""

    host: str
    process: int
    since: str


class FolderLock:
    """An attempt to lock a folder.

    Args:
        folder: to lock.

    Attributes:
        taken: whether this run may save into the folder.
        guards: whether the lock keeps other runs out; not on a file system without locks.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(self._path, flags, 0o666)
        self.give_back = weakref.finalize(self, os.close, self._descriptor)
        self.taken = self.guards = False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.guards = True
        except OSError as problem:
            if problem.errno not in _UNSUPPORTED:
                return
            warnings.warn(
                f"{folder} cannot be locked ({problem.strerror}): see to it that no other run saves there", stacklevel=2
            )
        self.taken = self.in_place
        if self.taken:
            self._sign()

    @property
    def in_place(self) -> bool:
        """Whether it is still the folder's lock: someone may have removed the folder, and another run made it anew."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except OSError:
            return False

    def holder(self) -> _Holder | None:
        """Who holds it, if that one has said so."""
        try:
            text = os.pread(self._descriptor, _LONGEST_BYTES, 0).decode()
            return _Holder.parse_json(text, source=str(self._path), error=ExecutionError)
        except (OSError, ValueError, PlanError):  # it is about to say so, or the file is a stranger's
            return None

    def _sign(self) -> None:
        since = datetime.now(UTC).isoformat(" ", "seconds")
        text = _Holder(host=socket.gethostname(), process=os.getpid(), since=since).to_json()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)


def lock_folder(folder: Path) -> FolderLock:
    """Keep other runs from saving into a folder for as long as what is returned lives.

    Raises:
        ExecutionError: another run saves there; the message names it.
        OSError: nothing can be written there.
    """
    end_s = time.monotonic() + WAIT_S
    while True:
        lock = FolderLock(folder)
        if lock.taken:
            return lock
        holder = lock.holder()
        lock.give_back()
        ours = holder is not None and (holder.host, holder.process) == (socket.gethostname(), os.getpid())
        if ours and gc.collect() and (lock := FolderLock(folder)).taken:  # its pipeline is gone, but was not collected
            return lock
        if ours or time.monotonic() >= end_s:
            raise ExecutionError(_refusal(folder, holder, ours=ours))
        time.sleep(_PAUSE_S)


def _refusal(folder: Path, holder: _Holder | None, *, ours: bool) -> str:
    if holder is None:
        return f"another run saves in {folder}; save into another folder, or end that run first"
    if ours:
        return (
            f"another pipeline of this process has saved in {folder} since {holder.since}, and may again; save into "
            "another folder, or let go of that pipeline first"
        )
    return (
        f"another run saves in {folder}: process {holder.process} on {holder.host!r}, since {holder.since!r}; save "
        "into another folder, or end that run first"
    )
