"""`python -m planner` is the command `autoplan`, where scripts of an environment are not on the path."""

from importlib import import_module

import_module("executor.command").main(prog_name="python -m planner")
