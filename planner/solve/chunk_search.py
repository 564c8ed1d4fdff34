"""The search for plans with several chunks a rank: cuts, number of ranks, M and R together.

A candidate is a schedule, R, M, and a number of ranks. They wait in the order of a bound: first an even share of the
work, then `planner.solve.chunk_bound`, which also says how large the stages would best be. For those whose turn comes:

1. where there are few ways to cut, all are tried;
2. otherwise cuts are laid where the bound's stages would end, and moved as long as the step becomes shorter: one cut, a
   run of neighbouring cuts, or two cuts against each other; then again from cuts near the best ones;
3. of cuts that do not fit, the ones with fewer bytes too many are better.

What was not proven stays in the lower bound, and that is where a gap comes from.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats
from planner.plan.schedules import SCHEDULES, Ring
from planner.plan.units import bytes_text
from planner.solve.balance import TIE, Balance
from planner.solve.chunk_bound import ChunkBound, chunk_bound, least_s
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans, Stops
from planner.solve.deadline import Deadline
from planner.solve.own_order_plans import OwnOrderPlans
from planner.solve.problem import Candidate, Problem

FEW_CUTS = 2_000
"""Ways to cut that are all tried [chosen: 0.2 s]."""
REACH = (1, 2, 4, 8)
"""Places by which cuts are moved."""
KICKS = 8
"""Times that cuts near the best ones are tried."""
MOST_ORDERS = 60
"""Orders of unlike devices that are tried; the bound is for all."""
MOST_PASSES, FEWEST_TRIED = 2_000_000, 300
"""Passes, of all cuts tried of one candidate together, and how many cuts are tried at least [chosen: 0.5 s]."""
PATIENCE = 6
"""Candidates that are searched in vain before the search ends, those left out of which all cuts are tried, if there is
no time limit."""
MOST_LOOKED_AT = 12
"""Candidates, spread over all, of which one is named that is near to fitting."""
FEW_RANKS = 2
"""Fewer have nothing to interleave."""


class _Waiting(NamedTuple):
    """A candidate that was not searched; of equal bounds the one with fewer micro-batches comes first."""

    bound_s: float
    micro_batches: int
    position: int
    plans: ChunkPlans
    bound: ChunkBound | None


def chunk_balance(problem: Problem, reached: Balance | None = None) -> Balance | None:
    """The fastest plan with as many chunks a rank as the settings say; None when none was found that fits.

    Args:
        problem: with schedules that all may have so many chunks.
        reached: the best plan of other schedules: returned if nothing faster is found, and its lower bound counts.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    deadline = Deadline(problem.settings.time_limit_s)
    patience = PATIENCE if problem.settings.time_limit_s is None else np.inf
    best = reached
    lower_bound_s, in_vain = np.inf if reached is None else reached.lower_bound_s, 0
    queue = [
        _Waiting(least_s(plans), plans.candidate.split.count, position, plans, None)
        for position, plans in enumerate(plans_of(problem, candidate) for candidate in candidates(problem))
    ]
    heapq.heapify(queue)
    while queue:
        entry = heapq.heappop(queue)
        reached_s = np.inf if best is None else best.step_s
        deadline.tell(reached_s, min(entry.bound_s, lower_bound_s))
        enough = deadline.over or (best is not None and in_vain >= patience)
        if entry.bound_s > reached_s * (1 + TIE) or (enough and in_vain):
            lower_bound_s = min(lower_bound_s, entry.bound_s)
            break
        if entry.bound is None:
            bound = chunk_bound(entry.plans, deadline, reached_s)
            heapq.heappush(queue, entry._replace(bound_s=max(entry.bound_s, bound.step_s), bound=bound))
            continue
        climb = _Climb(entry.plans, entry.bound, deadline)
        choice, least_of_all_s = climb.found(reached_s)
        lower_bound_s = min(lower_bound_s, max(entry.bound_s, least_of_all_s))
        found = None if choice is None else entry.plans.balance(entry.plans.finished(choice))
        in_vain += not climb.tries_all_cuts
        if found is not None and found.better_than(best):
            best, in_vain = found, 0
    return None if best is None else replace(best, lower_bound_s=min(lower_bound_s, best.step_s))


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every schedule, R, M and number of ranks that the settings allow."""
    chunks, stages = problem.settings.chunks, problem.settings.stages
    fewest = 1 if chunks == 1 else FEW_RANKS
    for candidate in problem.candidates():
        most = problem.most_stages(candidate.replicas, candidate.split.count) // chunks
        for ranks in range(fewest, most + 1) if stages is None else (stages // chunks,):
            yield replace(candidate, ring=Ring(ranks, chunks))


def plans_of(problem: Problem, candidate: Candidate) -> ChunkPlans:
    """The plans of a candidate: with the schedule's order, or with orders of their own."""
    own = SCHEDULES[candidate.schedule].made_for_plan
    return OwnOrderPlans(problem, candidate) if own else ChunkPlans(problem, candidate)


def nothing_fits_text(problem: Problem) -> str:
    """How far the nearest plan that was found is from fitting."""
    nearest: tuple[float, ChunkPlans, Stops, tuple[int, ...]] | None = None
    every = list(candidates(problem))
    picks = np.linspace(0, len(every) - 1, min(len(every), MOST_LOOKED_AT)).round().astype(int)
    for pick in picks:
        plans = plans_of(problem, every[pick])
        bound = chunk_bound(plans, Deadline(None, heeds_interrupt=False), enough_s=0.0)
        found = _Climb(plans, bound, Deadline(None, heeds_interrupt=False)).nearest()
        if found is not None and (nearest is None or found[0] < nearest[0]):
            nearest = found[0], plans, found[1], found[2]
    if nearest is None:
        return "no number of ranks and micro-batches satisfies all settings; drop or loosen one"
    _, plans, stops, classes = nearest
    rank = max(range(plans.ranks), key=lambda rank: plans.over_bytes(rank, stops, classes))
    device = problem.classes[classes[rank]].device
    more = plans.over_bytes(rank, stops, classes)
    chunks, fewer = f"{problem.settings.chunks} chunks a rank", "Try fewer chunks"
    if problem.settings.chunks == 1:
        chunks, fewer = f"schedule {' or '.join(map(repr, problem.settings.schedules))}", "Try another schedule"
    return (
        f"no plan with {chunks} was found that fits the memory. The nearest one has "
        f"{plans.ranks} ranks and M = {plans.candidate.split.count} micro-batches; its rank {rank} needs "
        f"{bytes_text(device.memory_bytes + more)} and device {device.name} ({device.kind}) has "
        f"{bytes_text(device.memory_bytes)}: {more} bytes ({bytes_text(more)}) too many. {fewer}"
        + ("" if problem.settings.recompute == "auto" else ', recompute="auto"')
        + ", more devices or a smaller batch"
    )


class _Climb:
    """The search for the cuts of one candidate.

    Args:
        plans: of the candidate.
        bound: of it.
        deadline: when to stop.
    """

    def __init__(self, plans: ChunkPlans, bound: ChunkBound, deadline: Deadline) -> None:
        self._plans, self._bound, self._deadline = plans, bound, deadline
        rules = plans.problem.rules
        self._places = [int(place) for place in np.flatnonzero(rules.allowed)][1:-1]
        self._demanded = {int(place) for place in np.flatnonzero(rules.demanded)}
        self._layers = plans.problem.layers
        self._chance = random.Random(0)
        self._most_tried = max(
            FEWEST_TRIED, MOST_PASSES // (2 * plans.walks * plans.stages * plans.candidate.split.count)
        )
        self._tried: dict[tuple[Stops, tuple[int, ...]], _Score] = {}

    def found(self, below_s: float) -> tuple[ChunkChoice | None, float]:
        """The fastest plan that was found, and what no plan of the candidate is below, as far as that shows it.

        Args:
            below_s: slower ones are not looked for where all cuts are tried.
        """
        orders = list(_orders(self._plans))
        if self.tries_all_cuts:
            return self._best_of_all(orders, below_s)
        for start in self._starts():
            for classes in orders:
                self._climbed(start, classes)
        for _ in range(KICKS if self._tried else 0):
            stops, classes, best = self._best()
            if self._over or best.step_s <= self._bound.step_s:
                break
            self._climbed(self._kicked(stops), classes)
        return (self._best()[2].choice if self._tried else None), 0.0

    @property
    def tries_all_cuts(self) -> bool:
        """Whether there are so few ways to cut and to order devices that all are tried."""
        orders = sum(1 for _ in _orders(self._plans))
        return math.comb(len(self._places), self._plans.stages - 1) * orders <= FEW_CUTS and orders < MOST_ORDERS

    @property
    def _over(self) -> bool:
        """Whether enough was tried."""
        return self._deadline.over or len(self._tried) >= self._most_tried

    def _best(self) -> tuple[Stops, tuple[int, ...], _Score]:
        """The best cuts and order of devices so far."""
        (stops, classes), score = min(self._tried.items(), key=lambda item: item[1].rank())
        return stops, classes, score

    def nearest(self) -> tuple[float, Stops, tuple[int, ...]] | None:
        """Bytes too many of the cuts with the fewest, these cuts and the order of the devices; None without cuts."""
        classes = next(_orders(self._plans))
        for start in self._starts():
            self._climbed(start, classes)
        if not self._tried:
            return None
        stops, classes, score = self._best()
        return score.over_bytes, stops, classes

    def _best_of_all(self, orders: Sequence[tuple[int, ...]], below_s: float) -> tuple[ChunkChoice | None, float]:
        """The best of all cuts, and the least that any may take: where orders are made, one not found may be faster."""
        every = [
            (*inner, self._layers)
            for inner in itertools.combinations(self._places, self._plans.stages - 1)
            if self._demanded <= {*inner}
        ]
        at_best = sorted(
            (self._plans.at_best_s(stops, classes), stops, classes) for stops in every for classes in orders
        )
        best: ChunkChoice | None = None
        for step_s, stops, classes in at_best:
            reached_s = below_s if best is None else best.step_s
            if step_s >= reached_s:
                break
            best = self._plans.fitted(stops, classes, reached_s) or best
        if self._plans.tries_all:
            return best, below_s if best is None else best.step_s
        return best, at_best[0][0] if at_best else np.inf

    def _starts(self) -> list[Stops]:
        """Cuts where the bound's stages would end, and for equal shares of the work."""
        forward = self._plans.forward_s[0].min(axis=0)
        work = forward + self._plans.backward_s[0].min(axis=0)
        best = np.cumsum(self._bound.forward_s) / max(self._bound.forward_s.sum(), np.finfo(float).tiny)
        even = np.arange(1, self._plans.stages + 1) / self._plans.stages
        starts = self._laid(forward, best), self._laid(work, best), self._laid(work, even)
        return list(dict.fromkeys(start for start in starts if start is not None))

    def _laid(self, sums: Floats, shares: Floats) -> Stops | None:
        """The cuts that are nearest in sum to these shares of the work; None where the rules allow none."""
        places = [0, *self._places, self._layers]
        wanted = shares * sums[-1]
        least_before = np.zeros(len(places), dtype=np.int64)  # place of the last demanded cut before each place
        for number in range(1, len(places)):
            demanded = places[number - 1] in self._demanded
            least_before[number] = number - 1 if demanded else least_before[number - 1]
        away = np.abs(sums[places][None, :] - wanted[:, None])
        reached = np.full(len(places), np.inf)
        reached[0] = 0.0
        came_from = np.zeros((len(wanted), len(places)), dtype=np.int64)
        for stage in range(len(wanted)):
            following = np.full(len(places), np.inf)
            for number in range(stage + 1, len(places)):
                before = slice(least_before[number], number)
                nearest = int(np.argmin(reached[before])) + before.start
                came_from[stage, number] = nearest
                following[number] = reached[nearest] + away[stage, number]
            reached = following
        if not np.isfinite(reached[-1]):
            return None
        number, stops = len(places) - 1, []
        for stage in reversed(range(len(wanted))):
            stops.append(places[number])
            number = int(came_from[stage, number])
        return tuple(reversed(stops))

    def _climbed(self, stops: Stops, classes: tuple[int, ...]) -> None:
        """Move these cuts until no move makes them better."""
        best = self._score(stops, classes, _Score(np.inf, np.inf, None))
        moved = True
        while moved:
            moved = False
            for move in self._moves():
                if self._over:
                    return
                other = self._moved(stops, move)
                if other is None or (other, classes) in self._tried:
                    continue
                score = self._score(other, classes, best)
                if score.rank() < best.rank():
                    best, stops, moved = score, other, True

    def _score(self, stops: Stops, classes: tuple[int, ...], best: _Score) -> _Score:
        """How good these cuts are; how slow exactly is found only for those faster than the best that fit."""
        key = stops, classes
        if key not in self._tried:
            below_s = best.step_s if best.over_bytes == 0 else np.inf
            choice = self._plans.fitted(stops, classes, below_s)
            if choice is not None:
                self._tried[key] = _Score(0.0, choice.step_s, choice)
            elif below_s < np.inf:
                self._tried[key] = _Score(np.inf, np.inf, None)
            else:
                over = sum(self._plans.over_bytes(rank, stops, classes) for rank in range(self._plans.ranks))
                self._tried[key] = _Score(over, np.inf, None)
        return self._tried[key]

    def _moves(self) -> Iterator[tuple[int, ...]]:
        """By how many places each cut moves."""
        cuts = self._plans.stages - 1
        for length in range(1, cuts + 1):
            for first in range(cuts - length + 1):
                for reach in REACH if length == 1 else REACH[:2]:
                    for step in (reach, -reach):
                        yield (0,) * first + (step,) * length + (0,) * (cuts - first - length)
        for one, other in itertools.permutations(range(cuts), 2):
            yield tuple((cut == one) - (cut == other) for cut in range(cuts))

    def _moved(self, stops: Stops, move: Sequence[int]) -> Stops | None:
        """The cuts after a move; None where they would meet, leave the model or a place where a cut must be."""
        inner: list[int] = []
        for stop, step in zip(stops, move, strict=False):
            number = bisect_left(self._places, stop) + step
            if not 0 <= number < len(self._places) or (inner and self._places[number] <= inner[-1]):
                return None
            inner.append(self._places[number])
        return (*inner, self._layers) if self._demanded <= {*inner} else None

    def _kicked(self, stops: Stops) -> Stops:
        """Cuts near these."""
        cuts = self._plans.stages - 1
        for _ in range(4 * cuts):
            move = [0] * cuts
            for _ in range(min(3, cuts)):
                move[self._chance.randrange(cuts)] += self._chance.choice((-2, -1, 1, 2))
            other = self._moved(stops, move)
            if other is not None:
                return other
        return stops


class _Score(NamedTuple):
    """Bytes too many on all devices together, the step's seconds if it fits, and the plan."""

    over_bytes: float
    step_s: float
    choice: ChunkChoice | None

    def rank(self) -> tuple[float, float]:
        """Less is better."""
        return self.over_bytes, self.step_s


def _orders(plans: ChunkPlans) -> Iterator[tuple[int, ...]]:
    """Orders of devices, as classes by rank; all of them where they are few."""
    replicas, classes = plans.candidate.replicas, plans.problem.classes
    able = [index for index, group in enumerate(classes) for _ in range(min(plans.ranks, group.capacity(replicas)))]
    seen: set[tuple[int, ...]] = set()
    for order in itertools.permutations(able, plans.ranks):
        if order not in seen:
            seen.add(order)
            yield order
        if len(seen) == MOST_ORDERS or len(classes) == 1:
            return
