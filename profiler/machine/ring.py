"""Messages from one process to another of this machine, through memory that both have: copied in, and copied out.

    sender   | room -> copies ... | send                          room: waits while `most` messages are under way
    receiver |                      arrived -> copies ... | release

One page of control, and slots of memory that hold one message each. Slots are made when the first message comes, in
memory of their own; a longer one gets new slots, and the receiver finds them by what is noted of each message:

    page     key | semaphore: arrived | semaphore: released | notes: tag, file of the slots, their bytes, which slot
    slots    |------- 0 -------|------- 1 -------|------- 2 -------|

The memory has no name (`memfd_create`): nothing is left when both processes have ended, however they end, and the size
of /dev/shm does not matter. It is allocated as a whole, so that a lack of it is an error and not the end of a process.
The other end opens it by the process and descriptor of its owner, and a key shows that it is the one meant.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import struct
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from profiler.errors import ExecutionError
from profiler.machine.descriptors import open_of_another
from profiler.machine.semaphore import SIZE_BYTES, Semaphore

ALIGNMENT = 64
"""Bytes: a line of the cache, enough for all kinds of elements, and where torch's own memory begins."""
MOST_SLOTS = 64
_KEY = struct.Struct("<q")
_NOTE = struct.Struct("<4q")  # tag, descriptor of the slots, bytes of a slot, number of the slot
_ARRIVED, _RELEASED = SIZE_BYTES, 2 * SIZE_BYTES
_NOTES = 3 * SIZE_BYTES
_PAGE_BYTES = 4096
_NEVER = 2**62  # no ring carries as many messages

Address = tuple[int, int, int]  # process, its descriptor of the page, and the key that the page begins with


def aligned(size_bytes: int) -> int:
    """The bytes of a value and of what fills them up to where the next one may begin."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one message at a time.

    Attributes:
        memory: its bytes.
        views: of its memory, by what the user of the ring tells forms of messages apart with.
    """

    memory: Tensor
    views: dict[object, list[Tensor]] = field(default_factory=dict)


class Outgoing:
    """The sender's end of a ring, which owns its memory.

    Args:
        at_least: how many messages may be under way, however long they are.
        ahead_bytes: of short messages as many as these hold, up to `MOST_SLOTS`.
        looks: whether waits look for a moment before they sleep.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, at_least: int, ahead_bytes: int, *, looks: bool) -> None:
        self._at_least = at_least
        self._ahead_bytes = ahead_bytes
        key = secrets.randbits(62) + 1
        page = _memory("page", _PAGE_BYTES)
        # Slots that the receiver may still have to open, each with the message whose room shows that it has not.
        self._files: dict[int, int] = {}
        weakref.finalize(self, os.close, page)
        weakref.finalize(self, _close, self._files)
        self._page = mmap.mmap(page, _PAGE_BYTES)
        _KEY.pack_into(self._page, 0, key)
        start = _start_of(self._page)
        self._arrived = Semaphore(start + _ARRIVED, is_new=True, looks=looks)
        self._released = Semaphore(start + _RELEASED, is_new=True, looks=looks)
        self.address: Address = (os.getpid(), page, key)
        self._slots: list[Slot] = []
        self._slot_bytes = -1
        self._most = 0
        self._count = 0
        self._file = -1
        self._first = 0  # of the messages in these slots
        self._settled = True

    def room(self, size_bytes: int, most: int = MOST_SLOTS) -> Slot:
        """The slot of the next message; waits while too many are under way.

        Args:
            size_bytes: of the message.
            most: no more like it are ever under way, so there are no more slots, also where there were before.

        Raises:
            ExecutionError: there is no memory for messages as long as this one.
            EndedError: `end` was called.
        """
        if size_bytes > self._slot_bytes or most != self._most:
            self._make_slots(size_bytes, most)
        self._released.wait()
        if len(self._files) > 1:
            _close(self._files, before=self._count)
        return self._slots[(self._count - self._first) % len(self._slots)]

    def send(self, tag: int) -> None:
        """Let the receiver have what was copied into the slot."""
        number = (self._count - self._first) % len(self._slots)
        note = _NOTES + self._count % MOST_SLOTS * _NOTE.size
        _NOTE.pack_into(self._page, note, tag, self._file, self._slot_bytes, number)
        self._count += 1
        self._arrived.post()

    def settle(self) -> None:
        """Wait until the receiver has opened the slots, if a message lies there: it cannot when this process has ended.

        Raises:
            EndedError: `end` was called.
        """
        sent = self._count - self._first
        if self._settled or not sent:
            return
        released = range(len(self._slots) - sent + 1)  # as many are, when one of the messages in these slots was
        for _ in released:
            self._released.wait()
        for _ in released:
            self._released.post()
        self._settled = True

    @property
    def size_bytes(self) -> int:
        """What its slots take."""
        return max(self._slot_bytes, 0) * len(self._slots)

    def end(self) -> None:
        """End a wait of another thread of this process."""
        self._released.end()

    def _make_slots(self, size_bytes: int, most: int) -> None:
        """New slots for longer or more messages; those of messages under way stay where they are."""
        slot_bytes = max(self._slot_bytes, aligned(max(size_bytes, 1)))
        count = min(max(self._at_least, self._ahead_bytes // slot_bytes), most, MOST_SLOTS)
        self._most = most
        if (slot_bytes, count) == (self._slot_bytes, len(self._slots)):
            return
        try:
            file = _memory("slots", count * slot_bytes)
        except OSError as problem:
            raise ExecutionError(
                f"{count} messages of {size_bytes} bytes to another process need {count * slot_bytes} bytes of shared "
                f"memory, which this machine does not give ({problem.strerror}); make room, plan with smaller "
                'micro-batches, or send over sockets with Pipeline(..., transport="gloo")'
            ) from problem
        if self._slots:
            self._files[self._file] = self._count + count  # then the first message of the new ones is released
        self._files[file] = _NEVER
        for _ in range(count - len(self._slots)):
            self._released.post()
        for _ in range(len(self._slots) - count):
            self._released.wait()
        self._slots, self._slot_bytes = _slots_of(file, slot_bytes, count), slot_bytes
        self._file, self._first, self._settled = file, self._count, False


class Incoming:
    """The receiver's end of a ring.

    Args:
        address: of the sender's.
        looks: whether waits look for a moment before they sleep.

    Raises:
        OSError: the system does not let this process open it, or it is on another machine.
    """

    def __init__(self, address: Address, *, looks: bool) -> None:
        self._owner, descriptor, key = address
        page = open_of_another(self._owner, descriptor, _PAGE_BYTES, os.O_RDWR)
        try:
            self._page = mmap.mmap(page, _PAGE_BYTES)
        finally:
            os.close(page)
        if _KEY.unpack_from(self._page, 0)[0] != key:
            raise FileNotFoundError(f"process {self._owner} here is another one than was meant")
        start = _start_of(self._page)
        self._arrived = Semaphore(start + _ARRIVED, is_new=False, looks=looks)
        self._released = Semaphore(start + _RELEASED, is_new=False, looks=looks)
        self._slots: list[Slot] = []
        self._place = (-1, -1)  # file and bytes of the slots
        self._count = 0

    def arrived(self, tag: int) -> Slot:
        """The slot of the next message, which has this tag; waits for it.

        Raises:
            ExecutionError: the memory that the sender made for it cannot be had.
            EndedError: `end` was called.
        """
        self._arrived.wait()
        note = _NOTES + self._count % MOST_SLOTS * _NOTE.size
        sent, file, slot_bytes, number = _NOTE.unpack_from(self._page, note)
        assert sent == tag, f"message {sent} came in the place of {tag}"
        self._count += 1
        if self._place != (file, slot_bytes):
            self._open(file, slot_bytes)
        slot: Slot = self._slots[number]
        return slot

    def release(self) -> None:
        """Let the sender have the slot back."""
        self._released.post()

    def end(self) -> None:
        """End a wait of another thread of this process."""
        self._arrived.end()

    def _open(self, file: int, slot_bytes: int) -> None:
        try:
            opened = open_of_another(self._owner, file, slot_bytes, os.O_RDWR)
            try:
                self._slots = _slots_of(opened, slot_bytes, os.fstat(opened).st_size // slot_bytes)
            finally:
                os.close(opened)
        except OSError as problem:
            raise ExecutionError(
                f"the memory for messages of {slot_bytes} bytes from process {self._owner} cannot be opened "
                f'({problem}); send over sockets with Pipeline(..., transport="gloo")'
            ) from problem
        self._place = file, slot_bytes


def _memory(name: str, size_bytes: int) -> int:
    """Descriptor of shared memory, all of which there is."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no shared memory without a name")
    descriptor = os.memfd_create(f"gpipe-autoplan-{name}")
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _slots_of(file: int, slot_bytes: int, count: int) -> list[Slot]:
    memory = torch.frombuffer(mmap.mmap(file, count * slot_bytes), dtype=torch.uint8)
    return [Slot(one) for one in memory.split(slot_bytes)]


def _start_of(page: mmap.mmap) -> int:
    """Its address in this process; the page stays mapped for as long as somebody has it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def _close(files: dict[int, int], before: int = _NEVER) -> None:
    for descriptor in [file for file, until in files.items() if until <= before]:
        del files[descriptor]
        os.close(descriptor)
