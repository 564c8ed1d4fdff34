"""What the search over chunks and orders made for a plan chooses from: every schedule, R, M and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.plan.schedules import SCHEDULES
from planner.settings import FEW_RANKS
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.own_order_plans import OwnOrderPlans
from planner.solve.problem import Candidate, Problem


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


def plans_of(problem: Problem, candidate: Candidate, deadline: Deadline = NO_DEADLINE) -> ChunkPlans:
    """The plans of a candidate: with the schedule's order, or with orders of their own."""
    own = SCHEDULES[candidate.schedule].made_for_plan
    return OwnOrderPlans(problem, candidate, deadline) if own else ChunkPlans(problem, candidate, deadline)
