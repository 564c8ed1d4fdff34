"""The best plan of all schedules that are asked for: each family of them has a search of its own.

1. Those with several chunks a rank: `planner.solve.chunk_search`, one search for all numbers of chunks. They come first
   because where they are faster, which is mostly, their plan shows at once that the next ones are slower.
2. Schedules with one stage a rank and a backward pass in one: `planner.solve.balancer`.
3. Those that split the backward pass: `planner.solve.chunk_search`.

Each looks for nothing that is slower than the best plan so far. Time that is given is shared equally among the families
that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.plan.schedules import SCHEDULES
from planner.search_watch import besides
from planner.settings import Settings
from planner.solve.balance import Balance
from planner.solve.chunk_search import FEW_RANKS, chunk_balance
from planner.solve.deadline import Deadline
from planner.solve.many_devices import balance_any
from planner.solve.problem import Problem

CHUNKS_TRIED = (2, 3, 4)
"""Chunks a rank that are tried where they are to be chosen [chosen: more send more, and gain ever less]."""


def balance_of_all(problem: Problem) -> Balance | None:
    """The fastest plan, and what no plan of any of the schedules is below.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    deadline = Deadline(problem.settings.time_limit_s)
    best: Balance | None = None
    every = [*families(problem)]
    for number, family in enumerate(every):
        shared = family
        if problem.settings.time_limit_s is not None:
            share_s = max(deadline.left_s, 0.0) / (len(every) - number)
            shared = [replace(one, settings=replace(one.settings, time_limit_s=share_s)) for one in family]
        plain = is_plain(shared[0].settings)
        done_s = np.inf if best is None else best.lower_bound_s
        with besides(done_s if number == len(every) - 1 else 0.0):
            best = balance_any(shared[0], best) if plain else chunk_balance(*shared, reached=best)
    return best


def families(problem: Problem) -> Iterator[list[Problem]]:
    """For each search the problem with the schedules that it is for, once for each number of chunks."""
    settings = problem.settings
    names = {
        kind: tuple(name for name in settings.schedules if _kind(name) == kind) for kind in ("plain", "split", "chunks")
    }
    numbers = CHUNKS_TRIED if settings.choose_chunks else (settings.chunks,)
    several = [
        replace(problem, settings=replace(chosen, schedules=names["chunks"]))
        for chunks in numbers
        if chunks > 1 and names["chunks"] and (chosen := with_chunks(settings, chunks, problem.layers)) is not None
    ]
    if several:
        yield several
    plain = names["plain"] or (names["chunks"] if settings.chunks == 1 else ())
    if plain:
        yield [replace(problem, settings=replace(settings, schedules=plain))]
    if names["split"]:
        yield [replace(problem, settings=replace(settings, schedules=names["split"]))]


def with_chunks(settings: Settings, chunks: int, layers: int) -> Settings | None:
    """The settings for so many chunks a rank; None where they do not allow 2 ranks of them."""
    if settings.chunks == chunks:
        return settings
    devices = len(settings.memory_limits)
    limited = settings.max_stages < devices
    most = min(settings.max_stages if limited else devices * chunks, layers)
    fixed = settings.stages
    if most < FEW_RANKS * chunks or (fixed is not None and (fixed % chunks or fixed < FEW_RANKS * chunks)):
        return None
    return replace(settings, chunks=chunks, max_stages=most)


def _kind(name: str) -> str:
    record = SCHEDULES[name]
    return "split" if record.splits_backward else "chunks" if record.most_chunks > 1 else "plain"


def is_plain(settings: Settings) -> bool:
    """Whether the search for one stage a rank and whole backward passes is for them."""
    return settings.chunks == 1 and not any(SCHEDULES[name].splits_backward for name in settings.schedules)
