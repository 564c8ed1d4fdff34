"""The best plan of all schedules that are asked for: each family of them has a search of its own.

1. Those with several chunks a rank: `planner.solve.chunk_search`, one search for all numbers of chunks. They come first
   because where they are faster, which is mostly, their plan shows at once that the next ones are slower.
2. Schedules with one stage a rank and a backward pass in one: `planner.solve.balancer`.
3. Those that split the backward pass: `planner.solve.chunk_search`.
4. Those that do so with several chunks a rank, likewise.

Where one stage a rank splits the backward pass, the best plan of 1F1B is a start (`planner.solve.order_start`).

Each looks for nothing that is slower than the best plan so far. Time that is given is shared equally among the families
that are left. One that has found no plan when its share is over leaves it to the next; if none has any in the end, that
which needs least memory is looked for however late it is. Where a batch is so large that some numbers of micro-batches
were left out (`planner.solve.counts`), those beside the best plan's come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from planner.plan.schedules import ONE_CHUNK, SCHEDULES, one_chunk_schedules
from planner.search_watch import besides, others_follow
from planner.settings import CHUNKS_TRIED, FEW_RANKS, Settings
from planner.solve.balance import TIE, Balance, Unsettled, evaluate_s, fits
from planner.solve.chunk_search import chunk_balance
from planner.solve.deadline import Deadline, with_share
from planner.solve.many_devices import balance_any
from planner.solve.order_start import with_own_orders
from planner.solve.other_counts import promising
from planner.solve.problem import Candidate, Problem

SHARE_OF_START, TIME_OF_START = 0.25, 0.5
"""Of the usual patience, and of a time limit, that the search for a plan to start from has [chosen: with 64 devices and
15 s a quarter did not do, and without it the step took eight times as long]."""
LEAST_START_S = 2.0
"""Seconds under which none is looked for if there is a plan already [chosen: with 64 devices one takes 2 s]."""


def balance_of_all(problem: Problem, unsettled: Unsettled | None = None) -> Balance | None:
    """The fastest plan, and what no plan of any of the schedules is below.

    Args:
        problem: that it solves.
        unsettled: notes what is left where there is no plan.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    deadline = Deadline(problem.settings.time_limit_s)
    best: Balance | None = None
    unsettled = unsettled or Unsettled()  # of families that ended without a plan
    every = [*families(problem)]
    late = next((family[0] for family in every if is_plain(family[0].settings)), None)
    waits, limited = late is not None and len(every) > 1, problem.settings.time_limit_s is not None
    for number, family in enumerate(every):
        plain = is_plain(family[0].settings)
        start = None if plain else _start(with_share(family[0], deadline, len(every) - number), best)
        shared = [with_share(one, deadline, len(every) - number) for one in family]
        done_s = min(unsettled.least_s, np.inf if best is None else best.lower_bound_s)
        last = number == len(every) - 1
        if waits and (limited or not plain):  # without a limit an interrupt alone makes these leave it to the plain one
            shared = [replace(one, dispensable=True) for one in shared]
        with besides(done_s if last else 0.0), nullcontext() if last else others_follow():
            if plain:
                best = balance_any(shared[0], best, unsettled)
            else:
                best = chunk_balance(*shared, reached=best, start=start, unsettled=unsettled)
    if best is None:
        if late is None or not (waits and limited) or problem.dispensable or unsettled.least_s == np.inf:
            return None
        best = balance_any(with_share(late, deadline))
        if best is None:
            return None
    best = replace(best, lower_bound_s=min(best.lower_bound_s, unsettled.least_s))
    with besides(best.lower_bound_s):
        return _with_counts_beside(problem, best, deadline)


def _with_counts_beside(problem: Problem, best: Balance, deadline: Deadline) -> Balance:
    """The best plan also of the numbers of micro-batches beside its own, where these were left out.

    Its stages say which of them. With two sizes of micro-batches a step is the largest of many sums that grow or shrink
    with M evenly: where it neither grows nor shrinks beside a number, no other between the same sizes is better for
    these stages.
    """
    while not deadline.over and (chosen := _count_beside(problem, best, deadline)) is not None:
        of_one = with_share(_alone(problem, chosen), deadline)
        found = balance_any(of_one, best) if is_plain(of_one.settings) else chunk_balance(of_one, reached=best)
        if found is None or not found.better_than(best):
            break
        best = found
    return best


def _count_beside(problem: Problem, best: Balance, deadline: Deadline) -> Candidate | None:
    """The number of micro-batches with which its stages are fastest, if it was left out."""
    schedule = best.candidate.schedule
    made, plain = SCHEDULES[schedule].made_for_plan, best.candidate.ring == ONE_CHUNK
    if made and best.candidate.ring.chunks > 1:
        return None  # whether they fit would have to be found out for each anew

    def step_s(candidate: Candidate) -> float:
        if not made:
            return evaluate_s(problem, candidate, best.stages)
        found = with_own_orders(problem, replace(best, candidate=candidate), schedule, deadline)
        return np.inf if found is None else found.step_s

    def may_fit(candidate: Candidate) -> bool:
        return made or not plain or fits(problem, candidate, best.stages)

    beside = problem.counts_beside(best.candidate)
    return promising(beside, step_s, may_fit, best.step_s, worth=TIE) if beside else None


def _alone(problem: Problem, candidate: Candidate) -> Problem:
    """The problem with one schedule, R, M and number of chunks."""
    fixed = replace(
        problem.settings,
        schedules=(candidate.schedule,),
        replicas=candidate.replicas,
        micro_batches=candidate.split.count,
    )
    fixed = with_chunks(fixed, candidate.ring.chunks, problem.layers) or fixed
    return replace(problem, settings=fixed)


def _start(problem: Problem, best: Balance | None) -> Balance | None:
    """A plan whose stages are tried with a split backward pass: the best one of 1F1B."""
    settings, lean = problem.settings, tuple(name for name in one_chunk_schedules() if not SCHEDULES[name].keeps_all)
    if settings.chunks > 1 or not any(SCHEDULES[name].splits_backward for name in settings.schedules):
        return None
    if best is not None and best.candidate.schedule in lean:
        return best
    limit_s = None if settings.time_limit_s is None else settings.time_limit_s * TIME_OF_START
    if limit_s is not None and limit_s < LEAST_START_S and problem.dispensable:
        return None
    less = replace(settings, schedules=lean, time_limit_s=limit_s)
    with besides(0.0), others_follow():
        return balance_any(
            replace(
                problem, settings=less, patience=problem.patience * SHARE_OF_START, dispensable=True, below_s=np.inf
            )
        )


def families(problem: Problem) -> Iterator[list[Problem]]:
    """For each search the problem with the schedules that it is for, once for each number of chunks."""
    settings = problem.settings
    names = {
        kind: tuple(name for name in settings.schedules if _kind(name) == kind)
        for kind in ("plain", "split", "chunks", "split chunks")
    }
    numbers = (1, *CHUNKS_TRIED) if settings.choose_chunks else (settings.chunks,)
    with_so_many = {chunks: _with_chunks(problem, chunks) for chunks in numbers}
    several = [
        replace(chosen, settings=replace(chosen.settings, schedules=names["chunks"]))
        for chunks, chosen in with_so_many.items()
        if chunks > 1 and names["chunks"] and chosen is not None
    ]
    if several:
        yield several
    one_chunk = with_so_many.get(1)
    for schedules in (names["plain"] or names["chunks"], names["split"]):
        if schedules and one_chunk is not None:
            yield [replace(one_chunk, settings=replace(one_chunk.settings, schedules=schedules))]
    for name in names["split chunks"]:
        chosen = _with_chunks(problem, SCHEDULES[name].fewest_chunks)
        if chosen is not None:
            yield [replace(chosen, settings=replace(chosen.settings, schedules=(name,)))]


def _with_chunks(problem: Problem, chunks: int) -> Problem | None:
    """The problem with so many chunks a rank; None where its settings or its rules do not allow them."""
    chosen = with_chunks(problem.settings, chunks, problem.layers)
    if chosen is None or problem.rules.demanded.sum() >= chosen.max_stages:
        return None
    return replace(problem, settings=chosen)


def with_chunks(settings: Settings, chunks: int, layers: int) -> Settings | None:
    """The settings for so many chunks a rank; None where they do not allow them on as many ranks as these need."""
    if settings.chunks == chunks:
        return settings
    devices, fixed = len(settings.memory_limits), settings.stages
    most = min(devices * chunks, layers, settings.stages_limit or layers)
    fewest = 1 if chunks == 1 else FEW_RANKS * chunks
    if most < fewest or (fixed is not None and (fixed % chunks or not fewest <= fixed <= most)):
        return None
    return replace(settings, chunks=chunks, max_stages=most)


def _kind(name: str) -> str:
    record = SCHEDULES[name]
    kinds = ["split"] * record.splits_backward + ["chunks"] * (record.most_chunks > 1)
    return " ".join(kinds) or "plain"


def is_plain(settings: Settings) -> bool:
    """Whether the search for one stage a rank and whole backward passes is for them."""
    return settings.chunks == 1 and not any(SCHEDULES[name].splits_backward for name in settings.schedules)
