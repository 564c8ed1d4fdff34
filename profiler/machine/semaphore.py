"""A semaphore of the C library in memory that two processes share: one posts, the other waits.

A wait first looks again and again for a moment: to wake up a process that sleeps takes 35 to 45 us, and what comes
within `LOOK_S` is seen 2 us later [measured]. It does so only where its core is its own, and offers it to whoever else
waits for it. Then it sleeps, so that nothing takes a core from one that computes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time

SIZE_BYTES = 64  # room for a `sem_t`: 32 bytes on Linux, and no other data in its line of the cache
LOOK_S = 200e-6  # passes of a tiny model take less
_SLEEP_S = 0.25  # after which a sleeper looks whether it has been ended, or Python wants to handle a signal


class EndedError(Exception):
    """A wait was ended from another thread."""


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Library:
    """Functions of the C library; all but the one that sleeps keep Python's lock, since they return at once."""

    def __init__(self) -> None:
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        self.initialize, self.post, self.try_wait = quick.sem_init, quick.sem_post, quick.sem_trywait
        self.wait_until = slow.sem_timedwait
        self.initialize.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post.argtypes = self.try_wait.argtypes = (ctypes.c_void_p,)
        self.wait_until.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Moment))


_library = _Library() if sys.platform == "linux" else None


class Semaphore:
    """One end of a semaphore.

    Args:
        address: of its memory in this process.
        is_new: whether this end makes it, at 0; the other end must not use it before.
        looks: whether a wait looks for a moment before it sleeps.

    Raises:
        OSError: the system has no such semaphores.
    """

    def __init__(self, address: int, *, is_new: bool, looks: bool) -> None:
        if _library is None:
            raise OSError(errno.ENOSYS, "semaphores between processes are used on Linux only")
        self._address = address
        self._looks = looks
        self._ended = False
        self._post, self._try_wait, self._wait_until = _library.post, _library.try_wait, _library.wait_until
        if is_new and _library.initialize(address, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore between processes cannot be made")

    def post(self) -> None:
        """Let one wait go on."""
        self._post(self._address)

    def wait(self) -> None:
        """Wait for one `post`.

        Raises:
            EndedError: `end` was called.
        """
        if self._try_wait(self._address) and not (self._looks and self._looked()):
            self._sleep()
        if self._ended:
            raise EndedError("the wait for another process was ended")

    def end(self) -> None:
        """End the wait that another thread of this process is in, and all later ones."""
        self._ended = True
        self.post()

    def _looked(self) -> bool:
        """Whether a post came while this looked for it."""
        end_s = time.perf_counter() + LOOK_S
        while time.perf_counter() < end_s:
            if not self._try_wait(self._address):
                return True
            os.sched_yield()
        return False

    def _sleep(self) -> None:
        while not self._ended:
            until = time.time() + _SLEEP_S
            moment = _Moment(int(until), int(until % 1 * 1e9))
            if not self._wait_until(self._address, ctypes.byref(moment)):
                return
            code = ctypes.get_errno()
            if code not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, f"a wait for another process failed: {os.strerror(code)}")
