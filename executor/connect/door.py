"""The door of a rank, while the ranks connect: who knows its key comes in, nobody else keeps anybody waiting.

    a rank       | connects, greets |                                      it is let in, and told so
    a stranger   | connects ........................ |                     shown out when the time to greet is over
    another      | connects, x .... x .... x ....... |                     likewise, however slowly it speaks
    a third      | connects, xxxxxxxx |                                    shown out: not the key

All wait side by side. A rank that was shown out, since it was stopped before it had greeted, knocks again.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

GREETING_S = 1.5  # a rank greets as soon as it is connected, within a round trip
KNOCK_AGAIN_S = 0.1
_BACKLOG = 1024  # of callers that the system holds until they are looked at: a few strangers must not fill it
_MOST_CALLERS = 128  # that may be about to greet; the one that has waited longest makes place for another
_WELCOME = b"+"
_KEY_CHARACTERS = 32


def new_key() -> str:
    """A key that nobody guesses."""
    return secrets.token_hex(_KEY_CHARACTERS // 2)


def open_door(host: str) -> socket.socket:
    """A socket that listens at one address of this machine, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), backlog=_BACKLOG, family=family)


def knock(address: tuple[str, int], key: str, rank: int, *, timeout_s: float) -> socket.socket:
    """Connect to another rank and wait until it lets this one in.

    Args:
        address: host and port of its door.
        key: of its door.
        rank: of this process.
        timeout_s: how long to try.

    Raises:
        OSError: it cannot be reached, or did not answer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        with contextlib.ExitStack() as on_failure:
            try:
                line = on_failure.enter_context(socket.create_connection(address, timeout=max(left_s, KNOCK_AGAIN_S)))
                line.sendall(_greeting(key, rank))
                if line.recv(1) == _WELCOME:
                    on_failure.pop_all()
                    return line
            except (ConnectionResetError, BrokenPipeError):
                pass  # shown out
            except OSError as problem:
                raise type(problem)(f"the rank at {address[0]} port {address[1]}: {problem}") from problem
        if left_s <= 0:
            raise TimeoutError(
                f"the rank at {address[0]} port {address[1]} has not let this one in for {timeout_s:.0f} s"
            )
        time.sleep(KNOCK_AGAIN_S)


def let_in(door: socket.socket, key: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, socket.socket]:
    """Wait at the door until all of these ranks have come in.

    Args:
        door: of `open_door`.
        key: of this door.
        ranks: that are to come.
        timeout_s: how long to wait for the last.

    Raises:
        TimeoutError: somebody has not come.
    """
    deadline = time.monotonic() + timeout_s
    awaited = set(ranks)
    inside: dict[int, socket.socket] = {}
    strangers = 0
    with contextlib.ExitStack() as on_failure, _Hall(door, len(_greeting(key, 0))) as hall:
        on_failure.callback(_close, inside)
        while awaited - inside.keys():
            if time.monotonic() >= deadline:
                missing = ", ".join(str(rank) for rank in sorted(awaited - inside.keys()))
                host, port, *_ = door.getsockname()
                raise TimeoutError(
                    f"rank {missing} has not connected to {host} port {port} for {timeout_s:.0f} s; "
                    f"{strangers} others have, without the key"
                )
            for line, greeting in hall.greetings(deadline):
                rank = _rank_of(greeting, key)
                if rank in awaited and _welcomed(line):
                    inside[rank] = line
                else:
                    strangers += 1
                    line.close()
        on_failure.pop_all()
    return inside


def _close(lines: dict[int, socket.socket]) -> None:
    for line in lines.values():
        line.close()


def _greeting(key: str, rank: int) -> bytes:
    return f"{key} {rank:8d}".encode()


def _rank_of(greeting: bytes, key: str) -> int:
    """The rank that greets; -1 for a stranger."""
    known, number = greeting[:_KEY_CHARACTERS], greeting[_KEY_CHARACTERS:]
    return int(number) if hmac.compare_digest(known, key.encode()) else -1


def _welcomed(line: socket.socket) -> bool:
    """Whether the rank that has just greeted could be told that it is in."""
    try:
        return line.send(_WELCOME) == len(_WELCOME)
    except OSError:
        return False


@dataclass(slots=True)
class _Caller:
    until_s: float
    said: bytearray = field(default_factory=bytearray)


class _Hall:
    """Where callers are until they have greeted or their time is over.

    Args:
        door: at which they connect.
        greeting_bytes: of a whole greeting.
    """

    def __init__(self, door: socket.socket, greeting_bytes: int) -> None:
        self._door = door
        self._greeting_bytes = greeting_bytes
        self._callers: dict[socket.socket, _Caller] = {}  # who has waited longest comes first
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Hall:
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for line in self._callers:
            line.close()

    def greetings(self, deadline: float) -> list[tuple[socket.socket, bytes]]:
        """Wait until something happens, and return the callers that have said as much as a greeting is, and what.

        A caller that has not, in time, or that leaves, is shown out.
        """
        now_s = time.monotonic()
        first_s = min((caller.until_s for caller in self._callers.values()), default=deadline)
        ready = [key.fileobj for key, _ in self._selector.select(max(0.0, min(first_s, deadline) - now_s))]
        whole = []
        for line in list(self._callers):
            if line in ready and self._listen(line):
                whole.append((line, bytes(self._leave(line).said)))
        now_s = time.monotonic()
        for line in [line for line, caller in self._callers.items() if caller.until_s <= now_s]:
            self._show_out(line)
        if self._door in ready:
            self._open(now_s)
        return whole

    def _open(self, now_s: float) -> None:
        """Let all in who wait at the door, as many as the hall holds."""
        for _ in range(_MOST_CALLERS):
            try:
                line, _ = self._door.accept()
            except OSError:  # nobody is left; or a caller has gone, or this process may open no more for now
                return
            line.setblocking(False)
            if len(self._callers) == _MOST_CALLERS:
                self._show_out(next(iter(self._callers)))
            self._callers[line] = _Caller(now_s + GREETING_S)
            self._selector.register(line, selectors.EVENT_READ)

    def _listen(self, line: socket.socket) -> bool:
        """Whether the caller has said all of a greeting; who leaves is shown out."""
        caller = self._callers[line]
        try:
            said = line.recv(self._greeting_bytes - len(caller.said))
        except BlockingIOError:
            return False
        except OSError:
            said = b""
        caller.said += said
        if not said:
            self._show_out(line)
        return len(caller.said) == self._greeting_bytes

    def _leave(self, line: socket.socket) -> _Caller:
        self._selector.unregister(line)
        return self._callers.pop(line)

    def _show_out(self, line: socket.socket) -> None:
        self._leave(line)
        line.close()
