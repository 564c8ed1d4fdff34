"""Who is to blame when a rank waits too long, or another has gone: told from what each says of itself.

Every rank says four times a second where it is (`executor.watch.watch`). From that alone, without a message more:

    what has been heard of another rank                       whom it makes responsible
    its connection is closed, it did not say goodbye          that rank: killed, or crashed
    its connection is closed, after fewer calls than ours     that rank: it ended too early
    nothing for half a time-out                               that rank: stopped, or out of reach
    the same place for as long, computing or between calls    that rank, if none has begun fewer calls
    it waits as well                                          this rank, which noticed: all wait for each other

Nothing here waits, sends or asks what time it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from executor.connect.mesh import Notice
from executor.watch.failure import FirstCause, named
from executor.watch.position import Phase, Position
from planner.plan.plan import Plan
from profiler.errors import ExecutionError
from profiler.machine.journal import Entry, ForeignJournal

STEPS_UNTIL_TIMEOUT = 20.0  # a message that takes this many predicted steps will not come any more
SHORTEST_TIMEOUT_S = 20.0  # predictions of short steps leave out what an operating system may do in between
LONGEST_TIMEOUT_S = 60.0
FEWEST_STEPS = 3.0  # steps may be so long that the longest time-out would cut into them
BLAME_AFTER = 0.8  # of the time-out; the rest is for the error to reach all
# Ranks that notice the same at once would each say it in words of their own. So they take turns, in rank order, and all
# but the first hear it before it is theirs to tell.
BLAME_WITHIN = 0.1  # of the time-out, in equal parts: between the first rank's turn and the last one's
TURN_S = 0.2  # between the turns to tell of a rank that has ended too early
LONGEST_TURN_S = 0.6
_NOWHERE = Position(Phase.OUTSIDE, 0, 0)  # before anything is heard
# Tracing and disks take what they take, and so does planning, which is compiled the first time; ranks that do
# different things are told apart before they wait.
_AT_LEISURE = (Phase.CONSTRUCTION, Phase.PREPARATION, Phase.SAVE, Phase.LOAD, Phase.PLANNING)


def timeout_for(plan: Plan) -> float:
    """Seconds after which a rank that waits gives up: 20 predicted steps, at least 20 s and at most 60 s.

    Never less than three predicted steps, however long these are.
    """
    step_s = plan.prediction.step_s
    patience = min(max(STEPS_UNTIL_TIMEOUT * step_s, SHORTEST_TIMEOUT_S), LONGEST_TIMEOUT_S)
    return max(patience, FEWEST_STEPS * step_s)


@dataclass(slots=True)
class _Known:
    """What is known of a rank."""

    heard_s: float
    changed_s: float
    position: Position = _NOWHERE
    journal: ForeignJournal | None = None
    count: int = 0
    gone_s: float | None = None  # since when
    finished: bool = False

    def note(self, entry: Entry, now_s: float) -> None:
        """It is at this entry of its journal."""
        count, *_ = entry
        if count != self.count:
            self.count, self.changed_s = count, now_s
        self.position = Position.of(entry)

    @property
    def last_position(self) -> Position:
        """Where it is or was last: to the action on this machine, otherwise as it said with its last beat."""
        return self.position if self.journal is None else Position.of(self.journal.read())


class Blame:
    """What one rank knows of the others, and whom it blames.

        blame = Blame(rank, world_size, {1: None, 2: None}, timeout_s=60, now_s=time.monotonic())
        blame.hear(2, None, now_s=time.monotonic())              # its connection is closed
        cause = blame.gone(position, now_s=time.monotonic())     # "rank 2 of 3 failed: its process ended without ..."

    Args:
        rank: of this process.
        world_size: number of ranks.
        journals: of the other ranks; None of those on other machines.
        timeout_s: how long to wait for another rank.
        now_s: by any clock that all calls are given the time by.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        journals: Mapping[int, ForeignJournal | None],
        *,
        timeout_s: float,
        now_s: float,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._turn_s = min(TURN_S * rank, LONGEST_TURN_S)
        self._stuck_after_s = (BLAME_AFTER + BLAME_WITHIN * rank / world_size) * timeout_s
        self._own = _Known(now_s, now_s)
        self._others = {other: _Known(now_s, now_s, journal=journal) for other, journal in journals.items()}

    def note(self, entry: Entry, *, now_s: float) -> None:
        """This rank is at this entry of its own journal."""
        self._own.note(entry, now_s)

    def hear(self, other: int, message: Notice | None, *, now_s: float) -> None:
        """Another rank says something; None: its connection is closed."""
        known = self._others[other]
        if message is None:
            known.gone_s = now_s
            return
        known.heard_s = now_s
        if "at" in message:
            known.note(tuple(message["at"]), now_s)
        elif "finished" in message:
            known.finished = True
            known.position = Position(Phase.OUTSIDE, message["finished"], known.position.step)

    def pause_s(self, *, now_s: float) -> float:
        """Seconds until it is this rank's turn to blame another, if nobody says anything."""
        turns = [known.gone_s + self._turn_s - now_s for known in self._others.values() if known.gone_s is not None]
        turns.append(self._own.changed_s + self._stuck_after_s - now_s)
        return min((pause_s for pause_s in turns if pause_s > 0), default=math.inf)

    def gone(self, position: Position, *, now_s: float) -> FirstCause | None:
        """The error if a rank has gone that has not done its part of this rank's call, at `position`."""
        for other, known in self._others.items():
            if known.gone_s is None:
                continue
            if not known.finished:
                return self._cause(
                    other,
                    "its process ended without a word (killed, perhaps by the system for want of memory, or crashed), "
                    f"last at {known.last_position}",
                )
            done = known.position.calls >= position.calls  # its part of this call, which is on its way
            if not done and now_s - known.gone_s >= self._turn_s:  # until then a rank before this one is to tell
                return self._cause(
                    other,
                    f"it ended after {known.position.calls} of the pipeline's calls (construction, step, evaluate, "
                    f"...), rank {self._rank} makes a call more: {position}; every rank must make the same calls",
                )
        return None

    def stuck(self, *, now_s: float) -> FirstCause | None:
        """The error if this rank has waited too long: it names the one that all wait for."""
        waited_s = now_s - self._own.changed_s
        if waited_s < self._stuck_after_s or not self._own.position.waiting:
            return None
        waits = f"rank {self._rank} has waited {waited_s:.0f} s at {self._own.position}"
        for other, known in self._others.items():
            silent_s = now_s - known.heard_s
            if silent_s > self._timeout_s / 2 and known.gone_s is None:
                return self._cause(
                    other,
                    f"it has not answered for {silent_s:.0f} s (stopped, or its machine is out of reach), last at "
                    f"{known.last_position}; {waits}",
                )
        advice = (
            f"every rank must make the same calls, and if it needs more than {self._timeout_s:.0f} s, set timeout_s"
        )
        fewest = min(known.position.calls for known in self._others.values())
        for other, known in self._others.items():
            if known.position.phase in _AT_LEISURE:
                return None
            idle_s = now_s - known.changed_s
            if not known.position.waiting and known.position.calls == fewest and idle_s > self._timeout_s / 2:
                does = f"it has been at {known.position} for {idle_s:.0f} s, after {known.position.calls} calls"
                return self._cause(other, f"{does}; {waits}, in call {self._own.position.calls}; {advice}")
        others = ", ".join(f"rank {other} at {known.position}" for other, known in self._others.items())
        return self._cause(self._rank, f"{waits}, {others}; {advice}")

    def _cause(self, rank: int, text: str) -> FirstCause:
        return FirstCause(f"{named(rank, self._world_size)} failed: {text}", ExecutionError.__name__, rank)
