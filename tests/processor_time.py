"""Which tests are slow: measured in seconds of a processor, that of the processes they start included.

`make test` runs the tests that are not in `slow.txt`, `make slow` the others, and CI both. `make durations` measures
the tests of `make test`, one at a time, and adds to the list what takes long. Without a test of the list, the next that
needs the same model pays for its trace: repeat it until nothing is added.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import PRELOADED

LIST = Path(__file__).with_name("slow.txt")
SLOW_S = 0.45
"""A test that takes longer is slow [chosen: with it `make test` takes seven minutes of a processor]."""
KEPT = {
    "tests/executor/test_command.py::test_plan_show_and_run_in_a_row": "the command, from a model to its training",
    "tests/executor/test_faults.py::test_every_rank_ends_with_one_error": "each kind of fault",
    "tests/executor/test_adversary.py::test_random_models_train_as_they_would_alone": "models that nobody chose",
    "tests/executor/test_checkpoint.py::test_saved_with_three_stages_goes_on_with_any_number": "checkpoints",
    "tests/executor/test_pipeline.py::test_processes_train_as_one[layouts-3-1f1b]": "processes against one",
    "tests/test_readme.py::test_the_ten_lines_train_as_one_process[7-loader]": "the front page",
    "tests/profiler/test_links.py::test_two_workers_measure_their_link": "measured links",
    "tests/planner/test_brute_force.py::test_plans_are_the_best_of_all[1f1b]": "plans against all that there are",
    "tests/planner/test_ledger.py::test_search_report_and_simulator_count_the_same_bytes": "one account of memory",
    "tests/planner/test_restrictions.py::test_no_restriction_has_a_better_plan[True]": "the search misses nothing",
    "tests/profiler/test_guards.py::test_a_result_is_the_models_or_an_error": "branches on values",
}
"""Never listed, for no faster test keeps the same promise: what that is."""
_TICKS = os.sysconf("SC_CLK_TCK")


def slow_tests() -> dict[str, float]:
    """Seconds of each test of the list, by its name in pytest."""
    rows = (line.split(maxsplit=1) for line in LIST.read_text(encoding="utf-8").splitlines() if line[:1] != "#")
    return {name: float(seconds) for seconds, name in rows}


def mark_slow(items: list[pytest.Item]) -> None:
    """Let `-m "not slow"` leave out the tests of the list."""
    slow = slow_tests()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


class Durations:
    """A plugin that measures each test and adds those that take long to the list."""

    def __init__(self) -> None:
        self._seconds = slow_tests()

    def pytest_collection_finish(self) -> None:
        """What many tests load is no test's."""
        for name in (*PRELOADED, "pandas", "scipy.optimize", "matplotlib.pyplot", "transformers"):
            importlib.import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before_s = processor_s()
        result = yield
        self._seconds[item.nodeid] = processor_s() - before_s
        return result

    def pytest_sessionfinish(self) -> None:
        slow = sorted((name, seconds) for name, seconds in self._seconds.items() if seconds > SLOW_S)
        head = f"# Tests that take more than {SLOW_S:g} s of a processor; see processor_time.py."
        rows = [f"{seconds:.1f} {name}" for name, seconds in slow if name not in KEPT and name.startswith("tests/")]
        LIST.write_text("\n".join([head, *rows, ""]), encoding="utf-8")


def processor_s() -> float:
    """Seconds of a processor that this process has taken, and those that descend from it, running or awaited."""
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS  # its own and its children's; user and system
    own = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(seconds[number] for number in own)
