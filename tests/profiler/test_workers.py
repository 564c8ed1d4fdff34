"""Worker processes: results, failures, deaths."""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profiler.channel import finish, start_receive, start_send
from profiler.device import Cluster, Device
from profiler.errors import ExecutionError
from profiler.links import measure_link
from profiler.neighbours import neighbours
from profiler.workers import cores_of_workers, run_workers, usable_cores


def _shift(offset: int) -> tuple[int, int, int]:
    """Send the rank to the next worker; returns what came, the threads and the offset."""
    rank, size = dist.get_rank(), dist.get_world_size()
    incoming = torch.zeros(1, dtype=torch.int64)
    pending = start_receive([incoming], source=(rank - 1) % size, tag=5)
    pending += start_send([torch.tensor([rank + offset])], to=(rank + 1) % size, tag=5)
    finish(pending)
    assert not pending
    return int(incoming), torch.get_num_threads(), offset


def test_results_come_in_rank_order() -> None:
    assert run_workers(_shift, [(10,), (20,)], threads=1) == [(21, 1, 10), (10, 1, 20)]


def test_a_function_of_a_script_travels_by_value() -> None:
    base = torch.tensor([3.0])
    assert run_workers(lambda x: float(base * x), [(2.0,)]) == [6.0]


def _fail(how: str) -> Any:
    """Rank 1 fails; rank 0 waits for a message of it."""
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("the first cause")
        os.kill(os.getpid(), signal.SIGKILL)
    finish(start_receive([torch.zeros(1)], source=1, tag=0))


@pytest.mark.parametrize(
    ("how", "cause"),
    [("raise", "KeyError: 'the first cause'"), ("kill", "was killed by SIGKILL")],
)
def test_one_error_names_rank_and_cause(how: str, cause: str) -> None:
    with pytest.raises(ExecutionError, match=r"^rank 1 of 2 failed: ") as caught:
        run_workers(_fail, [(how,), (how,)])
    assert cause in str(caught.value)


def test_workers_that_fill_the_machine_have_cores_of_their_own() -> None:
    cores = usable_cores()
    shared = cores_of_workers(len(cores), 1)
    if len(cores) > 1:
        assert [set(own) for own in shared if own] == [{core} for core in cores]
    assert cores_of_workers(1, len(cores)) == [None]
    assert cores_of_workers(len(cores) + 1, 1) == [None] * (len(cores) + 1)


@pytest.mark.skipif(len(usable_cores()) != 2, reason="two workers fill a machine of two cores")
def test_a_worker_runs_on_its_cores() -> None:
    assert run_workers(_cores, [(0,), (1,)]) == [[usable_cores()[0]], [usable_cores()[1]]]
    assert run_workers(_cores, [(0,), (1,)], own_cores=False) == [usable_cores()] * 2


def _cores(_: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))


INTRUDERS = ("profiler", "planner", "executor", "typing_extensions", "random", "queue", "csv", "sympy")


@pytest.fixture
def folder_of_intruders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which the parent's path begins with: each module in it leaves a file when it is imported."""
    for name in INTRUDERS:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    (tmp_path / "users_own.py").write_text("def answer(rank):\n    return 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_helpers_of_planning_run_nothing_of_the_current_folder(folder_of_intruders: Path) -> None:
    """`python -m profiler.neighbour` looked into the current folder first: a `typing_extensions.py` there was run as a
    part of torch, and a `profiler.py` ended planning with 'No module named profiler.neighbour'. The link's processes
    had it in front of their path by `PYTHONPATH`."""
    here = str(folder_of_intruders)
    with neighbours(1) as wait_until_busy:
        wait_until_busy()
    cluster = Cluster(devices=(Device(name="cpu", kind="cpu", memory_bytes=1, threads=1),) * 2)
    assert run_workers(lambda: here in sys.path, [(), ()], users_modules=False) == [False, False]
    assert measure_link(cluster).bytes_per_s > 0
    assert not (folder_of_intruders / "ran").exists()


def test_workers_find_the_users_modules_and_start_without_them(folder_of_intruders: Path) -> None:
    """What a worker itself is made of comes before the user's folder does; then it finds what its parent finds."""
    users_own = importlib.import_module("users_own")
    try:
        assert run_workers(users_own.answer, [(0,)]) == [42]
    finally:
        del sys.modules["users_own"]
    assert not (folder_of_intruders / "ran").exists()
