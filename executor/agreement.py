"""Whether all ranks were given the same for a call, before a message of another size than expected breaks it.

Each rank says what it was given when that is not what its call before was given. It waits for the others only where it
was last given something else for this kind of call: a loop of equal steps costs nothing, steps with `clip_grad_norm_`
between them one short message a call. Who hears of a call what it has not said itself says it then; so when one rank
differs, all learn what each was given, and tell it in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

from executor.failure import FirstCause
from profiler.errors import ArgumentError, ForeignPlanError

Given = Mapping[str, str]  # what a rank was given, by what it is; to be equal on all ranks
CALL = "the call"  # names its kind
PLAN = "the plan"


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

    def enter(self, number: int, given: Given) -> bool:
        """This rank begins a call; whether it has to wait until all have said what they were given."""
        self._given = {call: table for call, table in self._given.items() if call >= number - 1}
        self._said = {call for call in self._said if call >= number - 1}
        table = self._given.setdefault(number, {})
        if table or given != self._last:
            self._said.add(number)
        kind = given.get(CALL, "")
        wait = given != self._last_of_kind.get(kind) or any(given != other for other in table.values())
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
        for rank in range(1, self._world_size):
            first, other = table[0], table[rank]
            for what in {**first, **other}:
                if first.get(what) != other.get(what):
                    text = (
                        f"the ranks differ in {what}: rank 0 has {first.get(what)}, rank {rank} has {other.get(what)}; "
                        "give every rank the same"
                    )
                    error = ForeignPlanError if what == PLAN else ArgumentError
                    return FirstCause(text, error.__name__, rank)
        return None
