"""Nothing hangs: each rank watches the others, and all end with the first cause of a failure.

A thread next to the training exchanges short messages with all other ranks (`executor.connect.mesh`):

    rank 0   F0 SEND_F0 ... RECV_B3 ~~~~~~~~~~~~~~x  raises "rank 1 of 3 failed: step 7, ... action 1F3: ..."
    rank 1   RECV_F0 F0 ... F3 !                  |  an exception: tells all others, raises
    rank 2   RECV_F0 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~x  raises the same

- A rank that fails tells the others why. A process that ends without a word closes its connections.
- Every rank says four times a second where it is. From that a rank that has waited longer than the time-out tells which
  one is to blame (`executor.watch.accusation`).
- What waits for a message raises (`executor.watch.ending_waits`). A rank that computes instead is ended after a grace,
  its error printed before.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from executor.connect.mesh import Mesh, Notice
from executor.watch.accusation import Blame
from executor.watch.agreement import CALL, Agreement, Given
from executor.watch.contents import Contents
from executor.watch.ending_waits import abort, break_connections, by_abort
from executor.watch.failure import FirstCause, named
from executor.watch.position import Logbook, Phase
from executor.watch.speaking import without_waiting
from profiler.errors import ArgumentError, ExecutionError, PlanError
from profiler.machine.journal import Address, ForeignJournal, journal_of_this_process

BEAT_S = 0.25
GRACE_S = 0.6  # from the first cause until a rank that cannot be interrupted is ended
ECHO_S = 1.0  # within which the cause of a broken connection becomes known
ENDING_ECHO_S = 0.2  # and that of being asked to end, by `launch` for one, which waits half a second for the answer


class Watch:
    """Watches over the calls of one pipeline on one rank.

        watch = Watch(rank, world_size, timeout_s=60)
        with watch.call(Phase.ACTION):
            ...                           # what fails here is raised as the first cause on every rank

    Args:
        rank: of this process.
        world_size: number of ranks; alone, a rank has nobody to watch.
        timeout_s: how long to wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_s: float) -> None:
        self.log = Logbook(journal_of_this_process())
        self._rank = rank
        self._world_size = world_size
        self._cause: FirstCause | None = None
        self._changed = threading.Condition()  # of the cause, or of what other ranks announced
        self._raised = False
        self._aborted = False
        self._caller: int | None = None  # the thread that is inside of a call
        self._agreement = Agreement(rank, world_size)
        self._contents = Contents(rank)
        self._groups: list[dist.ProcessGroup | None] = [None]
        self._interrupts: list[Callable[[], None]] = []
        self._said_s = time.monotonic()  # when this rank last told the others where it is
        self._mesh = _meet(rank, world_size, self.log, timeout_s) if world_size > 1 else None
        about = () if self._mesh is None else self._mesh.about
        journals = {other: _journal_at(address) for other, address in enumerate(about) if other != rank}
        self._blame = Blame(rank, world_size, journals, timeout_s=timeout_s, now_s=time.monotonic())
        if self._mesh is not None:
            self._begin(self._mesh)

    def _begin(self, mesh: Mesh) -> None:
        """Watch over the others, until this rank says goodbye to them."""
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), mesh), daemon=True)
        thread.start()
        goodbye = weakref.finalize(self, _say_goodbye, mesh, self.log, thread)
        # At the exit of Python before all other finalizers: their list must not change while it is read, and the
        # watching thread, inside of torch, may change it.
        goodbye.atexit = False
        atexit.register(goodbye)
        _report_uncaught(self)

    def add_wait(self, interrupt: Callable[[], None]) -> None:
        """Watch over waits of another kind; the call ends them with an exception."""
        self._interrupts.append(interrupt)

    def add_group(self, group: dist.ProcessGroup) -> None:
        """Watch over waits in a further process group that this rank belongs to."""
        self._groups.append(group)

    @contextlib.contextmanager
    def aside(self, phase: Phase) -> Iterator[None]:
        """Between calls this rank alone does something, and the others wait for as long as it takes."""
        self.log.phase(phase)
        try:
            yield
        finally:
            self.log.phase(Phase.OUTSIDE)

    @contextlib.contextmanager
    def call(self, phase: Phase, given: Given | None = None, *, settled: bool = False) -> Iterator[None]:
        """A call that all ranks make together.

        Args:
            phase: that the call begins with.
            given: what all ranks must have been given alike; see `executor.watch.agreement`.
            settled: whether other words keep the ranks together in it; see `Agreement.enter`.

        Raises:
            PlanError: something failed, here or on another rank; the same error everywhere.
            ArgumentError: it is made while another one is under way.
        """
        around = self._enter((given or {}).get(CALL, "a call of the pipeline"))
        self.log.calls += 1
        try:
            self.log.phase(phase)
            self._raise_known()
            if given is not None and self._mesh is not None:
                self._agree(given, settled=settled)
                self.log.phase(phase)
            yield
            self._raise_aborted()
        except BaseException as problem:
            self._conclude(problem)
        finally:
            self.log.phase(Phase.OUTSIDE if around is None else Phase.READING)
            self._caller = around

    def _enter(self, name: str) -> int | None:
        """Let this thread be inside of a call; returns the one that was.

        A loader that a process on its own reads may call the pipeline; nothing is under way then.
        """
        here = threading.get_ident()
        with self._changed:
            around = self._caller
            if around is not None:
                self._refuse_second(name, around != here)
            self._caller = here
        return around

    def _refuse_second(self, name: str, of_another_thread: bool) -> None:
        position = self.log.position
        if of_another_thread:
            raise ArgumentError(
                f"{name} was called in a second thread, while another thread was inside of a call of the same pipeline "
                f"({position}); make all its calls in one thread, or hold a lock around each"
            )
        if self._mesh is not None or position.phase is not Phase.READING:
            raise ArgumentError(
                f"{name} was called inside of another call of the same pipeline ({position}): by loss_fn, a hook, a "
                "loader or a signal handler; call it before or after that one"
            )

    def from_first(self, kind: str) -> bool | None:
        """Whether rank 0 alone brings the data of such calls; None before the ranks have met in one."""
        with self._changed:
            return self._agreement.from_first(kind)

    def note_contents(self, tree: Any) -> None:
        """This call was given these data; that the others' are the same comes out with a beat."""
        with self._changed:
            self._contents.note(self.log.calls, tree)
            self._accuse(self._contents.difference())
            if self._cause is not None:
                raise self._cause.exception()

    # What the training thread does.

    def _raise_known(self) -> None:
        with self._changed:
            self._accuse(self._blame.gone(self.log.position, now_s=time.monotonic()))
            if self._cause is not None:
                raise self._cause.exception()

    def _raise_aborted(self) -> None:
        """What was received at an abort is garbage, and so is what was computed from it."""
        if self._aborted:
            self._raise_known()

    def _agree(self, given: Given, *, settled: bool) -> None:
        number = self.log.calls
        with self._changed:
            wait = self._agreement.enter(number, given, settled=settled)
            self._say_given(number)
            self._accuse(self._agreement.difference(number))
        if wait:
            self.log.phase(Phase.AGREEMENT)
            with self._changed:
                while self._cause is None and not self._agreement.complete(number):
                    self._changed.wait()
        self._raise_known()

    def _say_given(self, number: int) -> None:
        given = self._agreement.to_say(number)
        if given is not None and self._mesh is not None:
            self._mesh.post({"call": number, "given": dict(given)})

    def _conclude(self, problem: BaseException) -> None:
        """Raise the first cause; that is `problem` itself unless another rank has failed before."""
        position = self.log.position
        own = isinstance(problem, PlanError) and problem.first_rank is None
        with self._changed:
            if position.waiting and not own and self._mesh is not None:
                seconds = ECHO_S if isinstance(problem, Exception) else ENDING_ECHO_S
                self._changed.wait_for(lambda: self._cause is not None, seconds)
            if self._cause is None:
                if self._mesh is None and not isinstance(problem, Exception):
                    raise problem
                self._set_cause(self._first(problem, str(position)), tell=True)
            assert self._cause is not None
            cause = self._cause
            self._raised = True
        if self._mesh is None:
            self._cause, self._raised = None, False  # alone, the caller may mend what was wrong and go on
        if not isinstance(problem, Exception):
            problem.add_note(f"at {position}")
            raise problem
        if isinstance(problem, PlanError) and str(problem) == cause.text:
            raise problem
        raise cause.exception() from problem

    # What the watching thread does; also under `_changed` where the training thread reads.

    def turn(self, heard: list[tuple[int, Notice | None]]) -> bool:
        """One turn of the watching thread; False when it has done its work."""
        with self._changed:
            now_s = time.monotonic()
            for other, message in heard:
                self._hear(other, message, now_s)
            self._say_where(now_s)
            if self._caller is not None:
                self._accuse(self._blame.gone(self.log.position, now_s=now_s))
                self._accuse(self._blame.stuck(now_s=now_s))
            failed = self._cause is not None
        if failed:
            self._say_at_once()
            self._end_waits()
        return not failed

    @property
    def pause_s(self) -> float:
        """Until this rank's next turn, if nobody says anything."""
        return min(BEAT_S, self._blame.pause_s(now_s=time.monotonic()))

    def _hear(self, other: int, message: Notice | None, now_s: float) -> None:
        self._blame.hear(other, message, now_s=now_s)
        if message is None:
            return
        if message.get("contents") is not None:
            self._contents.hear(other, *message["contents"])
            self._accuse(self._contents.difference())
        if "given" in message:
            number = message["call"]
            if self._agreement.hear(other, number, message["given"]):
                self._say_given(number)
            self._accuse(self._agreement.difference(number))
            self._changed.notify_all()
        elif "cause" in message:
            self._set_cause(FirstCause(**message["cause"]), tell=False)

    def _say_where(self, now_s: float) -> None:
        entry = self.log.journal.read()
        self._blame.note(entry, now_s=now_s)
        if self._mesh is not None and now_s - self._said_s >= BEAT_S:
            self._said_s = now_s
            self._mesh.post({"at": entry, "contents": self._contents.latest()}, droppable=True)

    def _accuse(self, cause: FirstCause | None) -> None:
        """Take what this rank has found out, if anything, for the cause unless one is known; the others hear of it."""
        if cause is not None:
            self._set_cause(cause, tell=True)

    def _set_cause(self, cause: FirstCause, *, tell: bool) -> None:
        if self._cause is not None:
            return
        self._cause = cause
        self._changed.notify_all()
        if self._mesh is not None:
            if tell:
                self._mesh.post({"cause": {"text": cause.text, "error": cause.error, "rank": cause.rank}})
            self._mesh.wake()

    def _say_at_once(self) -> None:
        """Before the exception itself, where torchrun may end this process any moment because another one has ended."""
        with self._changed:
            if self._raised or "TORCHELASTIC_RUN_ID" not in os.environ:
                return
            assert self._cause is not None
            text = f"ExecutionError on {named(self._rank, self._world_size)}: {self._cause.text}"
        _say(text)

    def _end_waits(self) -> None:
        """Make the training thread raise, or end the process if it cannot."""
        for interrupt in self._interrupts:
            interrupt()
        ending = [group for group in self._groups if by_abort(group)]
        self._aborted = bool(ending)
        abort(ending)
        for group in self._groups:
            break_connections(group)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if self._raised or self._caller is None:
                return
            time.sleep(0.01)
        with self._changed:
            if self._raised or self._caller is None or self.log.journal.shared:  # workers are ended by their parent
                return
            assert self._cause is not None
            position = self.log.position
        # The training thread hangs inside a call that nothing interrupts, so no exception can say it: last words.
        _say(f"ExecutionError: {self._cause.text} (ended while at {position})")
        without_waiting(_flush)
        os._exit(1)

    def report(self, problem: BaseException) -> None:
        """Tell the others of an exception outside of any call that ends this process."""
        with self._changed:
            if self._cause is None:
                self._set_cause(self._first(problem, str(self.log.position)), tell=True)
                self._raised = True

    def fail(self, problem: Exception) -> None:
        """The watching thread cannot go on: a cause like any other, since without it the ranks could wait for ever."""
        with self._changed, contextlib.suppress(Exception):  # what has failed may be what the others are told with
            self._set_cause(self._first(problem, "watching over the other ranks"), tell=True)
        self._end_waits()

    def _first(self, problem: BaseException, position: str) -> FirstCause:
        return FirstCause.of(problem, rank=self._rank, world_size=self._world_size, position=position)


def _watch(reference: weakref.ref[Watch], mesh: Mesh) -> None:
    """The watching thread; it ends with the watch, or when it has ended the training."""
    try:
        _take_turns(reference, mesh)
    except Exception as problem:
        watch = reference()
        if watch is not None:
            watch.fail(problem)


def _take_turns(reference: weakref.ref[Watch], mesh: Mesh) -> None:
    pause_s = BEAT_S
    while not mesh.closing:
        heard = mesh.poll(pause_s)
        watch = reference()
        if watch is not None:
            if not watch.turn(heard):
                return
            pause_s = watch.pause_s
        del watch
    mesh.close()


def _meet(rank: int, world_size: int, log: Logbook, timeout_s: float) -> Mesh:
    """The connections to the others, who learn where this rank's journal is."""
    try:
        return Mesh(rank, world_size, log.journal.address, timeout_s=timeout_s)
    except (OSError, RuntimeError) as problem:
        raise ExecutionError(
            f"{named(rank, world_size)} cannot talk to the others ({problem}); let MASTER_ADDR be an address of the "
            "first machine that all machines reach"
        ) from problem


def _say(text: str) -> None:
    """Print a line on the standard error, in one piece: the training thread may print a traceback meanwhile.

    `print` writes text and end of line apart where Python does not buffer, and torchrun starts it so.
    """

    def write() -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    without_waiting(write)


def _flush() -> None:
    sys.stdout.flush()


def _journal_at(address: Address) -> ForeignJournal | None:
    """The journal of a rank on this machine; None of one on another."""
    with contextlib.suppress(OSError):
        return ForeignJournal(address)
    return None


def _say_goodbye(mesh: Mesh, log: Logbook, thread: threading.Thread) -> None:
    """Let the others know how many calls this rank made, and stop to watch."""
    mesh.post({"finished": log.calls})
    mesh.closing = True
    mesh.wake()
    if thread is not threading.current_thread():
        thread.join(1.0)  # Python must not end while the thread is inside of gloo


def _report_uncaught(watch: Watch) -> None:
    """Let the others know of an exception that ends this process between calls."""
    reference, previous = weakref.ref(watch), sys.excepthook

    def report(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> Any:
        watch = reference()
        if watch is not None:
            watch.report(problem)
        previous(kind, problem, trace)

    sys.excepthook = report
