"""One error in one form: who tells it, and how it is printed. Whole runs with faults are in test_faults.py."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.connect.mesh import Notice
from executor.watch import accusation as blame
from executor.watch import watch as watching
from executor.watch.position import Phase
from executor.watch.watch import Watch
from executor.world import TIMEOUT_VARIABLE
from planner import ExecutionError, Plan
from profiler.machine.workers import KEEP_FREED_MEMORY
from tests.executor.fault_trials import free_port, plan_of

ENDED: list[tuple[int, Notice | None]] = [(2, {"finished": 0}), (2, None)]  # rank 2 without a call
ECHO = "Connection closed by peer"  # what a wait of gloo raises then


class Posted:
    """A mesh of three that nobody else is at; holds what its rank tells."""

    about = (None,) * 3
    closing = False

    def __init__(self) -> None:
        self.causes: list[Notice] = []
        self._end = threading.Event()

    def post(self, message: Notice, *, droppable: bool = False) -> None:
        self.causes += [message["cause"]] if "cause" in message else []

    def poll(self, timeout_s: float) -> list[tuple[int, Notice | None]]:
        self._end.wait()
        return []

    def wake(self) -> None:
        if self.closing:
            self._end.set()

    def close(self) -> None:
        pass


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Posted:
    mesh = Posted()
    monkeypatch.setattr(watching, "Mesh", lambda *_, **__: mesh)
    monkeypatch.setattr(watching, "_journal_at", lambda _: None)
    monkeypatch.setattr(Watch, "_end_waits", lambda _: None)  # the test raises what waits would
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return mesh


def test_the_first_rank_tells_what_all_notice_at_once(mesh: Posted) -> None:
    watch = Watch(0, 3, timeout_s=60)
    told = r"rank 2 of 3 failed: it ended .* rank 0 makes a call more"
    with pytest.raises(ExecutionError, match=told), watch.call(Phase.NORM):
        watch.turn(ENDED)
        raise RuntimeError(ECHO)
    assert [cause["rank"] for cause in mesh.causes] == [2]


def test_the_others_repeat_it(mesh: Posted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each told it with its own number and place, so that two ranks could end with two errors."""
    monkeypatch.setattr(blame, "TURN_S", 60.0)
    monkeypatch.setattr(blame, "LONGEST_TURN_S", 60.0)
    watch = Watch(1, 3, timeout_s=60)
    with pytest.raises(ExecutionError, match=r"^as rank 0 tells it$"), watch.call(Phase.NORM):
        watch.turn(ENDED)
        watch.turn([(0, {"cause": {"text": "as rank 0 tells it", "error": "ExecutionError", "rank": 2}})])
        raise RuntimeError(ECHO)
    assert mesh.causes == []


def test_a_rank_whose_turn_it_is_speaks_when_those_before_are_silent(
    mesh: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "TURN_S", 0.0)
    watch = Watch(1, 3, timeout_s=60)
    told = r"rank 1 makes a call more: step 0, in clip_grad_norm_"
    with pytest.raises(ExecutionError, match=told), watch.call(Phase.NORM):
        assert watch.turn([])
        assert not watch.turn(ENDED)
        raise RuntimeError(ECHO)


def test_an_error_is_printed_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python does not buffer, as under torchrun, another thread's traceback came before the end of the line."""
    pieces: list[str] = []

    class Unbuffered(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Unbuffered())
    watching._say("rank 1 of 3 failed")
    assert pieces == ["rank 1 of 3 failed\n"]


def test_its_own_failure_is_a_cause_like_any_other(mesh: Posted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread ended in silence: nobody noticed from then on that a rank was gone or stuck."""
    watched = threading.Event()

    def broken(_: float) -> list[tuple[int, Notice | None]]:
        watched.wait()
        raise OSError("somebody has closed the descriptor")

    monkeypatch.setattr(mesh, "poll", broken)
    watch = Watch(0, 3, timeout_s=60)
    told = r"^rank 0 of 3 failed: watching over the other ranks: OSError: somebody has closed the descriptor$"
    with pytest.raises(ExecutionError, match=told), watch.call(Phase.NORM):
        watched.set()
        with watch._changed:
            assert watch._changed.wait_for(lambda: watch._cause is not None, 60)
        raise RuntimeError(ECHO)
    assert [cause["rank"] for cause in mesh.causes] == [0]


class Stalled(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        threading.Event().wait()
        return len(text)


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space left on device")


@pytest.mark.parametrize("stream", [None, Full(), Stalled()], ids=["closed", "full", "stalled"])
def test_it_speaks_without_being_heard(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    watching._say("rank 1 of 3 failed")


SCRIPT = """
import sys, time
from executor import Pipeline
from planner import Plan
from tests.executor.fault_trials import Deep, X

def loss_fn(output, target):
    if pipe.steps == 1:
        time.sleep(1e6)  # nothing interrupts it
    return (output - target).square().mean()

pipe = Pipeline(Deep(), Plan.load(sys.argv[1]), loss_fn=loss_fn)
try:
    for step in range(3):
        pipe.step(X, target=X)
except Exception as problem:
    with open(sys.argv[2], "w") as file:
        file.write(str(problem))
    raise
"""


def test_no_output_disables_it(
    plan_for: Callable[..., Plan],
    start_fork: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a closed standard error the watching thread died of its message, and the ranks waited without end.

    Of three ranks one has it closed, one has a full disk, and the last, which is stuck, a pipe that nobody reads.
    """
    plan_of(plan_for, 3).save(tmp_path / "plan.json")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    read, written = os.pipe()
    os.set_blocking(written, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(written, b"x" * 4096)
    os.set_blocking(written, True)
    variables = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "none",  # then a rank says its error at once, from the watching thread
        TIMEOUT_VARIABLE: "3",
    }
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": "1", **variables}
    ranks: list[Any] = [
        subprocess.Popen(
            ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", SCRIPT, "plan.json", "error-0"],
            env={**environment, "PYTHONPATH": path, "RANK": "0"},
        )
    ]
    with Path("/dev/full").open("w") as full:
        for rank, stderr in ((1, full.fileno()), (2, written)):
            ranks.append(
                start_fork(
                    str(script),
                    "plan.json",
                    f"error-{rank}",
                    environment={**environment, "RANK": str(rank)},
                    output=(1, stderr),
                    search_path=path.split(os.pathsep),
                )
            )
    try:
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        os.close(read)
        os.close(written)
    assert all(codes)
    errors = {(tmp_path / f"error-{rank}").read_text() for rank in range(2)}
    assert len(errors) == 1 and errors.pop().startswith("rank 2 of 3 failed: it has been at step 1, stage 2")
