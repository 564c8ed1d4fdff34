"""Worker processes: results, failures, deaths, ends."""

import atexit
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profiler.device import Device
from profiler.errors import ExecutionError
from profiler.machine import ending, worker_main
from profiler.machine.background_load import neighbours
from profiler.machine.channel import finish, start_receive, start_send
from profiler.machine.links import ping_pong
from profiler.machine.workers import cores_of_workers, run_workers, usable_cores


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
    assert "worker_main.py" not in str(caught.value)  # whose frame is about no code of the function's


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


@pytest.mark.fresh_processes
def test_helpers_of_planning_run_nothing_of_the_current_folder(folder_of_intruders: Path) -> None:
    """The program of the busy neighbours looked into the current folder first: a `typing_extensions.py` there ran as a
    part of torch, and a `profiler.py` ended planning with 'No module named profiler'. The link's processes had it in
    front of their path by `PYTHONPATH`."""
    here = str(folder_of_intruders)
    with neighbours(1) as wait_until_busy:
        wait_until_busy()
    cpu = Device(name="cpu", kind="cpu", memory_bytes=1, threads=1)
    found = run_workers(
        lambda: (here in sys.path, len(ping_pong(cpu, (2**10,), 1))), [(), ()], users_modules=False
    )  # as a link is measured
    assert found == [(False, 1)] * 2
    assert not (folder_of_intruders / "ran").exists()


@pytest.mark.fresh_processes
def test_workers_find_the_users_modules_and_start_without_them(folder_of_intruders: Path) -> None:
    """What a worker itself is made of comes before the user's folder does; then it finds what its parent finds."""
    users_own = importlib.import_module("users_own")
    try:
        assert run_workers(users_own.answer, [(0,)]) == [42]
    finally:
        del sys.modules["users_own"]
    assert not (folder_of_intruders / "ran").exists()


ENDS = """
import atexit, ctypes, os, sys, threading, time, warnings
from profiler.machine.workers import run_workers

def say(words):
    sys.stdout.write(f"{words} of rank {os.environ['RANK']}\\n")

def last(folder):
    time.sleep(0.3)
    with open(f"{folder}/{os.environ['RANK']}", "w") as file:
        file.write("exit function")
    say("exit function")

def work(how, folder):
    atexit.register(last, folder)
    say("print")
    sys.stdout.write("no end of line, ")
    ctypes.CDLL(None).puts(f"C of rank {os.environ['RANK']}".encode())
    threading.Thread(target=lambda: (time.sleep(0.3), say("thread"))).start()
    globals()["held"] = open(f"{folder}/held-{os.environ['RANK']}", "w")
    held.write("never closed")
    if os.environ["RANK"] == "1" or how == "large":
        if how == "raise":
            raise KeyError("the first cause")
        return b"0" * 2**24 if how == "large" else how
    if how == "raise":
        time.sleep(60)  # a rank that is not told of the failure
    return how

print("before")
try:
    print([len(result) for result in run_workers(work, [(sys.argv[1], sys.argv[2])] * 2)])
except BaseException as problem:
    print(str(problem).partition("\\n")[0])
print("after")
"""


@pytest.mark.parametrize(("how", "to"), [("return", "file"), ("large", "pipe"), ("raise", "pipe")])
def test_workers_end_as_python_ends(tmp_path: Path, how: str, to: str) -> None:
    """They were killed as soon as they had reported: where Python buffers, 0 of 6 printed lines arrived.

    Nor did an exit function of 0.3 s come to its end, as experiment trackers have, or what threads still printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", ENDS, how, str(tmp_path)],
            env=environment,
            stdout=output if to == "file" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        output.seek(0)
        said = done.stdout if to == "pipe" else output.read()
    assert done.stderr == ""
    lines = said.splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    result = {"return": "[6, 6]", "large": f"[{2**24}, {2**24}]"}.get(how, "rank 1 of 2 failed: KeyError: 'the first")
    assert lines[-2].startswith(result)
    for rank in range(2):
        for words in ("print", "C", "thread", "exit function"):
            assert said.count(f"{words} of rank {rank}\n") == 1, said
        assert (tmp_path / str(rank)).read_text() == "exit function"
        assert (tmp_path / f"held-{rank}").read_text() == "never closed"
    assert said.count("no end of line, ") == 2


class _Asked(type(io.IOBase)):  # type: ignore[misc]
    """Says when a class of it is asked whether another is its subclass."""

    def __subclasscheck__(cls, other: type) -> bool:
        os.write(2, b"asked\n")
        return bool(super().__subclasscheck__(other))


def _leaves_a_file_open(path: str) -> None:
    file = Path(path).open("w")  # noqa: SIM115
    file.write("never closed")
    globals()["held"] = file, _Asked("Kind", (io.RawIOBase,), {})


def test_the_search_for_open_files_asks_no_abstract_class(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At its end a worker asked `io.IOBase` about each type there is, and that all its subclasses, users' ones too.

    Of the 2.1 s from an exception to the end of `launch` on a busy machine this took 1.2 s.
    """
    run_workers(_leaves_a_file_open, [(str(tmp_path / "log"),)])
    assert (tmp_path / "log").read_text() == "never closed"
    assert "asked" not in capfd.readouterr().err


def _never_ends(how: str) -> str:
    """Rank 1 returns and does not end."""
    if dist.get_rank() == 1:
        if how == "exit function":
            atexit.register(threading.Event().wait)
        elif how == "stopped":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            atexit.register(print, "an exit function of rank 1")
            threading.Thread(target=threading.Event().wait).start()
    return how


@pytest.mark.parametrize("how", ["thread", "exit function", "stopped"])
def test_a_worker_that_does_not_end_is_ended_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """Nothing may hang on a worker that has done its work; its exit functions still run if it can be interrupted."""
    monkeypatch.setattr(ending, "SECONDS_TO_END", 3.0)
    with pytest.warns(UserWarning, match=r"rank 1 of 2 had reported .* not ended 3 s later, so it was ended"):
        assert run_workers(_never_ends, [(how,)] * 2) == [how] * 2
    if how == "thread":
        assert "an exit function of rank 1\n" in capfd.readouterr().out


def _crashes_at_exit(_: int) -> int:
    if dist.get_rank() == 1:
        atexit.register(os._exit, 3)
    return 0


def test_a_worker_that_ends_badly_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"rank 1 of 2 had reported .* then exited with code 3, in an exit function"):
        assert run_workers(_crashes_at_exit, [(0,)] * 2) == [0, 0]


def _notes_threads(path: str) -> None:
    """Which threads there are after the last exit function; the names of gloo's end in `loop`."""
    importlib.import_module("torch.distributed.nn")
    leave = worker_main.leave_group  # type: ignore[attr-defined]

    def left() -> None:
        leave()
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        Path(f"{path}-{dist.is_initialized()}").write_text(" ".join(names))

    worker_main.leave_group = left  # type: ignore[attr-defined]
    atexit.register(dist.barrier)  # exit functions may still use the group


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not listed here")
def test_no_thread_of_gloo_is_left_when_python_ends(tmp_path: Path) -> None:
    """One that let go of a tensor while Python ended took the worker with it: 'terminate called without ...'."""
    run_workers(_notes_threads, [(str(tmp_path / f"{rank}"),) for rank in range(2)])
    for rank in range(2):
        names = (tmp_path / f"{rank}-False").read_text().split()
        assert names and not [name for name in names if name.endswith("loop")]


def _has_many_groups(_: int) -> int:
    worker_main.SECONDS_TO_LEAVE = worker_main.SECONDS_TO_LEAVE_EACH = 0.0  # as if they took long
    for _ in range(30):
        dist.barrier(dist.new_group([0, 1]))
    return dist.get_rank()


@pytest.mark.fresh_processes
def test_a_worker_ends_well_while_it_still_leaves_its_groups() -> None:
    """After 30 pipelines with replicas in one launch each worker ended with SIGABRT."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_workers(_has_many_groups, [(0,)] * 2) == [0, 1]


def _ends_at_once(_: int) -> int:
    atexit.register(os._exit, 0)
    return dist.get_rank()


def test_workers_may_end_before_others_have_begun() -> None:
    """Of six ranks that do nothing, some were gone while others still connected: 8 of 20 runs failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of whoever ends before its exit functions
        for _ in range(5):
            assert run_workers(_ends_at_once, [(0,)] * 6) == [*range(6)]


def _exits(code: int) -> None:
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(code)


def test_a_worker_that_exits_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent waited without end for the thread of a worker that had called sys.exit."""
    monkeypatch.setattr(ending, "SECONDS_TO_END", 0.5)
    with warnings.catch_warnings(record=True), pytest.raises(ExecutionError, match="SystemExit: 7"):
        warnings.simplefilter("always")
        run_workers(_exits, [(7,)])


def _forks_and_terminates(_: int) -> int | None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the signal is there before the fork first runs
    process = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    process.start()
    process.terminate()
    process.join(20.0)
    code = process.exitcode
    process.kill()
    return code


def test_forks_end_when_they_are_terminated() -> None:
    """They do not inherit that a worker ends with its exit functions when it is asked to. One that was terminated right
    after its start went on without end: Python drops the signals that a fork has noted before it is ready."""
    assert run_workers(_forks_and_terminates, [(0,)]) == [-signal.SIGTERM]


class _OddError(Exception):
    """One that cannot be made again from its text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _LongError(ValueError):
    """One that is long."""


def _raises(how: str) -> None:
    if how == "plain":
        raise ValueError("no luck")
    if how == "odd":
        raise _OddError("no luck", 3)
    raise _LongError("no luck" * 2**20)


@pytest.mark.parametrize(("how", "cause"), [("plain", ValueError), ("odd", None), ("long", None)])
def test_the_cause_of_an_error_is_the_workers_own_exception(how: str, cause: type[Exception] | None) -> None:
    with pytest.raises(ExecutionError, match="no luck") as caught:
        run_workers(_raises, [(how,)])
    found = caught.value.__cause__
    assert found is None if cause is None else (type(found), str(found)) == (cause, "no luck")
