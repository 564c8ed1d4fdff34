"""Which number of micro-batches to look at next, where to solve the problem of each takes long.

Large problems are not solved to the end, and bounds of neighbouring numbers hardly differ: taken in the order of their
bounds they improve the plan by a little each time, hundreds of times. So the plan found last is tried as it is with
other numbers, which takes milliseconds, and the one that makes it fastest comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from planner.solve.balance import Balance, evaluate_s, fits
from planner.solve.problem import Candidate, Problem

TRIED_AT = 16
"""Numbers that a plan is tried with, and again around the best of these [chosen]."""
WORTH_A_SEARCH = 1e-4
"""By how much another number must make the plan faster to be looked at first [chosen]."""


def promising(
    candidates: Sequence[Candidate],
    seconds: Callable[[Candidate], float],
    fits: Callable[[Candidate], bool],
    now_s: float,
    worth: float = WORTH_A_SEARCH,
) -> Candidate | None:
    """The candidate with which a plan is fastest, of some spread over all; None if none is worth it.

    Args:
        candidates: that differ in the number of micro-batches alone, ascending.
        seconds: of a step of the plan.
        fits: whether the plan's stages fit their devices.
        now_s: what the plan takes as it is.
        worth: by how much faster, relative to that, a plan must be.
    """
    below_s = now_s * (1 - worth)
    found: dict[int, float] = {}

    def try_between(first: int, last: int) -> None:
        for place in map(int, np.linspace(first, last, TRIED_AT).round()):
            if place not in found:
                taken_s = seconds(candidates[place])
                found[place] = taken_s if taken_s < below_s and fits(candidates[place]) else np.inf

    if not candidates:
        return None
    try_between(0, len(candidates) - 1)
    best = min(found, key=lambda place: found[place])
    places = sorted(found)
    at = places.index(best)
    try_between(places[max(0, at - 1)], places[min(len(places) - 1, at + 1)])
    best = min(found, key=lambda place: found[place])
    return candidates[best] if found[best] < below_s else None


def fastest_count(problem: Problem, best: Balance, candidates: Iterable[Candidate], below_s: float) -> Candidate | None:
    """Of the candidates with the best plan's schedule the one that makes its stages fastest; None if none does.

    Args:
        problem: that the plan solves.
        best: the plan.
        candidates: with the same number of replicas.
        below_s: slower ones are of no use.
    """
    count = len(best.stages)
    used = Counter(stage.device_class for stage in best.stages)
    others = [
        one
        for one in sorted(candidates, key=lambda one: one.split.count)
        if one.schedule == best.candidate.schedule
        and problem.most_stages(one.replicas, one.split.count) >= count
        and all(problem.classes[place].capacity(one.replicas) >= number for place, number in used.items())
    ]
    return promising(
        others,
        lambda one: evaluate_s(problem, one, best.stages),
        lambda one: fits(problem, one, best.stages),
        below_s,
    )
