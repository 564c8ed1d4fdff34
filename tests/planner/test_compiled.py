"""What is compiled is kept: not beyond a change of what it was made of, and made by one process of several."""

import ast
import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.kernel import compiled
from planner.solve.deadline import Deadline

TYPES = {"Floats", "Indices", "Mask"}
TWICE = """
import sys, time
from planner.kernel.compiled import compiled

@compiled
def total(count):
    found = 0.0
    for number in range(count):
        found += number**0.5
    return found

while not sys.stdin.read(1):
    pass
total(9)
print(sum(total.stats.cache_misses.values()))
"""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled._NUMBA.config, "CACHE_DIR", str(tmp_path))


def times_compiled(function) -> int:
    """How often it is compiled for a call in a process that finds what others kept."""
    dispatcher = compiled.compiled(function)
    assert dispatcher(4) == 7
    return sum(dispatcher.stats.cache_misses.values())  # type: ignore[attr-defined]  # numba's


def test_what_is_kept_is_stale_when_a_file_of_the_search_changes(own_cache, tmp_path, monkeypatch):
    """Numba looks at a function's own file alone: a function changed in another file went on as it was before."""
    source = tmp_path / "other.py"
    source.write_text("THREE = 3")
    monkeypatch.setattr(compiled, "SOURCES", (source,))

    def more(number):
        return number + 3

    assert [times_compiled(more), times_compiled(more)] == [1, 0]
    source.write_text("THREE = 3.0")
    compiled.digest_of.cache_clear()
    assert times_compiled(more) == 1
    compiled.digest_of.cache_clear()


def test_limits_of_time_stand_still_while_the_search_is_compiled(own_cache):
    """With 5 s the first search after an installation, which is compiled for 20 s, had another plan than the second."""

    def more(number):
        return number + 3

    before_s, began_s, deadline = compiled.seconds_compiling(), time.monotonic(), Deadline(1000.0)
    assert times_compiled(more) == 1
    took_s, compiling_s = time.monotonic() - began_s, compiled.seconds_compiling() - before_s
    assert 0 < compiling_s <= took_s
    assert deadline.left_s >= 1000.0 - (time.monotonic() - began_s) + compiling_s


def test_sources_hold_all_that_compiled_functions_read():
    """What a file of the search imports from elsewhere is a source too, if it is more than a type."""
    for file in Path(compiled.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(("planner.", "profiler")):
                continue
            parts = (node.module or "").split(".")
            names = {name.name for name in node.names} - TYPES
            places = [Path(*parts).with_suffix(".py"), *(Path(*parts, f"{name}.py") for name in names)]
            root = Path(compiled.__file__).parents[2]
            known = any(root / place in compiled.SOURCES for place in places)
            assert known or not names, (file.name, node.module, names)


def test_processes_that_start_together_compile_once(tmp_path):
    """The workers of a fresh clone's tests each compiled the whole search, and so did the ranks of a first plan."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    root = Path(compiled.__file__).parents[2]
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(root), "PATH": ""}
    both = [
        subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0] for process in both]
    assert sorted(map(int, said)) == [0, 1]


def test_a_number_in_the_source_makes_no_version_of_its_own(own_cache):
    """Each call with another constant compiled the function, and what it calls, once more."""

    def times(number, factor):
        return number * factor

    inner = compiled.compiled(times)

    def use(number):
        return inner(number, 2) + inner(number, 3) + inner(number, number)

    assert compiled.compiled(use)(2) == 14
    assert len(inner.signatures) == 1  # type: ignore[attr-defined]  # numba's


def test_nobody_waits_for_ever_for_another_that_compiles(own_cache, tmp_path, monkeypatch):
    """A process that was stopped while it compiled, or was stuck, held up every search on the machine."""
    monkeypatch.setattr(compiled, "_WAITED_IN_VAIN", set())
    monkeypatch.setattr(compiled, "LONGEST_WAIT_S", 0.0)

    def more(number):
        return number + 3

    folder = Path(compiled.compiled(more).stats.cache_path)  # type: ignore[attr-defined]  # numba's
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert times_compiled(more) == 1
        assert folder in compiled._WAITED_IN_VAIN
        assert folder not in compiled._HELD
        assert times_compiled(more) == 0  # what it compiled by itself is kept
