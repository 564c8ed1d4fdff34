"""A connection between every two ranks for short messages, in addition to the process groups that carry tensors.

The system closes a connection when the process at its other end ends, however it ends: so each rank learns of the
death of any other within milliseconds, also while it waits for something else.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from executor.connect.door import knock, let_in, new_key, open_door

Notice = dict[str, Any]  # what ranks tell each other beyond tensors
_CHUNK_BYTES = 65536
_BACKLOG_BYTES = 65536  # of heartbeats that a stopped rank does not read; later ones are dropped


@dataclass(slots=True)
class _Line:
    connection: socket.socket
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)


class Mesh:
    """The connections of one rank. `post` may be called from any thread, `poll` from one only.

    Args:
        rank: of this process.
        world_size: number of ranks; all of them construct their mesh at the same time.
        about: what this rank tells the others of itself.
        timeout_s: for the others to connect.

    Attributes:
        about: what each rank has told, in their order.
    """

    def __init__(self, rank: int, world_size: int, about: object, *, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        connected, self.about = _connected(rank, world_size, about, timeout_s)
        self._lines = {other: _Line(line) for other, line in connected.items()}
        for other, line in self._lines.items():
            line.connection.setblocking(False)
            line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(line.connection, selectors.EVENT_READ, other)
        self.closing = False
        self._alarm, self._alarmed = socket.socketpair()
        self._alarmed.setblocking(False)
        self._selector.register(self._alarmed, selectors.EVENT_READ, None)
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def post(self, message: Notice, *, droppable: bool = False) -> None:
        """Send a message to all other ranks without waiting; what does not fit into the system's buffers goes later.

        Args:
            message: what JSON can hold.
            droppable: leave it out where many messages wait already.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for line in self._lines.values():
                if not droppable or len(line.outgoing) < _BACKLOG_BYTES:
                    line.outgoing += data
                    _flush(line)

    def poll(self, timeout_s: float) -> list[tuple[int, Notice | None]]:
        """Messages that have come, with their sender's rank; None when a rank has closed its end.

        Waits until there is one, `wake` is called or the time is over.
        """
        heard: list[tuple[int, Notice | None]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._alarmed.recv(_CHUNK_BYTES)
            else:
                heard += self._read(key.data)
        with self._lock:
            for line in self._lines.values():
                _flush(line)
        return heard

    def wake(self) -> None:
        """Let `poll` return."""
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")

    def close(self) -> None:
        """Close all connections; nobody may be in `poll`."""
        with self._lock:
            for line in self._lines.values():
                line.connection.close()
            self._lines.clear()
        self._selector.close()
        self._alarm.close()
        self._alarmed.close()

    def disown(self) -> None:
        """In a fork of this process (a worker that loads data): close what would outlive the death of this one."""
        for line in self._lines.values():
            line.connection.close()

    def _read(self, other: int) -> list[tuple[int, Notice | None]]:
        line = self._lines[other]
        ended = False
        while True:
            try:
                data = line.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            line.incoming += data
        *whole, rest = line.incoming.split(b"\n")
        line.incoming = bytearray(rest)
        heard: list[tuple[int, Notice | None]] = [(other, json.loads(text)) for text in whole]
        if ended:
            self._selector.unregister(line.connection)
            heard.append((other, None))
        return heard


def _leave_to_parent(reference: weakref.ref[Mesh]) -> None:
    mesh = reference()
    if mesh is not None:
        mesh.disown()


def _flush(line: _Line) -> None:
    """Hand over to the system what it takes."""
    try:
        while line.outgoing:
            del line.outgoing[: line.connection.send(line.outgoing)]
    except BlockingIOError:
        pass
    except OSError:
        line.outgoing.clear()  # the other end is gone, which `poll` reports


def _connected(
    rank: int, world_size: int, about: object, timeout_s: float
) -> tuple[dict[int, socket.socket], list[Any]]:
    """A socket to each other rank, and what all ranks tell; each knocks at those before it, and lets the others in."""
    host = _own_address()
    key = new_key()
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as on_failure, open_door(host) as door:
        addresses: list[Any] = [None] * world_size
        dist.all_gather_object(addresses, (host, door.getsockname()[1], key, about))
        for other in range(rank):
            other_host, port, other_key, _ = addresses[other]
            line = knock((other_host, port), other_key, rank, timeout_s=timeout_s)
            found[other] = on_failure.enter_context(line)
        found |= let_in(door, key, range(rank + 1, world_size), timeout_s=timeout_s)
        on_failure.pop_all()
    return found, [told for *_, told in addresses]


def _own_address() -> str:
    """Address of this machine as the rank that the others meet at sees it; loopback if all are on one machine."""
    meeting_point = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(meeting_point, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
