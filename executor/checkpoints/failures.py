"""In whose words a checkpoint fails, and what to do then.

Only what is in a file can be damaged. A process without memory, descriptors or rights, and a disk that does not answer,
say nothing of it: whoever is told that his checkpoint is damaged throws it away.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiler.errors import ExecutionError
from profiler.left_out_sizes import is_out_of_memory

_DAMAGED = "it is damaged or was not written by save_checkpoint: load another"
_ELSEWHERE = "save into a folder of yours"
_MEMORY = "let this process have more memory, and try again"
_DESCRIPTORS = "close files, or allow more at a time (ulimit -n), and try again"
_DISK = "see to its disk, or to the network that it is reached by, and try again"
_OTHER = _DISK, _DISK
_WHAT_TO_DO = {  # by what the system says: of reading, and of writing
    code: (of_reading, of_writing)
    for codes, of_reading, of_writing in (
        ((errno.ENOMEM,), _MEMORY, _MEMORY),
        ((errno.EMFILE, errno.ENFILE), _DESCRIPTORS, _DESCRIPTORS),
        ((errno.EACCES, errno.EPERM), "let this user read it, and try again", _ELSEWHERE),
        ((errno.ENOENT,), _DAMAGED, "someone removed it while it was written"),
        ((errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL), _DAMAGED, _ELSEWHERE),
        ((errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG), _DISK, _ELSEWHERE),
        ((errno.ENOSPC, errno.EDQUOT), _DISK, "make room, or keep fewer checkpoints (keep=...)"),
        ((errno.EFBIG,), _DISK, "allow larger files (ulimit -f), or save onto another disk, and try again"),
    )
    for code in codes
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what is raised while a file of a checkpoint is read into an error of ours that names it.

    Raises:
        ExecutionError: the file cannot be read, or holds what it should not.
    """
    try:
        yield
    except ExecutionError:
        raise
    except Exception as problem:  # whatever torch and pickles raise of files that are not torch's
        raise unreadable(path, problem) from problem


def unreadable(path: Path, problem: BaseException | str) -> ExecutionError:
    """The error of a checkpoint, or a file of one, that cannot be loaded.

    Args:
        path: the checkpoint or the file.
        problem: why, or what is wrong with what it holds.
    """
    if isinstance(problem, str):
        return ExecutionError(f"cannot load {path}: {problem}; {_DAMAGED}")
    of_reading, _ = _what_to_do(problem) or (_DAMAGED, "")
    return ExecutionError(f"cannot load {path}: {reason_of(problem)}; {of_reading}")


def unwritable(place: Path, problem: BaseException) -> ExecutionError:
    """The error of a checkpoint that cannot be saved."""
    _, of_writing = _what_to_do(problem) or ("", "")
    return ExecutionError("; ".join([f"cannot write {place}: {reason_of(problem)}", *filter(None, [of_writing])]))


def is_of_the_machine(problem: BaseException) -> bool:
    """Whether an exception says what the machine or its file system lacks or refuses."""
    return _what_to_do(problem) is not None


def _what_to_do(problem: BaseException) -> tuple[str, str] | None:
    if isinstance(problem, OSError):
        return _OTHER if problem.errno is None else _WHAT_TO_DO.get(problem.errno, _OTHER)
    return _WHAT_TO_DO[errno.ENOMEM] if is_out_of_memory(problem) else None


def reason_of(problem: BaseException) -> str:
    """What an exception says, in a line."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    lines = [line.strip() for line in str(problem).strip().splitlines() if line.strip()]
    return ": ".join([type(problem).__name__, *lines[-1:]])


def causes_of(problem: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised while handling, up to what the caller handles himself."""
    while problem is not None and problem is not handled:
        yield problem
        problem = problem.__context__
