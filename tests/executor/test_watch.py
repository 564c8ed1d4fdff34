"""One error in one form: who tells it, and how it is printed. Whole runs with faults are in test_faults.py."""

import io
import sys
import threading

import pytest

from executor import blame
from executor import watch as watching
from executor.mesh import Message
from executor.position import Phase
from executor.watch import Watch
from planner import ExecutionError

ENDED: list[tuple[int, Message | None]] = [(2, {"finished": 0}), (2, None)]  # rank 2 without a call
ECHO = "Connection closed by peer"  # what a wait of gloo raises then


class Posted:
    """A mesh of three that nobody else is at; holds what its rank tells."""

    about = (None,) * 3
    closing = False

    def __init__(self) -> None:
        self.causes: list[Message] = []
        self._end = threading.Event()

    def post(self, message: Message, *, droppable: bool = False) -> None:
        self.causes += [message["cause"]] if "cause" in message else []

    def poll(self, timeout_s: float) -> list[tuple[int, Message | None]]:
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
