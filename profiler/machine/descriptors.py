"""Descriptors: those of standard input, output and error are always open, those of another process can be opened."""

from __future__ import annotations

import os
import stat


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed (`2>&-`) onto nothing.

    Otherwise the next socket or file of this process gets the number, and what C++ prints on standard error goes into
    a message to another process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # as the three always are
    os.close(descriptor)


def open_of_another(process: int, descriptor: int, at_least_bytes: int, access: int) -> int:
    """Open the file that another process of this machine has open; it needs no name.

    Args:
        process: its number.
        descriptor: the other process's.
        at_least_bytes: of the file.
        access: as `os.open` has it.

    Raises:
        OSError: there is no such file: the process is on another machine, or the system does not let this one look.
    """
    found = os.open(f"/proc/{process}/fd/{descriptor}", access | os.O_NONBLOCK)
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode) or about.st_size < at_least_bytes:
        os.close(found)
        raise FileNotFoundError(f"process {process} here is another one than was meant")
    return found
