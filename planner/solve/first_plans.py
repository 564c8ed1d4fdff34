"""First plans of candidates with several chunks a rank or orders of their own: equal shares of the work, nothing moved.

    first = FirstPlans(deadline)
    best = first.fastest(waiting, below_s=np.inf, rounds=3)   # of all, those whose cuts are worth searching first
    first.estimate_s(waiting[0], reached_s=0.3)               # what another one would take, about

Bounds leave out memory, and where there is little of it they say nothing about which M is good. So of each schedule, R,
ranks and chunks some candidates all over the range of M get a first plan, and then some near the fastest one. Of those
with equally large micro-batches it is the one with fewest, which mostly is the best of them; and those of sizes between
are expected to take what lies between.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from planner.plan.schedules import Ring
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import HOPELESS, CutClimb
from planner.solve.deadline import Deadline

PROBES, PROBES_CLIMBED = 12, 2
"""First plans of a round, and of each number of chunks candidates that are the fastest [chosen]."""
FEW = 3
"""Candidates of a kind up to which no first plans are looked for [chosen]."""
MARGIN = 1.05
"""By how much slower than the fastest of all these may be, and at most those are expected to be that have more
micro-batches of the same size [chosen]."""

_Alike: TypeAlias = tuple[str, int, Ring]
"""Schedule, R and ranks with their chunks: candidates that differ in M alone."""


class Waiting(NamedTuple):
    """A candidate that was not searched: in the order of an estimate, of its bound, and of M.

    Attributes:
        expected_s: what it may take, about; at least the bound.
        bound_s: no plan of it takes less.
        micro_batches: M.
        position: its number.
        plans: of the candidate.
        search: for a better bound; None where there is a cheap one alone.
    """

    expected_s: float
    bound_s: float
    micro_batches: int
    position: int
    plans: ChunkPlans
    search: CutBound | None

    @property
    def kind(self) -> _Alike:
        """What candidates have in common that differ in M alone."""
        own = self.plans.candidate
        return own.schedule, own.replicas, own.ring


class FirstPlans:
    """First plans, and what they say of candidates between them.

    Args:
        deadline: when to look for none.

    Attributes:
        in_vain: how many there were, if all of them were in vain.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.in_vain, self._gain = 0, 1.0
        self._known: defaultdict[_Alike, dict[int, float]] = defaultdict(dict)  # by size; those that fit

    @property
    def some_fit(self) -> bool:
        """Whether any first plan fits."""
        return bool(self._known)

    def fastest(self, waiting: Iterable[Waiting], below_s: float, rounds: int) -> list[Waiting]:
        """The candidates with the fastest first plans, up to some of each number of chunks.

        Args:
            waiting: all candidates; of those of a kind none is looked at where they are few.
            below_s: slower ones than this are not looked for.
            rounds: of first plans, each nearer to the best one.
        """
        groups: dict[_Alike, list[Waiting]] = {}
        for entry in sorted(waiting, key=lambda entry: (entry.micro_batches, entry.position)):
            groups.setdefault(entry.kind, []).append(entry)
        groups = {key: fewest_of_each_size(entries) for key, entries in groups.items() if len(entries) > FEW}
        groups = dict(sorted(groups.items(), key=lambda item: min(entry.bound_s for entry in item[1])))
        known: dict[tuple[_Alike, int], float] = {}
        wanted = [
            (key, round(place) - 1) for key, group in groups.items() for place in np.geomspace(1, len(group), PROBES)
        ]
        for _ in range(rounds):
            for key, place in dict.fromkeys(wanted):
                if (key, place) not in known:
                    least_s = min(below_s, min(known.values(), default=np.inf))
                    known[key, place] = self._noted(groups[key][place], least_s)
            if not known:
                return []
            self.in_vain = len(known) if min(known.values()) == np.inf else 0
            best_key, best = min(known, key=lambda at: (known[at], at))
            tried = sorted(place for key, place in known if key == best_key)
            at = tried.index(best)
            ends = tried[max(0, at - 1)], tried[min(at + 1, len(tried) - 1)]
            wanted = [(best_key, round(place)) for place in np.linspace(*ends, PROBES // 2)]
        within_s = min(below_s, *known.values()) * MARGIN
        fastest: dict[int, list[Waiting]] = {}
        for step_s, (key, place) in sorted((step_s, at) for at, step_s in known.items()):
            if step_s < np.inf and step_s <= within_s:
                entry = groups[key][place]
                fastest.setdefault(entry.plans.ring.chunks, []).append(entry)
        return [entry for alike in fastest.values() for entry in alike[:PROBES_CLIMBED]]

    def step_s(self, entry: Waiting, below_s: float) -> float:
        """Seconds of a candidate's first plan; infinite where it takes no less than `below_s` or does not fit."""
        if self._deadline.over or entry.bound_s >= below_s:
            return np.inf
        choice = CutClimb(entry.plans, None, self._deadline).probed(below_s)
        return np.inf if choice is None else choice.step_s

    def estimate_s(self, entry: Waiting, reached_s: float) -> float:
        """What a candidate takes, about; its bound where nothing is known, or it may be faster than `reached_s`.

        By first plans of the same kind with larger and with smaller micro-batches, and by what the search of cuts has
        gained so far. More of the same size come after the fewest.
        """
        known, split = self._known.get(entry.kind), entry.plans.candidate.split
        if not known:
            return entry.bound_s
        sizes = sorted(known)
        between_s = np.interp(math.log(split.largest), np.log(sizes), [known[size] for size in sizes])
        more = min(split.count / math.ceil(split.batch_size / split.largest), MARGIN)
        expected_s = float(between_s) * self._gain * more
        return entry.bound_s if expected_s <= reached_s else max(entry.bound_s, expected_s)

    def note(self, entry: Waiting, step_s: float) -> None:
        """What a candidate takes after its cuts were searched: others may become as much faster."""
        first_s = self._known.get(entry.kind, {}).get(entry.plans.candidate.split.largest)
        if first_s is not None:
            self._gain = min(self._gain, step_s / first_s)

    def _noted(self, entry: Waiting, least_s: float) -> float:
        """Seconds of a candidate's first plan, infinite where it does not fit, or is far slower than the best so far.

        Those that fit are noted.
        """
        if self._deadline.over or entry.bound_s >= least_s:
            return np.inf
        climb, below_s = CutClimb(entry.plans, None, self._deadline), least_s * HOPELESS
        choice = climb.probed(below_s)
        if choice is not None or climb.first_fits:
            self._known[entry.kind][entry.plans.candidate.split.largest] = below_s if choice is None else choice.step_s
        return np.inf if choice is None else choice.step_s


def fewest_of_each_size(entries: Sequence[Waiting]) -> list[Waiting]:
    """Of each size of micro-batches the candidate with fewest of them, from these in the order of M."""
    fewest: dict[int, Waiting] = {}
    for entry in entries:
        fewest.setdefault(entry.plans.candidate.split.largest, entry)
    return [*fewest.values()]
