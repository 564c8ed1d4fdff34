"""How helper processes start: with our own packages, and nothing of the folder that the user happens to be in.

`python -m profiler.machine.worker_main` would look into the current folder first, and the parent's `sys.path` may begin
with the folder of the user's script. A `random.py`, `typing_extensions.py` or `profiler.py` there would then be run,
and taken for the one that torch or we mean.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

_HOME = Path(__file__).resolve().parents[2]
# Our packages from their own home, wherever that stands in the path; all else from where Python alone looks for it.
# The garbage collector has nothing to find while libraries load, and takes a fifth of that time [measured]; and it need
# not look through what they have made when the process ends.
_START = """
import gc, sys
gc.disable()
import pathlib, typing  # while nothing can stand in their way
home, module = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, home)
import profiler, planner, executor
del sys.path[0]
from importlib import import_module
main = import_module(module).main
gc.freeze()
gc.enable()
main()
"""


class Process(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its number, which is also its group's."""

    def wait(self, timeout: float | None = None) -> int:
        """How it ends; raises `subprocess.TimeoutExpired` if it does not within so many seconds."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send it a signal unless it has ended."""


def start_process(
    module: str, *arguments: str, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> Process:
    """Call `main` of one of our modules in a fresh interpreter, in a process group of its own.

    Ctrl-C goes to the caller alone, and what the process starts can be ended with it.

    Args:
        module: its name.
        arguments: `sys.argv[1:]` there.
        environment: of the process.
        descriptors: open files of this process that the other finds under the same numbers.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(_HOME), module, *arguments],
        pass_fds=descriptors,
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
