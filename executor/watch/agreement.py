"""Whether all ranks were given the same for a call, before a message of another size than expected breaks it.

Each rank says what it was given when that is not what its call before was given. It waits for the others only where it
was last given something else for this kind of call: a loop of equal steps costs nothing, steps with `clip_grad_norm_`
between them one short message a call. Who hears of a call what it has not said itself says it then; so when one rank
differs, all learn what each was given, and tell it in the same words.

Data come in one of two ways, the same for all calls of a kind, and the first of them settles which:

    every rank brings them      the ranks compare shapes, at the first call contents, too (`executor.watch.contents`)
    rank 0 alone brings them    it hands them to the others (`executor.batch.feed`), which have nothing to compare

It must be settled: rank 0 brings a batch either way, and does not wait to hear what the others bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from executor.watch.contents import WHAT_TO_DO
from executor.watch.failure import FirstCause
from profiler.errors import ArgumentError, ForeignPlanError

Given = Mapping[str, str]  # what a rank was given, by what it is; to be equal on all ranks
CALL = "the call"  # names its kind
PLAN = "the plan"
DATA = "the data"  # which of `Brings`
BATCH = "the batch"
TARGET = "the target"
CONTENT = ("the content of the batch", "the content of the target")


class Brings(StrEnum):
    """What a rank brings to a call that needs data."""

    ALL = "a batch"
    NOTHING = "no data"
    TARGET_ALONE = "a target without inputs"


class Agreement:
    """What the ranks were given, as one of them knows it.

    Args:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._given: dict[int, dict[int, Given]] = {}  # by number of the call and rank
        self._said: set[int] = set()
        self._last: Given = {}
        self._last_of_kind: dict[str, Given] = {}
        self._from_first: dict[str, bool] = {}  # by kind of call: whether rank 0 alone brings its data

    def from_first(self, kind: str) -> bool | None:
        """Whether rank 0 alone brings the data of such calls; None before the ranks have met in one."""
        return self._from_first.get(kind)

    def enter(self, number: int, given: Given, *, settled: bool = False) -> bool:
        """This rank begins a call; whether it has to wait until all have said what they were given.

        Args:
            number: of the call.
            given: what it was given.
            settled: whether other words keep the ranks together in such calls: nothing is said of it, unless another
                rank says something of the call with that number.
        """
        self._given = {call: table for call, table in self._given.items() if call >= number - 1}
        self._said = {call for call in self._said if call >= number - 1}
        given = self._not_settled(self._rank, given)
        table = self._given.setdefault(number, {})
        if table or (given != self._last and not settled):
            self._said.add(number)
        kind = given.get(CALL, "")
        differs = any(given != other for other in table.values())
        if settled:
            table[self._rank] = given
            return differs
        wait = given != self._last_of_kind.get(kind) or differs
        table[self._rank] = self._last = self._last_of_kind[kind] = given
        return wait

    def to_say(self, number: int) -> Given | None:
        """What this rank was given for a call if the others are to hear it; None if it has not begun it."""
        return self._given.get(number, {}).get(self._rank) if number in self._said else None

    def hear(self, rank: int, number: int, given: Given) -> bool:
        """Another rank says what it was given; whether this rank has to answer."""
        table = self._given.setdefault(number, {})
        table[rank] = given
        answers = self._rank in table and number not in self._said
        if answers:
            self._said.add(number)
        return answers

    def complete(self, number: int) -> bool:
        """Whether all have said what they were given for a call."""
        return len(self._given.get(number, {})) == self._world_size

    def difference(self, number: int) -> FirstCause | None:
        """The error if the ranks were given different things for a call; the same on every rank that knows all."""
        if not self.complete(number):
            return None
        table = self._given[number]
        kind = table[0].get(CALL, "")
        if all(given.get(CALL, "") == kind for given in table.values()):
            wrong = self._wrong_bringer(kind, table)
            if wrong is not None:
                return FirstCause(f"{wrong[1]}; {WHAT_TO_DO}", ArgumentError.__name__, wrong[0])
            if any(DATA in given for given in table.values()):
                self._settle(kind, table)
        for rank in range(1, self._world_size):
            first, other = table[0], table[rank]
            for what in {**first, **other}:
                if first.get(what) != other.get(what):
                    advice = WHAT_TO_DO if what in CONTENT else "give every rank the same"
                    text = (
                        f"the ranks differ in {what}: rank 0 has {first.get(what)}, rank {rank} has {other.get(what)}; "
                        f"{advice}"
                    )
                    error = ForeignPlanError if what == PLAN else ArgumentError
                    return FirstCause(text, error.__name__, rank)
        return None

    def _wrong_bringer(self, kind: str, table: Mapping[int, Given]) -> tuple[int, str] | None:
        """A rank whose data go neither of the two ways, or another one than those of earlier calls, and why."""
        brings = {rank: table[rank][DATA] for rank in sorted(table) if DATA in table[rank]}
        for rank, what in brings.items():
            if what == Brings.TARGET_ALONE or (rank == 0 and what == Brings.NOTHING):
                return rank, f"rank {rank} was given {what} for {kind}"
        for rank, what in brings.items():
            if kind in self._from_first:
                return rank, f"rank {rank} was given {what} for {kind}, unlike for the calls of {kind} before"
            if rank > 0 and what != brings[1]:
                return rank, f"rank 1 was given {brings[1]} for {kind}, and rank {rank} {what}"
        return None

    def _settle(self, kind: str, table: dict[int, Given]) -> None:
        """All have said what they bring to the first call of a kind; in this one call contents are yet to compare."""
        self._from_first[kind] = table[self._world_size - 1][DATA] == Brings.NOTHING
        self._last = self._last_of_kind[kind] = self._not_settled(self._rank, self._last_of_kind[kind])
        for rank, given in table.items():
            left = self._not_settled(rank, given)
            table[rank] = left if self._from_first[kind] else {what: given[what] for what in given if what != DATA}

    def _not_settled(self, rank: int, given: Given) -> Given:
        """What the ranks have still to compare of what one was given: a rank's data where it goes the settled way.

        Contents differ from call to call, and would make the ranks wait for each other in each.
        """
        from_first = self._from_first.get(given.get(CALL, ""))
        if from_first is None or DATA not in given:
            return given
        as_settled = Brings.NOTHING if from_first and rank > 0 else Brings.ALL
        if given[DATA] != as_settled:
            return given
        settled = {DATA, *CONTENT, *((BATCH, TARGET) if from_first else ())}
        return {what: value for what, value in given.items() if what not in settled}
