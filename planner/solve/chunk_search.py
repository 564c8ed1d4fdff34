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

What was not proven stays in the lower bound, and that is where a gap comes from.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.plan.schedules import SCHEDULES
from planner.solve import limits
from planner.solve.balance import TIE, Balance, Unsettled
from planner.solve.chunk_bound import has_room, least_s
from planner.solve.chunk_candidates import fewest_ranks, most_ranks, most_that_fit, plans_of, with_ranks
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import LATE_S, Deadline
from planner.solve.first_plans import MARGIN, PROBES_CLIMBED, FirstPlans, Waiting
from planner.solve.order_start import with_own_orders
from planner.solve.own_orders import FEW_TO_MOVE
from planner.solve.problem import Candidate, Problem
from planner.solve.waiting_bounds import MOST_WORK, PROGRAMS_OF_HALVES, WaitingBounds
from planner.solve.work_bound import even_share_s

ROUNDS_OF_FIRST_PLANS = 3
"""Each nearer to the best one [chosen]."""
PATIENCE = 4
"""Candidates that are searched in vain before the search ends, those left out of which all cuts are tried, if there is
no time limit."""
SOME_IN_VAIN = 4
"""Candidates looked at in vain after which bounds are made no better until there is a plan [chosen: of 521 candidates
of a Llama of 70B parameters on 64 devices none fits under zb-h1, and their bounds took 105 of 120 s]."""
FEW_TO_SEARCH_AGAIN = 1_000
"""Micro-batches of stages up to which those like the best candidate are searched once more [chosen: 1 to 2 s]."""
TIMES_AT_LAST = 4
"""Cuts near the best ones that are tried at last, in those that were tried before [chosen: 0.5 s, and of densenet121 on
8 devices a step 3 % shorter]."""
SHARE_OF_BOUNDS = 0.5
"""Of the time that is left when some candidates were searched in vain, for bounds; then others are searched."""


class _Climbed(NamedTuple):
    """A candidate that was searched, and what no plan of it is below.

    Attributes:
        far: whether no plan was found that fits and is near the best: then memory is short, which bounds leave out.
    """

    climb: CutClimb
    plans: ChunkPlans
    least_s: float
    far: bool


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
        start: a plan of another schedule whose stages are tried with orders made for them.
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
        self._deadline = self._in_time = until or Deadline(problems[0].settings.time_limit_s)
        self._timed = until is None and problems[0].settings.time_limit_s is not None
        self._dispensable = problems[0].dispensable
        self._best, self._below_s = reached, problems[0].below_s
        self._lower_s = np.inf if reached is None else reached.lower_bound_s
        self._in_vain, self._patience = 0, problems[0].patience
        self._bounds = WaitingBounds(np.inf if self._timed else MOST_WORK * self._patience)
        self._began_s = time.monotonic()
        self._climbs: dict[int, _Climbed] = {}
        self._climbed_again: list[_Climbed] = []  # of the search for those like the best one
        self._first_plans = FirstPlans(self._deadline)
        self._best_plans: ChunkPlans | None = None
        self._problems, self._last = problems, until is not None
        self._first: list[Candidate] = []  # of each R and M, over the most ranks
        self._in_segments = False  # whether there is a plan of which no search of cuts says what it takes
        self._queue: list[Waiting] = []  # those that were not searched yet, as a heap
        self._searched: list[Waiting] = []
        self._looked_over_fewer_ranks = False
        self._had_turns: set[int] = set()  # positions of those that the ones with a rank less were made for
        self._number = itertools.count()
        for problem in problems:
            self._begin_with(problem, start)
            for candidate in problem.candidates():
                if self._deadline.over and self._queue and (self._dispensable or self._best is not None):
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
        if self._first_plans.in_vain and not self._first_plans.some_fit:
            self._try_over_fewer_ranks()
        self._search_cuts(PATIENCE * self._patience)
        if self._nothing_fits:
            self._try_over_fewer_ranks()
            self._search_cuts(PATIENCE * self._patience)
        if self._timed:
            self._raise_bounds(Deadline(self._deadline.left_s * SHARE_OF_BOUNDS))
            self._search_cuts(np.inf)
        else:
            self._raise_bounds(self._deadline)
        self._try_fewer_ranks()
        self._search_those_like_the_best()
        if self._timed:
            self._raise_bounds(Deadline(self._deadline.left_s * SHARE_OF_BOUNDS))
            self._try_cuts_near_the_best()
            self._raise_bounds(self._deadline)
        return None if self._best is None else replace(self._best, lower_bound_s=self.least_s)

    def _try_first_plans(self, entries: Sequence[Waiting]) -> None:
        """Search the cuts of those with the fastest first plans; of all that wait these say what they may take."""
        rounds = math.ceil(ROUNDS_OF_FIRST_PLANS * self._patience)
        for entry in self._first_plans.fastest(entries, self._reached_s, rounds):
            self._climbed(entry)
        self._in_vain = min(self._in_vain, 1)
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
        if self._best is None and limit_s is not None and not self._dispensable:
            late_s = self._deadline.left_s + max(limit_s, LATE_S)
            self._deadline = Deadline(late_s, heeds_interrupt=False)
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
        self._deadline = self._in_time
        self._queue += fitting
        self._in_vain = 0
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
        some = self._best is not None or self._dispensable
        if entry is None or entry.bound_s >= self._reached_s or (some and self._deadline.over):
            return None
        self._climbed(entry)
        if self._best is not None:
            self._deadline = self._in_time
        return None if self._climbs[entry.position].far else entry

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
            self._deadline.tell(self._reached_s, min(least_s, self._lower_s), self._patience_s)
            some = self._best is not None or (self._dispensable and len(self._climbs) > 0)
            if self._in_vain >= patience or (self._over and (self._in_vain > 0 or some)):
                heapq.heappush(self._queue, entry)
                break
            if entry.bound_s > self._reached_s * (1 + TIE):
                self._searched.append(entry)
                continue
            fewer = self._with_a_rank_less(entry)
            if fewer is not None:
                heapq.heappush(self._queue, fewer)
            had = entry.position in self._climbs
            if had or self._spent or self._fits_nowhere_yet or self._bounds.is_ready(entry, self._reached_s):
                self._searched.append(entry._replace(bound_s=max(entry.bound_s, self._climbed(entry))))
            else:
                heapq.heappush(self._queue, self._bounds.tightened(entry, self._deadline, self._reached_s))

    def _raise_bounds(self, deadline: Deadline) -> None:
        """Make the lowest bounds better, as long as that raises what no plan is below."""
        waiting = [(entry.bound_s, entry.position, entry) for entry in (*self._queue, *self._searched)]
        heapq.heapify(waiting)
        while waiting and self._best is not None:
            _, _, entry = waiting[0]
            self._deadline.tell(self._reached_s, min(entry.bound_s, self._lower_s))
            if entry.bound_s >= min(self._reached_s, self._lower_s) or deadline.over or self._spent:
                break
            fewer: Waiting | None = None
            if not self._bounds.is_tight(entry, self._reached_s):
                better = self._bounds.tightened(entry, deadline, self._reached_s)
                fewer = self._with_a_rank_less(entry)
            elif self._is_worth_halving(entry):
                better = self._halved(entry, deadline)
            else:
                break
            heapq.heapreplace(waiting, (better.bound_s, better.position, better))
            if fewer is not None:  # only now: of what was first in the heap the better one takes the place
                heapq.heappush(waiting, (fewer.bound_s, fewer.position, fewer))
        every = [entry for _, _, entry in waiting]
        self._searched = [entry for entry in every if entry.position in self._climbs]
        self._queue = [entry for entry in every if entry.position not in self._climbs]
        heapq.heapify(self._queue)

    def _search_those_like_the_best(self) -> None:
        """What is found of a candidate depends on others: on how good its bound is then, and what is below which plan.

        So those like the one that is chosen are searched once more, and no restriction to these has a better plan; or,
        where all are like it, its own cuts from its best bound.
        """
        nearer = self._nearer()
        if not nearer:
            self._go_over_the_best()
            if not self._timed:
                self._try_some_near_the_best()
            return
        search = _Search(nearer, None, None, self._deadline)
        found = search.found()
        if found is not None and found.better_than(self._best):
            self._best, self._best_plans = found, search._best_plans
        self._climbed_again = [*search._climbs.values()]

    def _nearer(self) -> list[Problem]:
        """The problems with the M of the best plan and no more ranks, if that is not what they are; only small ones."""
        plans = self._best_plans
        if plans is None or self._last or self._over:
            return []
        best = plans.candidate
        few = best.ring.stages * best.split.count <= FEW_TO_SEARCH_AGAIN
        if not few or all(one.split == best.split and one.ring.ranks <= best.ring.ranks for one in self._first):
            return []
        return [
            replace(
                problem,
                settings=replace(
                    problem.settings,
                    micro_batches=best.split.count,
                    max_stages=best.ring.ranks * problem.settings.chunks,
                ),
            )
            for problem in self._problems
        ]

    @property
    def least_s(self) -> float:
        """What no plan is below, as far as the search came."""
        return min([self._lower_s, *(entry.bound_s for entry in (*self._queue, *self._searched))])

    @property
    def _over(self) -> bool:
        return self._deadline.over

    @property
    def _reached_s(self) -> float:
        return self._below_s if self._best is None else min(self._below_s, self._best.step_s)

    @property
    def _spent(self) -> bool:
        """Whether bounds took what they may."""
        return self._over or self._bounds.spent

    @property
    def _fits_nowhere_yet(self) -> bool:
        """Whether no plan was found where some were looked for: then bounds, which leave out memory, are of no use."""
        return self._best is None and self._first_plans.in_vain + len(self._climbs) >= SOME_IN_VAIN

    @property
    def _nothing_fits(self) -> bool:
        """Whether no plan was found of all whose cuts were searched."""
        return bool(self._climbs) and all(climbed.far for climbed in self._climbs.values())

    @property
    def _patience_s(self) -> float:
        """Seconds until the search ends in vain, about: others took as long as those that were searched so far."""
        if not self._climbs:
            return np.inf
        each_s = (time.monotonic() - self._began_s) / len(self._climbs)
        return max(0, PATIENCE * self._patience - self._in_vain) * each_s

    def _begin_with(self, problem: Problem, start: Balance | None) -> None:
        """The stages of another schedule's plan are the first ones that orders are made for."""
        for name in problem.settings.schedules:
            if start is not None and SCHEDULES[name].made_for_plan and problem.settings.chunks == 1:
                found = with_own_orders(problem, start, name, self._deadline)
                if found is None:
                    continue
                self._in_segments |= any(
                    [(one.first, one.stop) for one in stage.segments] not in ([], [(stage.first, stage.stop)])
                    for stage in found.stages
                )
                self._best = found if found.better_than(self._best) else self._best

    def _entry(self, problem: Problem, candidate: Candidate) -> Waiting | None:
        """A candidate with its cheap bound; None where the model is too large for so many ranks."""
        plans = plans_of(problem, candidate, self._deadline)
        if not has_room(plans):
            return None
        bound_s = least_s(plans)
        return self._expected(Waiting(bound_s, bound_s, candidate.split.count, next(self._number), plans, None))

    def _expected(self, entry: Waiting) -> Waiting:
        return entry._replace(expected_s=self._first_plans.estimate_s(entry, self._reached_s))

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
        climbed = self._climbs.get(entry.position)
        return climbed is not None and not climbed.far and entry.search is not None and not entry.search.closed

    def _halved(self, entry: Waiting, deadline: Deadline) -> Waiting:
        """A candidate of which some of what is between its bound and the best plan is closed, by halves of its cuts."""
        search = entry.search
        assert search is not None
        stops = search.stops
        better = self._bounds.halved(entry, deadline, self._reached_s)
        if search.stops is not None and search.stops != stops:
            self._note(entry.plans, self._climbs[entry.position].climb.at(search.stops, self._reached_s))
        return better

    def _climbed(self, entry: Waiting) -> float:
        """Search the cuts of a candidate, once; what no plan of it is below, as far as that shows it."""
        if entry.position in self._climbs:
            return self._climbs[entry.position].least_s
        bound = entry.search or CutBound(entry.plans)
        climb = CutClimb(entry.plans, bound, self._deadline)
        choices, least_of_all_s = climb.found(self._reached_s)
        least_s = bound.step_s if self._in_segments else max(bound.step_s, least_of_all_s)
        self._climbs[entry.position] = _Climbed(climb, entry.plans, least_s, not choices and not climb.hopeless)
        self._in_vain += not climb.tries_all_cuts
        if choices:
            self._first_plans.note(entry, min(choice.step_s for choice in choices))
        for choice in choices:
            self._note(entry.plans, choice)
        return self._climbs[entry.position].least_s

    def _note(self, plans: ChunkPlans, choice: ChunkChoice | None) -> None:
        """Keep a plan that is better than the best."""
        found = None if choice is None else plans.balance(plans.finished(choice))
        if found is not None and found.better_than(self._best):
            self._best, self._in_vain = found, 0
            self._best_plans = plans

    def _try_fewer_ranks(self) -> None:
        """Search the best candidate over fewer ranks, too, where these may take no longer.

        They may where one layer takes much of a rank's share. Bounds of many ranks are loose there and come first, so
        that the search can end before those of few: of vgg16 on 8 devices a step was 1 % longer than on 4 of them.
        """
        plans = self._best_plans
        if plans is None or plans.problem.settings.stages is not None:
            return
        probed: list[tuple[float, Waiting]] = []
        for ranks in range(plans.ranks - 1, fewest_ranks(plans.problem) - 1, -1):
            entry = self._entry(plans.problem, with_ranks(plans.candidate, ranks, plans.ring.chunks))
            if self._over or entry is None or entry.bound_s >= self._reached_s:
                break
            probed.append((self._first_plans.step_s(entry, self._reached_s * MARGIN), entry))
        for step_s, entry in sorted(probed)[:PROBES_CLIMBED]:
            if step_s < np.inf:
                self._climbed(entry)

    def _go_over_the_best(self) -> None:
        """Search the best candidate's cuts from its best bound, where ranks have several chunks and their own orders.

        How good a bound is when its cuts are searched depends on other candidates: of densenet121 on 8 devices a step
        was 4 % longer.
        """
        plans = self._best_plans
        if plans is None or plans.ring.chunks == 1 or plans.tries_all or self.least_s >= self._reached_s:
            return
        if self._over or (self._spent and plans.stages > limits.STAGES_OF_WORK):
            return
        bound = CutBound(plans)
        bound.tightened(PROGRAMS_OF_HALVES, self._deadline)
        climb = CutClimb(plans, bound, self._deadline)
        for choice in () if climb.tries_all_cuts else climb.found(self._reached_s)[0]:
            self._note(plans, choice)

    def _try_some_near_the_best(self) -> None:
        """Where there is a gap and that is soon done, which it is not where single passes are moved for all cuts."""
        plans = self._best_plans
        if plans is None or self._over or self.least_s >= self._reached_s * (1 - TIE):
            return
        passes = plans.stages * plans.candidate.split.count
        moves = SCHEDULES[plans.candidate.schedule].made_for_plan and passes <= FEW_TO_MOVE
        climb = next(climbed.climb for climbed in self._climbs.values() if climbed.plans is plans)
        if passes <= FEW_TO_SEARCH_AGAIN and not moves and not climb.tries_all_cuts:
            self._note(plans, climb.kicked(TIMES_AT_LAST))

    def _try_cuts_near_the_best(self) -> None:
        """As long as there is time and a gap."""
        climbs = [*self._climbs.values(), *self._climbed_again]
        for climbed in sorted(climbs, key=lambda one: one.plans is not self._best_plans):
            if self._over or self._best is None or self.least_s >= self._reached_s * (1 - TIE):
                return
            if not climbed.climb.tries_all_cuts and climbed.least_s < self._reached_s:
                self._note(climbed.plans, climbed.climb.kicked())
