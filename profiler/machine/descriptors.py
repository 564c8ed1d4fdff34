"""The descriptors of standard input, output and error: always open, so that nothing else gets their numbers."""

from __future__ import annotations

import os
import sys


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed (`2>&-`) onto nothing.

    Otherwise the next socket or file of this process gets the number, and what C++ prints on standard error goes into
    a message to another process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # as the three always are
    os.close(descriptor)


def hides_progress(wanted: bool) -> bool | None:
    """What tqdm is to be told as `disable`: None lets it find out whether standard error is a terminal.

    Where standard error is closed it does not, and ends what it should only show.
    """
    return None if wanted and sys.stderr is not None else True
