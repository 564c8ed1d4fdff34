"""What the search over chunks and orders made for a plan chooses from: every schedule, R, M and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from planner.plan.schedules import SCHEDULES
from planner.settings import FEW_RANKS
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.own_order_plans import OwnOrderPlans
from planner.solve.problem import Candidate, Problem

FEWER = 0.8
"""Of a number of ranks that does not fit the next that is tried [chosen: of 64 ranks 15]."""

_Found = TypeVar("_Found")


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every schedule, R, M and number of ranks that the settings allow."""
    for candidate in problem.candidates():
        most = most_ranks(problem, candidate)
        for ranks in range(fewest_ranks(problem), most + 1) if problem.settings.stages is None else (most,):
            if ranks:
                yield with_ranks(candidate, ranks, problem.settings.chunks)


def with_ranks(candidate: Candidate, ranks: int, chunks: int) -> Candidate:
    """The candidate over so many ranks."""
    return replace(candidate, ring=SCHEDULES[candidate.schedule].ring(ranks, chunks))


def most_ranks(problem: Problem, candidate: Candidate) -> int:
    """The most ranks of that R and M; 0 if there are none."""
    chunks = problem.settings.chunks
    most = problem.most_stages(candidate.replicas, candidate.split.count) // chunks
    return most if most >= fewest_ranks(problem) else 0


def fewest_ranks(problem: Problem) -> int:
    """The fewest that a plan may have."""
    return 1 if problem.settings.chunks == 1 else FEW_RANKS


def most_that_fit(over: Callable[[int], _Found | None], most: int, least: int) -> _Found | None:
    """What is found over the most ranks over which anything is; None where nothing is.

    Fewer and fewer are tried until something is found, then the numbers between by halves: with memory short, what fits
    over some ranks mostly does over fewer.

    Args:
        over: finds a plan over so many ranks, or None.
        most: ranks, which come first.
        least: ranks.
    """
    ranks, fits_not = most, most + 1
    found = over(ranks)
    while found is None and ranks > least:
        ranks, fits_not = max(least, math.floor(ranks * FEWER)), ranks
        found = over(ranks)
    while found is not None and ranks + 1 < fits_not:
        between = (ranks + fits_not) // 2
        more = over(between)
        if more is None:
            fits_not = between
        else:
            ranks, found = between, more
    return found


def plans_of(problem: Problem, candidate: Candidate, deadline: Deadline = NO_DEADLINE) -> ChunkPlans:
    """The plans of a candidate: with the schedule's order, or with orders of their own."""
    own = SCHEDULES[candidate.schedule].made_for_plan
    return OwnOrderPlans(problem, candidate, deadline) if own else ChunkPlans(problem, candidate, deadline)
