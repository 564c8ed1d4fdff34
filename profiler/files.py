"""Write a file so that neither a reader nor a crash ever meets half of it.

    replace_file(Path("plan.json"), text.encode())

The bytes go into another file of the same folder, reach the disk, and move to the name in one step of the file system;
then the folder reaches the disk. Until the step is done the name means what it meant before: after an exception, an
interrupt, a kill, or a loss of power. Every file that this project writes, the figures of matplotlib and torch's parts
of a checkpoint included, comes to its place so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path

DRAFT = ".draft-"  # begins the names of files and folders that are not whole yet


def replace_file(path: Path, data: bytes) -> None:
    """Let a file hold `data` instead of what it held; two writers do no harm, the last one counts.

    The file gets the rights that the user's new files get (umask), or keeps those it had. A symbolic link stays one:
    the file that it points to is replaced. What is no file, such as `/dev/stdout` or a pipe, is written to directly.
    Missing folders are made.

    Raises:
        OSError: nothing can be written there; nothing is left but what was there before.
        ValueError: no file can have that name.
    """
    there = _status(path)
    if there is not None and not stat.S_ISREG(there.st_mode):
        path.write_bytes(data)  # a folder raises here
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f"{DRAFT}{uuid.uuid4().hex}"  # each writer's own
    try:
        with draft.open("xb") as file:
            if there is not None:
                _give_mode(file.fileno(), stat.S_IMODE(there.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        flush_folder(path.parent)
    finally:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk, where the file system can be told to and lets the user read them."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder to drop files in: its names are the system's business
        return
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems of networks know no such thing
            raise
    finally:
        os.close(descriptor)


def _give_mode(descriptor: int, mode: int) -> None:
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # where all files have one mode, none can be given
        os.fchmod(descriptor, mode)


def _status(path: Path) -> os.stat_result | None:
    """Of what is there, links followed; None if nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
