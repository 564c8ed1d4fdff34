"""Answers to what a trace asks of values that it does not have: from runs of the sample, or from an earlier trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from profiler.conditions.reading import Spot
from profiler.sample_spec import Decision, code_of
from profiler.text import counted


class Undecided(Exception):  # noqa: N818 - caught and turned into an error of our tree
    """There is no answer that every micro-batch could have."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """One run of the model.

    Attributes:
        size: samples that it ran on.
        read: by place what was read there, in order.
    """

    size: int
    read: Mapping[Spot, Sequence[Any]]


class Answers(Protocol):
    """Answers during one trace."""

    def read(self, spot: Spot) -> tuple[Any, ...]:
        """The value that is read at a place now, in each of the sample's runs; none if that is not known."""

    def decide(self, spot: Spot, values: tuple[Any, ...], *, condition: bool) -> bool | int | float:
        """The answer, given what it is in each of the runs."""


class FromRuns:
    """Answers from runs of the sample; a decision stands where all of them agree.

    A loop reads at one place several times, and a trace may call the model twice.

    Args:
        runs: the whole sample's first.
    """

    def __init__(self, runs: Sequence[SampleRun]) -> None:
        self.sizes = [run.size for run in runs]
        self._runs = runs
        self._next: dict[Spot, int] = defaultdict(int)

    def read(self, spot: Spot) -> tuple[Any, ...]:
        """One value for each run."""
        number = self._next[spot]
        self._next[spot] += 1
        runs = [run.read.get(spot, ()) for run in self._runs]
        return tuple(values[number % len(values)] for values in runs) if all(runs) else ()

    def decide(self, spot: Spot, values: tuple[Any, ...], *, condition: bool) -> bool | int | float:
        """What all runs have."""
        if not values:
            raise Undecided("not all of the sample's runs come here")
        differ = next((i for i, value in enumerate(values) if value != values[0]), None)
        if differ is not None:
            raise Undecided(
                f"it is {values[0]} for the sample's {counted(self.sizes[0], 'sample')} and {values[differ]} for "
                f"{self.sizes[differ]} of them"
            )
        if isinstance(values[0], float) and not math.isfinite(values[0]):
            raise Undecided(f"it is {values[0]}")
        answer: bool | int | float = bool(values[0]) if condition else values[0]
        return answer


_Kind = tuple[str, str, bool]  # module, code of the line, whether it is a condition


class FromDecisions:
    """The decisions of an earlier trace, in the order in which they were made at each place.

    Args:
        decisions: of that trace.
    """

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._made: dict[_Kind, list[bool | int | float]] = defaultdict(list)
        for made in decisions:
            self._made[made.module, made.code, isinstance(made.answer, bool)].append(made.answer)
        self._next: dict[_Kind, int] = defaultdict(int)

    def read(self, spot: Spot) -> tuple[Any, ...]:
        """Not known."""
        return ()

    def decide(self, spot: Spot, values: tuple[Any, ...], *, condition: bool) -> bool | int | float:
        """What was decided."""
        key = spot.module, code_of(spot.line), condition
        made = self._made.get(key)
        if not made:
            raise Undecided("the trace that the plan was made with did not ask this")
        self._next[key] += 1
        return made[(self._next[key] - 1) % len(made)]

    def has_number(self, spot: Spot) -> bool:
        """Whether a number was fixed there; others were left open, for conditions to be decided on them."""
        return (spot.module, code_of(spot.line), False) in self._made
