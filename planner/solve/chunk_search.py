"""The search for plans with several chunks a rank: cuts, number of ranks, M and R together.

A candidate is a schedule, R, M, and numbers of ranks and of chunks. They wait in the order of what they may take: of a
cheap bound (`planner.solve.chunk_bound`), or of what first plans near them say, since a bound leaves out memory
(`planner.solve.first_plans`).

1. The candidates of the fastest first plans are searched (`planner.solve.cut_climb`), and then those whose turn comes,
   after a few linear programs (`planner.solve.cut_bound`) that say which cuts would be best, until some were in vain.
2. These go over as many ranks as there are devices for, and over one less when their turn has come. Where none of them
   fits, the smallest micro-batches are tried over fewer and fewer ranks, and all others over as many as fit.
3. Then the lowest bounds are made better, by more linear programs and by halves of cuts, as long as that raises what no
   plan is below.
4. At last (`planner.solve.last_tries`) the best candidate is tried over fewer ranks and with other M, those like it are
   searched once more, and with a time limit more cuts near the best ones are, as long as there is a gap.

What was not proven stays in the lower bound, and that is where a gap comes from.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.plan.schedules import SCHEDULES
from planner.solve.balance import TIE, Balance, Unsettled
from planner.solve.chunk_bound import has_room, least_s
from planner.solve.chunk_candidates import fewest_ranks, most_ranks, most_that_fit, plans_of, with_ranks
from planner.solve.deadline import LATE_S, Deadline
from planner.solve.findings import Climbed, Findings
from planner.solve.first_plans import Waiting
from planner.solve.last_tries import (
    go_over_the_best,
    nearer,
    try_beside_the_best,
    try_cuts_near_the_best,
    try_fewer_ranks,
    try_some_near_the_best,
)
from planner.solve.order_start import split_of
from planner.solve.problem import Candidate, Problem
from planner.solve.waiting_bounds import MOST_WORK, WaitingBounds
from planner.solve.work_bound import even_share_s

ROUNDS_OF_FIRST_PLANS = 3
"""Each nearer to the best one [chosen]."""
PATIENCE = 4
"""Candidates that are searched in vain before the search ends, those left out of which all cuts are tried, if there is
no time limit."""
SOME_IN_VAIN = 4
"""Candidates looked at in vain after which bounds are made no better until there is a plan [chosen: of 521 candidates
of a Llama of 70B parameters on 64 devices none fits under zb-h1, and their bounds took 105 of 120 s]."""
SHARE_OF_BOUNDS = 0.5
"""Of the time that is left when some candidates were searched in vain, for bounds; then others are searched."""


def chunk_balance(
    problem: Problem,
    *others: Problem,
    reached: Balance | None = None,
    start: Balance | None = None,
    unsettled: Unsettled | None = None,
) -> Balance | None:
    """The fastest plan with as many chunks a rank as the settings say; None when none was found that fits.

    Args:
        problem: with schedules that all may have so many chunks.
        others: the same with other numbers of chunks: one search for all, in which candidates wait in one queue.
        reached: the best plan of other schedules: returned if nothing faster is found, and its lower bound counts.
        start: a plan of another schedule whose stages are tried with a split backward pass.
        unsettled: notes what is left where there is no plan.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    search = _Search((problem, *others), reached, start)
    found = search.found()
    if found is None:
        if unsettled is not None:
            unsettled.note(search.least_s)
        return None
    return replace(found, lower_bound_s=min(found.lower_bound_s, found.step_s))


class _Search:
    """The search of `chunk_balance`.

    Args:
        problems: alike but for the number of chunks and the schedules.
        reached: the best plan of other schedules.
        start: a plan of another schedule.
        until: a search that is part of another one ends with it, or when it would without a time limit.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        reached: Balance | None,
        start: Balance | None,
        until: Deadline | None = None,
    ) -> None:
        self._in_time = until or Deadline(problems[0].settings.time_limit_s)
        self._timed = until is None and problems[0].settings.time_limit_s is not None
        self._dispensable, self._patience = problems[0].dispensable, problems[0].patience
        self._so_far = Findings(problems[0], reached, self._in_time)
        self._lower_s = np.inf if reached is None else reached.lower_bound_s
        self._bounds = WaitingBounds(np.inf if self._timed else MOST_WORK * self._patience)
        self._began_s = time.monotonic()
        self._again: list[Climbed] = []  # of the search for those like the best one
        self._problems, self._last = problems, until is not None
        self._first: list[Candidate] = []  # of each R and M, over the most ranks
        self._queue: list[Waiting] = []  # those that were not searched yet, as a heap
        self._searched: list[Waiting] = []
        self._looked_over_fewer_ranks = False
        self._had_turns: set[int] = set()  # positions of those that the ones with a rank less were made for
        self._number = itertools.count()
        for problem in problems:
            self._begin_with(problem, start)
            for candidate in problem.candidates():
                if self._so_far.deadline.over and self._queue and (self._dispensable or self._so_far.best is not None):
                    self._lower_s = min(self._lower_s, even_share_s(problem))
                    break
                ranks = most_ranks(problem, candidate)
                if ranks:
                    self._first.append(with_ranks(candidate, ranks, problem.settings.chunks))
                    entry = self._entry(problem, self._first[-1])
                    self._queue += [] if entry is None else [entry]

    def found(self) -> Balance | None:
        """The best plan, and what none is below."""
        self._try_first_plans(self._queue)
        if self._so_far.first_plans.in_vain and not self._so_far.first_plans.some_fit:
            self._try_over_fewer_ranks()
        self._search_cuts(PATIENCE * self._patience)
        if self._so_far.nothing_fits:
            self._try_over_fewer_ranks()
            self._search_cuts(PATIENCE * self._patience)
        if self._timed:
            self._raise_bounds(Deadline(self._so_far.deadline.left_s * SHARE_OF_BOUNDS))
            self._search_cuts(np.inf)
        else:
            self._raise_bounds(self._so_far.deadline)
        try_fewer_ranks(self._so_far, self._entry)
        try_beside_the_best(self._so_far, self._entry)
        self._search_those_like_the_best()
        if self._timed:
            self._raise_bounds(Deadline(self._so_far.deadline.left_s * SHARE_OF_BOUNDS))
            try_cuts_near_the_best(self._so_far, self._again, self.least_s)
            self._raise_bounds(self._so_far.deadline)
        best = self._so_far.best
        return None if best is None else replace(best, lower_bound_s=self.least_s)

    def _try_first_plans(self, entries: Sequence[Waiting]) -> None:
        """Search the cuts of those with the fastest first plans; of all that wait these say what they may take."""
        rounds = math.ceil(ROUNDS_OF_FIRST_PLANS * self._patience)
        for entry in self._so_far.first_plans.fastest(entries, self._so_far.reached_s, rounds):
            self._so_far.search(entry)
        self._so_far.in_vain = min(self._so_far.in_vain, 1)
        self._queue = [self._expected(entry) for entry in self._queue]
        heapq.heapify(self._queue)

    def _try_over_fewer_ranks(self) -> None:
        """Where nothing fits: let those wait that go over the most ranks over which the smallest micro-batches do.

        Fewer ranks keep fewer messages, and fewer micro-batches under way on the first. What has no other plan goes on
        for that when time is up.
        """
        if self._looked_over_fewer_ranks:
            return
        self._looked_over_fewer_ranks = True
        limit_s = self._problems[0].settings.time_limit_s
        if self._so_far.best is None and limit_s is not None and not self._dispensable:
            late_s = self._so_far.deadline.left_s + max(limit_s, LATE_S)
            self._so_far.deadline = Deadline(late_s, heeds_interrupt=False)
        kinds: dict[tuple[str, int, int], dict[int, Waiting]] = {}
        for entry in sorted((*self._queue, *self._searched), key=lambda one: (one.micro_batches, one.plans.ranks)):
            own = entry.plans.candidate
            kinds.setdefault((own.schedule, own.replicas, own.ring.chunks), {})[entry.micro_batches] = entry
        fitting: list[Waiting] = []
        for entries in kinds.values():
            *others, roomiest = entries.values()
            found = self._over_most_ranks_that_fit(roomiest)
            if found is not None and found is not roomiest:
                like_it = (self._with_so_many(entry, found.plans.ranks) for entry in others)
                fitting += [found, *(entry for entry in like_it if entry is not None)]
        self._so_far.deadline = self._in_time
        self._queue += fitting
        self._so_far.in_vain = 0
        self._try_first_plans(fitting)

    def _over_most_ranks_that_fit(self, entry: Waiting) -> Waiting | None:
        """A candidate over the most ranks over which a plan of it was found; None if there are none."""
        most, least = entry.plans.ranks, fewest_ranks(entry.plans.problem)
        if entry.plans.problem.settings.stages is not None:
            least = most

        def over(ranks: int) -> Waiting | None:
            return self._fitting(entry if ranks == most else self._with_so_many(entry, ranks))

        return most_that_fit(over, most, least)

    def _fitting(self, entry: Waiting | None) -> Waiting | None:
        """A candidate after its cuts were searched, if a plan was found that fits and is not far slower."""
        some = self._so_far.best is not None or self._dispensable
        if entry is None or entry.bound_s >= self._so_far.reached_s or (some and self._so_far.deadline.over):
            return None
        self._so_far.search(entry)
        if self._so_far.best is not None:
            self._so_far.deadline = self._in_time
        return None if self._so_far.climbs[entry.position].far else entry

    def _with_so_many(self, entry: Waiting, ranks: int) -> Waiting | None:
        """The same candidate over so many ranks; None where it has no more, or the model is too large for these."""
        plans = entry.plans
        if plans.ranks <= ranks:
            return None
        return self._entry(plans.problem, with_ranks(plans.candidate, ranks, plans.ring.chunks))

    def _search_cuts(self, patience: float) -> None:
        """Search the cuts of those that wait in their order, until so many were in vain or time is up."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            least_s = min(waiting.bound_s for waiting in (entry, *self._queue, *self._searched))
            self._so_far.deadline.tell(self._so_far.reached_s, min(least_s, self._lower_s), self._patience_s)
            some = self._so_far.best is not None or (self._dispensable and len(self._so_far.climbs) > 0)
            if self._so_far.in_vain >= patience or (self._so_far.over and (self._so_far.in_vain > 0 or some)):
                heapq.heappush(self._queue, entry)
                break
            if entry.bound_s > self._so_far.reached_s * (1 + TIE):
                self._searched.append(entry)
                continue
            fewer = self._with_a_rank_less(entry)
            if fewer is not None:
                heapq.heappush(self._queue, fewer)
            had = entry.position in self._so_far.climbs
            if had or self._spent or self._fits_nowhere_yet or self._bounds.is_ready(entry, self._so_far.reached_s):
                self._searched.append(entry._replace(bound_s=max(entry.bound_s, self._so_far.search(entry))))
            else:
                heapq.heappush(
                    self._queue, self._bounds.tightened(entry, self._so_far.deadline, self._so_far.reached_s)
                )

    def _raise_bounds(self, deadline: Deadline) -> None:
        """Make the lowest bounds better, as long as that raises what no plan is below."""
        waiting = [(entry.bound_s, entry.position, entry) for entry in (*self._queue, *self._searched)]
        heapq.heapify(waiting)
        while waiting and self._so_far.best is not None:
            _, _, entry = waiting[0]
            self._so_far.deadline.tell(self._so_far.reached_s, min(entry.bound_s, self._lower_s))
            if entry.bound_s >= min(self._so_far.reached_s, self._lower_s) or deadline.over or self._spent:
                break
            fewer: Waiting | None = None
            if not self._bounds.is_tight(entry, self._so_far.reached_s):
                better = self._bounds.tightened(entry, deadline, self._so_far.reached_s)
                fewer = self._with_a_rank_less(entry)
            elif self._is_worth_halving(entry):
                better = self._halved(entry, deadline)
            else:
                break
            heapq.heapreplace(waiting, (better.bound_s, better.position, better))
            if fewer is not None:  # only now: of what was first in the heap the better one takes the place
                heapq.heappush(waiting, (fewer.bound_s, fewer.position, fewer))
        every = [entry for _, _, entry in waiting]
        self._searched = [entry for entry in every if entry.position in self._so_far.climbs]
        self._queue = [entry for entry in every if entry.position not in self._so_far.climbs]
        heapq.heapify(self._queue)

    def _search_those_like_the_best(self) -> None:
        """What is found of a candidate depends on others: on how good its bound is then, and what is below which plan.

        So those like the one that is chosen are searched once more, and no restriction to these has a better plan; or,
        where all are like it, its own cuts from its best bound.
        """
        problems = [] if self._last else nearer(self._so_far, self._problems, self._first)
        if not problems:
            go_over_the_best(self._so_far, self.least_s, self._spent)
            if not self._timed:
                try_some_near_the_best(self._so_far, self.least_s)
            return
        search = _Search(problems, None, None, self._so_far.deadline)
        search.found()
        self._so_far.take_over(search._so_far)
        self._again = [*search._so_far.climbs.values()]

    @property
    def least_s(self) -> float:
        """What no plan is below, as far as the search came."""
        return min([self._lower_s, *(entry.bound_s for entry in (*self._queue, *self._searched))])

    @property
    def _spent(self) -> bool:
        """Whether bounds took what they may."""
        return self._so_far.over or self._bounds.spent

    @property
    def _fits_nowhere_yet(self) -> bool:
        """Whether no plan was found where some were looked for: then bounds, which leave out memory, are of no use."""
        return self._so_far.best is None and self._so_far.first_plans.in_vain + len(self._so_far.climbs) >= SOME_IN_VAIN

    @property
    def _patience_s(self) -> float:
        """Seconds until the search ends in vain, about: others took as long as those that were searched so far."""
        if not self._so_far.climbs:
            return np.inf
        each_s = (time.monotonic() - self._began_s) / len(self._so_far.climbs)
        return max(0, PATIENCE * self._patience - self._so_far.in_vain) * each_s

    def _begin_with(self, problem: Problem, start: Balance | None) -> None:
        """The stages of another schedule's plan are the first ones whose backward passes are split."""
        for name in problem.settings.schedules:
            if start is not None and SCHEDULES[name].splits_backward and problem.settings.chunks == 1:
                found = split_of(problem, start, name, self._so_far.deadline)
                if found is None:
                    continue
                self._so_far.in_segments |= any(
                    [(one.first, one.stop) for one in stage.segments] not in ([], [(stage.first, stage.stop)])
                    for stage in found.stages
                )
                self._so_far.best = found if found.better_than(self._so_far.best) else self._so_far.best

    def _entry(self, problem: Problem, candidate: Candidate) -> Waiting | None:
        """A candidate with its cheap bound; None where the model is too large for so many ranks."""
        plans = plans_of(problem, candidate, self._so_far.deadline)
        if not has_room(plans):
            return None
        bound_s = least_s(plans)
        return self._expected(Waiting(bound_s, bound_s, candidate.split.count, next(self._number), plans, None))

    def _expected(self, entry: Waiting) -> Waiting:
        return entry._replace(expected_s=self._so_far.estimate_s(entry))

    def _with_a_rank_less(self, entry: Waiting) -> Waiting | None:
        """The same candidate with a rank less, whose bound is above this one's; it is made when this one's turn comes.

        None where there is none, or it was made.
        """
        problem, plans = entry.plans.problem, entry.plans
        if entry.position in self._had_turns:
            return None
        self._had_turns.add(entry.position)
        if problem.settings.stages is not None or plans.ranks <= fewest_ranks(problem):
            return None
        return self._entry(problem, with_ranks(plans.candidate, plans.ranks - 1, problem.settings.chunks))

    def _is_worth_halving(self, entry: Waiting) -> bool:
        """Whether halves of its cuts may show that no plan of a candidate that was searched is faster."""
        climbed = self._so_far.climbs.get(entry.position)
        return climbed is not None and not climbed.far and entry.search is not None and not entry.search.closed

    def _halved(self, entry: Waiting, deadline: Deadline) -> Waiting:
        """A candidate of which some of what is between its bound and the best plan is closed, by halves of its cuts."""
        search = entry.search
        assert search is not None
        stops = search.stops
        better = self._bounds.halved(entry, deadline, self._so_far.reached_s)
        if search.stops is not None and search.stops != stops:
            self._so_far.note(
                entry.plans, self._so_far.climbs[entry.position].climb.at(search.stops, self._so_far.reached_s)
            )
        return better
