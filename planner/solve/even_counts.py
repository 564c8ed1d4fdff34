"""Plans whose micro-batches are all as large, each M searched by itself where the search of all M left a gap.

Of thousands of M that search may be out of patience before it comes to those with a better plan: most have
micro-batches of two sizes, for which stages take four times as long to list. Of one M alone, and of one size, it takes
seconds.
"""

from __future__ import annotations

from dataclasses import replace

from planner.solve.balance import Balance, Unsettled
from planner.solve.balancer import balance
from planner.solve.deadline import Deadline
from planner.solve.problem import Problem
from planner.solve.work_bound import RoughBounds

CLOSE_ENOUGH = 0.01
"""Gap at which M are not searched alone [chosen]."""
MOST_ALONE = 3
"""M that are, those with the least bounds [chosen]."""
PATIENCE = 0.5
"""Share of the usual patience with each of them [chosen]."""
SHARE_OF_ALL = 0.75
"""Of the time limit, for all M together [chosen]."""


def balance_of_all_counts(
    problem: Problem, reached: Balance | None = None, unsettled: Unsettled | None = None
) -> Balance | None:
    """See `planner.solve.balancer.balance`."""
    settings = problem.settings
    limit_s = settings.time_limit_s
    hasty = problem.dispensable or problem.patience < 1 or settings.micro_batches is not None
    counts = [] if hasty else _even_counts(problem)
    deadline = Deadline(limit_s)
    first = problem if limit_s is None or not counts else _alone(problem, None, SHARE_OF_ALL * limit_s)
    found = balance(first, reached, unsettled)
    for number, count in enumerate(counts):
        if found is None or found.step_s <= found.lower_bound_s * (1 + CLOSE_ENOUGH) or deadline.over:
            break
        left_s = None if limit_s is None else deadline.left_s / (len(counts) - number)
        alone = replace(_alone(problem, count, left_s), dispensable=True, patience=PATIENCE)
        best = balance(alone, found)
        if best is not None and best.better_than(found):
            found = replace(best, lower_bound_s=min(best.step_s, found.lower_bound_s))
        elif limit_s is None:
            break  # those with larger bounds are less hopeful; a time limit is used up
    return found


def _alone(problem: Problem, count: int | None, limit_s: float | None) -> Problem:
    return replace(problem, settings=replace(problem.settings, micro_batches=count, time_limit_s=limit_s))


def _even_counts(problem: Problem) -> list[int]:
    """Some M of whose micro-batches all are as large, where there are others: those with the least bounds first."""
    rough, least_s, others = RoughBounds(problem), dict[int, float](), False
    for one in problem.candidates():
        if one.split.largest == one.split.smallest:
            count = one.split.count
            least_s[count] = min(rough.step_s(one), least_s.get(count, float("inf")))
        else:
            others = True
    return sorted(least_s, key=lambda count: least_s[count])[:MOST_ALONE] if others or len(least_s) > 1 else []
