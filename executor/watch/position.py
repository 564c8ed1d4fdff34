"""Where in training a rank is: what it writes into its journal, and how that reads in an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from planner.plan.actions import Action, ActionKind
from profiler.machine.journal import Entry, Journal

_KINDS = tuple(ActionKind)
_NUMBER_OF_KIND = {kind: number for number, kind in enumerate(_KINDS)}
# A transfer that skips stages is entered as its kind plus (peer + 1) times the number of kinds.
_TRANSFERS = frozenset({ActionKind.RECV_F, ActionKind.RECV_B, ActionKind.SEND_F, ActionKind.SEND_B})


class Phase(IntEnum):
    """What a rank does, apart from the actions of its schedule."""

    OUTSIDE = 0
    CONSTRUCTION = 1
    AGREEMENT = 2
    PREPARATION = 3
    ACTION = 4
    END_OF_STEP = 5
    NORM = 6
    SAVE = 7
    LOAD = 8
    MEASURED = 9
    SHARING = 10
    READING = 11
    HANDING_OUT = 12
    EXCHANGE = 13
    PLANNING = 14


_WORDS = {
    Phase.OUTSIDE: "outside of the pipeline's calls",
    Phase.CONSTRUCTION: "constructing the pipeline",
    Phase.AGREEMENT: "comparing what the ranks were given",
    Phase.PREPARATION: "before the first action",
    Phase.ACTION: "in an action",
    Phase.END_OF_STEP: "at the end of the step",
    Phase.NORM: "in clip_grad_norm_",
    Phase.SAVE: "in save_checkpoint",
    Phase.LOAD: "in load_checkpoint",
    Phase.MEASURED: "sharing what was measured",
    Phase.SHARING: "sharing the parameters and buffers that several ranks hold",
    Phase.READING: "reading the next batch",
    Phase.HANDING_OUT: "handing out rank 0's batch",
    Phase.EXCHANGE: "exchanging the parameters that each replica has stepped",
    Phase.PLANNING: "planning again with what was measured",
}


_NOT_WAITING = (Phase.OUTSIDE, Phase.CONSTRUCTION, Phase.PREPARATION, Phase.READING, Phase.PLANNING)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    Attributes:
        phase: what it does.
        calls: how many collective calls (construction, `step`, `evaluate`, ...) it has begun.
        step: number of the training step, counted from 0; of the next one outside of a step.
        action: which it carries out, in phase ACTION.
    """

    phase: Phase
    calls: int
    step: int
    action: Action | None = None

    @classmethod
    def of(cls, entry: Entry) -> Position:
        """The position that a journal's entry holds."""
        _, phase, calls, step, stage, kind, micro_batch = entry
        peer, kind = divmod(kind, len(_KINDS))
        action = Action(stage, _KINDS[kind], micro_batch, peer - 1 if peer else None) if phase == Phase.ACTION else None
        return cls(Phase(phase), calls, step, action)

    @property
    def waiting(self) -> bool:
        """Whether the rank talks to others there, and so waits for them."""
        if self.action is not None:
            return self.action.kind in _TRANSFERS
        return self.phase not in _NOT_WAITING

    def __str__(self) -> str:
        if self.action is not None:
            where = f"stage {self.action.stage}, micro-batch {self.action.micro_batch}, action {self.action}"
            return f"step {self.step}, {where}"
        if self.phase in (Phase.CONSTRUCTION, Phase.LOAD, Phase.SHARING):
            return _WORDS[self.phase]
        return f"step {self.step}, {_WORDS[self.phase]}"


ActionNumbers: TypeAlias = tuple[int, int, int]
_ACTION = int(Phase.ACTION)  # a plain number: this is written before each action


def numbers_of(action: Action) -> ActionNumbers:
    """An action as a journal holds it."""
    kind = _NUMBER_OF_KIND[action.kind]
    if action.peer is not None:
        kind += len(_KINDS) * (action.peer + 1)
    return action.stage, kind, action.micro_batch


class Logbook:
    """Writes positions into a journal.

    Args:
        journal: of this process.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.calls = 0
        self.step = 0

    def phase(self, phase: Phase) -> None:
        """Enter a phase other than an action."""
        self.journal.write(phase, self.calls, self.step)

    def action(self, numbers: ActionNumbers) -> None:
        """Begin an action."""
        self.journal.write(_ACTION, self.calls, self.step, *numbers)

    @property
    def position(self) -> Position:
        """The last one written."""
        return Position.of(self.journal.read())


def describe(entry: Entry) -> str:
    """A journal's entry in words; "" before the first."""
    return str(Position.of(entry)) if entry[0] else ""
