"""Worker processes: results, failures, deaths."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profiler.channel import finish, start_receive, start_send
from profiler.errors import ExecutionError
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
