"""How helper processes start: with our own packages, and nothing of the folder that the user happens to be in.

`python -m profiler.machine.worker_main` would look into the current folder first, and the parent's `sys.path` may begin
with the folder of the user's script. A `random.py`, `typing_extensions.py` or `profiler.py` there would then be run,
and taken for the one that torch or we mean.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def python_command(module: str, *arguments: str) -> list[str]:
    """A command that calls `main` of one of our modules in a fresh interpreter.

    Args:
        module: its name.
        arguments: `sys.argv[1:]` there.
    """
    return [sys.executable, "-P", "-c", _START, str(_HOME), module, *arguments]
