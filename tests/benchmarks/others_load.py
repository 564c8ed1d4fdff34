"""Whether others computed on the machine while something was measured: a figure taken next to them says little.

with OthersLoad() as others:                    # in one of the processes that measure
    measure()
others.cores(sum(everyone's process_time))      # 0.1: a tenth of a core
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk


class OthersLoad:
    """Watches the processor seconds of the whole machine (Linux; elsewhere there seem to be no others)."""

    def __enter__(self) -> Self:
        self._begun = time.perf_counter(), _busy_s()
        return self

    def __exit__(self, *_: object) -> None:
        begun_s, busy_s = self._begun
        self.lasted_s = time.perf_counter() - begun_s
        self._busy_s = _busy_s() - busy_s

    def cores(self, own_s: float) -> float:
        """How many cores others used on average.

        Args:
            own_s: processor seconds of all processes that belong to the measurement.
        """
        return max(0.0, self._busy_s - own_s) / self.lasted_s


def _busy_s() -> float:
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    ticks = sum(int(count) for column, count in enumerate(first) if column not in IDLE)
    return ticks / float(os.sysconf("SC_CLK_TCK"))
