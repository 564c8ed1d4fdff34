"""Who may come in when the ranks connect, and that nobody else keeps them waiting."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.connect import door as doors
from executor.connect.door import knock, let_in, new_key, open_door

FOR_EVER_S = 60.0  # a test that takes as long has failed


class Stranger:
    """Connects and says something in pieces; never leaves by itself."""

    def __init__(self, address: tuple[str, int], *pieces: bytes) -> None:
        self.line = socket.create_connection(address)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, args=(pieces,))
        self._thread.start()

    def _speak(self, pieces: tuple[bytes, ...]) -> None:
        with contextlib.suppress(OSError):  # it was shown out
            for piece in pieces:
                self.line.sendall(piece)
                if self._over.wait(0.05):
                    return

    def leave(self, *, abruptly: bool = False) -> None:
        if abruptly:
            self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._over.set()
        self._thread.join(FOR_EVER_S)
        self.line.close()


KINDS = {
    "silent": (),
    "garbage": (b"GET / HTTP/1.1\r\nHost: localhost:29500\r\nAccept: */*\r\n\r\n",),
    "huge": (b"x" * 2**22,),
    "slow": (b"0",) * 100,
    "no number": (b"0" * 32 + b" abcdefgh",),
}


@contextlib.contextmanager
def strangers(address: tuple[str, int], kinds: list[str]) -> Iterator[None]:
    there = [Stranger(address, *KINDS[kind]) for kind in kinds]
    try:
        yield
    finally:
        for number, stranger in enumerate(there):
            stranger.leave(abruptly=number % 2 == 0)


def ranks_come_in(before: list[str], between: list[str]) -> None:
    """Ranks 1 and 2 knock at rank 0, strangers before them and between them."""
    key = new_key()
    with open_door("127.0.0.1") as door, contextlib.ExitStack() as lines:
        address = door.getsockname()
        inside: dict[int, socket.socket] = {}
        host = threading.Thread(target=lambda: inside.update(let_in(door, key, [1, 2], timeout_s=FOR_EVER_S)))
        with strangers(address, before):
            host.start()
            first = lines.enter_context(knock(address, key, 1, timeout_s=FOR_EVER_S))
            with strangers(address, between):
                second = lines.enter_context(knock(address, key, 2, timeout_s=FOR_EVER_S))
                host.join(FOR_EVER_S)
        for rank, line in ((1, first), (2, second)):
            inside[rank].setblocking(True)
            inside[rank].sendall(b"hello")
            assert line.recv(5, socket.MSG_WAITALL) == b"hello"
            inside[rank].close()


@settings(max_examples=15)
@given(st.lists(st.sampled_from(list(KINDS)), max_size=8), st.lists(st.sampled_from(list(KINDS)), max_size=8))
def test_strangers_do_not_keep_ranks_waiting(before: list[str], between: list[str]) -> None:
    """One that connected and said nothing was listened to for the whole time-out, and the ranks behind it gave up."""
    ranks_come_in(before, between)


def test_not_even_more_of_them_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_MOST_CALLERS", 4)
    ranks_come_in(["silent"] * 30, ["slow"] * 10)


def test_who_does_not_greet_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "GREETING_S", 0.2)
    with open_door("127.0.0.1") as door:
        told = "rank 1, 2 has not connected to 127.0.0.1 .* 2 others have, without the key"
        silent = Stranger(door.getsockname())
        others = [Stranger(door.getsockname(), *KINDS[kind]) for kind in ("garbage", "no number")]
        with pytest.raises(TimeoutError, match=told):
            let_in(door, new_key(), [1, 2], timeout_s=0.5)
        for stranger in (silent, *others):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.line.recv(1) == b""
            stranger.leave()


def test_a_rank_that_was_shown_out_knocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped for seconds between connecting and greeting must not cost the whole run."""
    key = new_key()
    greet = doors._greeting
    late = iter([b"", greet(key, 1)])
    with open_door("127.0.0.1") as door:
        monkeypatch.setattr(doors, "GREETING_S", 0.1)
        monkeypatch.setattr(doors, "_greeting", lambda *told: greet(*told) if told[1] == 0 else next(late))
        inside: dict[int, socket.socket] = {}
        host = threading.Thread(target=lambda: inside.update(let_in(door, key, [1], timeout_s=FOR_EVER_S)))
        host.start()
        with knock(door.getsockname(), key, 1, timeout_s=FOR_EVER_S):
            host.join(FOR_EVER_S)
        inside[1].close()


def test_a_rank_that_nobody_lets_in_gives_up() -> None:
    with open_door("127.0.0.1") as door, pytest.raises(TimeoutError, match=r"the rank at 127\.0\.0\.1 port \d+: timed"):
        knock(door.getsockname(), new_key(), 1, timeout_s=0.2)
