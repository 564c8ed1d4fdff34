"""How the C library gives memory back: the settings that workers start with, for a process that runs already."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt (malloc.h).
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
NEVER = -1
TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, as `workers.KEEP_FREED_MEMORY` makes workers do.

    glibc otherwise unmaps large blocks when they are freed and faults their pages in again for the next micro-batch:
    on a GPT of 3 M parameters forward passes took 1.5 times as long. The setting lasts as long as the process.

    Returns:
        Whether the settings are in force; False where there is no glibc.
    """
    library = _glibc()
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD_BYTES))
    return library is not None and all(library.mallopt(parameter, value) == 1 for parameter, value in settings)


def give_back_freed_memory() -> None:
    """Return the pages of freed blocks to the system once, those in holes between live blocks too.

    Blocks of layers of unlike sizes do not fit the holes that other layers left: profiling a model of four times the
    memory limit, kept pages came to 1.6 times the bytes of all tensors.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def has_glibc() -> bool:
    """Whether there is anything that could be given back."""
    return _glibc() is not None


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
