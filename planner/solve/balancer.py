"""The balancer: the plan with the smallest step time, and how far from the optimum that may be.

The problem is looked at in parts (`planner.solve.parts`). They wait in the order of a cheap bound
(`planner.solve.work_bound`), then of a bound from their stages; most end there. For each that does not:

1. Of 1F1B all that differ from it in M alone are bounded together (`planner.solve.many_counts`), and then each half of
   them when its turn comes, until it is alone.
2. A proof is tried: a search (`planner.solve.candidate_search`) for anything faster than the best plan. Mostly it finds
   the best plan of the part, or that there is none.
3. Where it is cut off, nothing that it found counts, and the part falls into smaller ones.
4. One of the smallest is searched for itself, whatever is known of others: quickly, and again with larger and larger
   limits, until its plan is proven the best of the part or time is up. Where the closed form is only a bound, its paths
   are searched before that (`planner.solve.path_search`).

In large problems a first plan is climbed from before any proof: with other M, K and R (`planner.solve.ladder`).

So a search of fewer parts finds no plan that a search of all of them misses, as long as there is time. When that is
short the order counts: the best plan so far says which part comes next (`_ahead_of`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from planner.plan.schedules import SCHEDULES, Objective
from planner.solve.balance import TIE, Balance, Unsettled, best_of, evaluate_s
from planner.solve.candidate_search import ARC_S, CandidateSearch
from planner.solve.deadline import LATE_S, Deadline
from planner.solve.ladder import Ladder
from planner.solve.limits import LAST_LEVEL, Limits
from planner.solve.many_counts import alike, bound_of_all_s
from planner.solve.other_counts import fastest_count
from planner.solve.parts import Part
from planner.solve.path_search import PathSearch
from planner.solve.problem import Candidate, Problem
from planner.solve.segment_choices import WorkBudget
from planner.solve.waiting import Queue, Waiting
from planner.solve.work_bound import RoughBounds, even_share_s, pooled_recompute_s, work_bound

LEAST_S, MOST_S, GAP_S = 1.0, 10.0, 300.0
"""Seconds, as they are counted, that a search without a time limit goes on in vain: at least, at most, and for a gap of
1 [chosen]."""
BOUNDING_SHARE = 0.5
"""Of this, for bounds of many M together [chosen: they took all of it before a second plan was looked for]."""
WITHOUT_PLAN_S = 100.0
"""The same as long as no plan was found [chosen]."""
HASTE_S = 5.0
"""The same until what needs least memory comes first, as long as no plan was found [chosen]."""
WORTH_WAITING = 1e-3
"""By what a plan must be faster for the search not to have been in vain [chosen]."""
LARGE_S = 0.25
"""Seconds, counted so, of a search for some plan from which on a better plan comes before proofs [chosen]."""
CLIMB_S, CLIMBING_S = 0.1, 10.0
"""Seconds of listing stages from which on a first plan is climbed from, and that this may take, counted so [chosen]."""
TURNS, OWN_LEVEL = 3, 2
"""See `_Balancer._next`: its turns, and up to which level the part of the best plan is searched before all others
[chosen: a Llama on 64 devices with R = 4 gained 1.5 %]."""
CLOSED = 1e-8
"""Relative distance from the best plan at which a bound from paths ends the search of a part: rounding."""
PROOFS_IN_VAIN = 3
"""Proofs of as large parts that are cut off in a row before no more are tried, or one where they take long [chosen]."""


def balance(problem: Problem, reached: Balance | None = None, unsettled: Unsettled | None = None) -> Balance | None:
    """The fastest plan.

    Args:
        problem: that it solves.
        reached: the best plan of other schedules: returned if nothing faster is found, and its lower bound counts.
        unsettled: notes what is left where there is no plan.

    Returns:
        None when nothing fits the devices' memory, or nothing was found that does.

    Raises:
        ProfileError: the profile lacks a device kind or the optimizer.
    """
    search = _Balancer(problem, reached)
    found = search.run()
    if found is None and unsettled is not None:
        unsettled.note(search.least_s)
    return found


class _Balancer:
    """The parts that wait, and the best plan so far."""

    def __init__(self, problem: Problem, reached: Balance | None) -> None:
        self._problem, self._reached = problem, reached
        limit_s = problem.settings.time_limit_s
        self._deadline = Deadline(limit_s)
        self._last = Deadline(None if limit_s is None else limit_s + max(limit_s, LATE_S), heeds_interrupt=False)
        self._budget = WorkBudget()
        self._queue = Queue()
        self._best: Balance | None = None
        self._plans: dict[Part, Balance | None] = {}  # of those that were searched for themselves
        self._paths: dict[Part, PathSearch] = {}
        self._left_s = np.inf  # what no plan is below of parts that were searched with the largest limits
        self._in_vain_s = 0.0
        self._last_took_s = 0.0  # of a time limit
        self._bounding_s, self._bounded_s = 0.0, 0.0  # in vain since what none is below was raised to that
        self._bounds_are_over = False
        self._groups: dict[Part, list[Part]] = {}  # those that were bounded together
        self._cut_off = [0, 0, 0]  # proofs in a row, by depth of the part
        self._climbed = False
        self._large = False  # whether any proof was cut off, or a plan took long
        self._ahead: Part | None = None
        self._near: Candidate | None = None  # of what lay ahead last
        self._turn = TURNS - 1

    def run(self) -> Balance | None:
        """See `balance`."""
        may_end = self._problem.dispensable or self._reached is not None
        rough = RoughBounds(self._problem)
        for candidate in self._problem.candidates():
            if may_end and self._deadline.over:
                self._left_s = even_share_s(self._problem)
                break
            # where each number from the end has stages of its own, to list them all takes long
            bounded = not SCHEDULES[candidate.schedule].keeps_all
            part = Part(candidate, self._problem.settings.stages)
            self._queue.push(rough.step_s(candidate), part, bounded=bounded, rough=True)
        while not self._ended():
            left_s = self._deadline.left_s
            entry = self._next()
            if entry.level:
                self._search(entry)
            else:
                self._look_at(entry)
            if self._best is not None and not self._climbed:
                self._climb(self._best)
            self._last_took_s = 0.0 if left_s == np.inf else left_s - self._deadline.left_s
        if self._best is not None and self._problem.settings.time_limit_s is not None:
            self._best = self._with_others(self._best)
        return best_of(self._reached, self._best, self.least_s)

    @property
    def least_s(self) -> float:
        """What no plan is below of the parts that were not proven to have no better one than the best."""
        return min(self._left_s, self._queue.least_s())

    def _ended(self) -> bool:
        """Whether no part may have a better plan, or time is up."""
        least_s = self._queue.least_s()
        step_s = min((one.step_s for one in (self._best, self._reached) if one is not None), default=np.inf)
        if least_s == np.inf or least_s > min(step_s, self._problem.below_s) * (1 + TIE):
            return True
        if step_s == np.inf:
            in_vain = self._in_vain_s > MOST_S * self._problem.patience
            if self._problem.dispensable and (self._deadline.over or in_vain):
                return True
            return self._in_vain_s > WITHOUT_PLAN_S or self._queue.level > 1 or self._last.over
        patience_s = self._patience_s(step_s, least_s)
        self._bounds_are_over = self._bounding_s > BOUNDING_SHARE * patience_s
        patience_s -= min(self._bounding_s, BOUNDING_SHARE * patience_s)
        self._deadline.tell(step_s, least_s, patience_s - self._in_vain_s)
        if self._deadline.interrupted:
            return True
        if self._problem.settings.time_limit_s is not None:
            return self._deadline.left_s <= self._last_took_s  # what is one part's is mostly the next one's, too
        return self._in_vain_s > patience_s

    def _patience_s(self, step_s: float, least_s: float) -> float:
        """What may be spent in vain where the best plan takes that, and none is below the other."""
        return min(MOST_S, max(LEAST_S, GAP_S * (step_s / least_s - 1))) * self._problem.patience

    def _next(self) -> Waiting:
        """The part to look at: what lies ahead of the best plan, or the one with the least bound.

        Where time is up, or much was spent, before there is any plan, the one that needs least memory.

        Where proofs are cut off or take long, in turns

        - that one;
        - that of the best plan, searched to the end;
        - one that differs in the number of stages or in devices from that, or from what lay ahead of it.
        """
        entry = None
        if self._best is None and (self._deadline.over or self._in_vain_s > HASTE_S):
            roomiest = min((waiting.part for waiting in self._queue), key=_needed)
            entry = self._queue.take(lambda one: one.part == roomiest)
        elif self._ahead is not None:
            ahead = self._ahead
            entry = self._queue.take(lambda one: one.level == 0 and ahead.lies_in(one.part))
            self._ahead = ahead if entry is not None else None
        if entry is None and self._best is not None and self._large and not self._bounds_come_first():
            self._turn = (self._turn + 1) % TURNS
            own = self._part_of(self._best)
            if self._turn == 1:
                entry = self._queue.take(lambda one: own.lies_in(one.part) and one.level <= OWN_LEVEL)
            elif self._turn == 2:
                near = self._near or own.candidate
                entry = self._queue.take(lambda one: one.part.candidate == near and one.level == 0)
        return entry or self._queue.pop()

    def _look_at(self, entry: Waiting) -> None:
        """Raise its bound, try a proof, and search its parts where that is cut off."""
        part = entry.part
        if entry.rough:
            work = work_bound(self._problem, part.candidate)
            self._queue.push(max(entry.bound_s, work.step_s()), part, bounded=entry.bounded, work=work)
            return
        if entry.work is not None:
            bound_s = entry.work.step_s(pooled_recompute_s(self._problem, part.candidate))
            self._queue.push(max(entry.bound_s, bound_s), part, bounded=entry.bounded)
            return
        if self._best is None:
            self._look_for_any(entry)
        elif self._ahead is not None and self._ahead.lies_in(part):
            self._divide(entry)
        elif not entry.bounded:
            search = self._search_of(part)
            bound_s = search.bound_s(self._best)
            self._in_vain_s += search.spent_s
            self._queue.push(max(entry.bound_s, bound_s), part)
        elif self._bounded_with_others(entry):
            return
        elif self._proofs_end(part):
            self._divide(entry)
        else:
            search = self._search_of(part)
            result = search.run(self._best, proves=True)
            if result.proven:
                self._cut_off[part.depth] = 0
                self._take(part, result.best if result.best is not self._best else None)
            else:
                self._large = True
                self._cut_off[part.depth] += 1
                self._in_vain_s += search.spent_s
                self._divide(entry._replace(bound_s=max(entry.bound_s, result.lower_bound_s)))

    def _proofs_end(self, part: Part) -> bool:
        """Whether so many proofs of as large parts were cut off that no more are tried."""
        return self._cut_off[part.depth] >= (1 if self._large else PROOFS_IN_VAIN)

    def _bounded_with_others(self, entry: Waiting) -> bool:
        """Raise the bounds of those that differ in M alone, of halves of those bounded together; False if alone."""
        part = entry.part
        if not self._waits_for_bound(entry):
            return False
        if part not in self._groups:
            waiting = {one.part for one in self._queue if one.level == 0 and _differ_in_count(one.part, part)}
            if waiting <= {part} and not self._proofs_end(part):  # a proof begins with the same bound
                self._groups[part] = [part]
                return False
            halves = [sorted({part, *waiting}, key=_count)]
        else:
            group = self._groups[part]
            halves = [group[: len(group) // 2], group[len(group) // 2 :]]
        self._queue.push(entry.bound_s, part)
        for half in halves:
            self._groups |= dict.fromkeys(half, half)
            self._bound_together(half)
        return True

    def _bounds_come_first(self) -> bool:
        """Whether the part with the least bound was not bounded for itself."""
        return self._queue.level == 0 and self._waits_for_bound(self._queue.first())

    def _waits_for_bound(self, entry: Waiting) -> bool:
        """Whether it is bounded together with others, or for the first time."""
        part, record = entry.part, SCHEDULES[entry.part.candidate.schedule]
        return (
            entry.bounded
            and not self._bounds_are_over
            and record.objective is not Objective.FLOW_SHOPS
            and not record.keeps_all
            and (len(self._groups.get(part, (part, part))) > 1)
        )

    def _bound_together(self, group: list[Part]) -> None:
        """One bound for all of them; it may end them."""
        assert self._best is not None
        enough_s = self._best.step_s * (1 + 2 * TIE)
        problem = group[0].problem(self._problem)
        bound_s, looked_at = bound_of_all_s(problem, group[0].candidate, group[-1].candidate, enough_s)
        self._queue.raise_bounds({*group}, bound_s, drop=bound_s >= enough_s)
        self._bounding_s += looked_at * ARC_S * (bound_s < enough_s)
        if self._queue.least_s() > self._bounded_s * (1 + WORTH_WAITING):
            self._bounding_s, self._bounded_s = 0.0, self._queue.least_s()

    def _look_for_any(self, entry: Waiting) -> None:
        """Some plan, in the smallest part with the least bounds; where there is none, its parts are looked at alone.

        Where that was in vain before, and all stages are soon listed, it is found out first whether any may fit; not at
        all where there is a plan of others, and no time.
        """
        part, search = entry.part, self._search_of(entry.part)
        in_vain = bool(self._plans) and SCHEDULES[part.candidate.schedule].keeps_all
        if in_vain and not search.fits():
            self._in_vain_s += search.spent_s
            return
        part = part.smallest(self._problem)
        had_time = not self._deadline.over
        self._take(part, self._dive(part))
        if self._best is not None or (had_time and self._deadline.over):
            self._queue.push(entry.bound_s, entry.part, bounded=entry.bounded)
            return
        too_late = self._problem.dispensable and search.listing_s > self._deadline.left_s
        if in_vain or too_late or search.fits():
            self._divide(entry)
        self._in_vain_s += search.spent_s

    def _climb(self, first: Balance) -> None:
        """Look for plans with other M, K and R than the first one's, where the problem is large: see `Ladder`."""
        self._climbed = True
        if self._search_of(Part(first.candidate, self._problem.settings.stages)).listing_s <= CLIMB_S:
            return
        left_s, had_s = CLIMBING_S * self._problem.patience, self._in_vain_s

        def look(part: Part) -> Balance | None:
            nonlocal left_s
            self._in_vain_s = 0.0
            found = self._dive(part)
            left_s -= self._in_vain_s
            self._take(part, found)
            return found and part.in_whole(self._problem, found)

        ladder = Ladder(self._problem, self._waiting(), look, lambda: left_s > 0 and not self._deadline.over)
        found = ladder.climb(first)
        self._best = found if found.better_than(self._best) else self._best
        self._in_vain_s, self._ahead = had_s, None

    def _waiting(self, replicas: int | None = None) -> list[Candidate]:
        """Those of which no part was looked at, the least bound first; with so many replicas alone."""
        stages = self._problem.settings.stages
        return [
            entry.part.candidate
            for entry in sorted(self._queue)
            if entry.level == 0
            and entry.part == Part(entry.part.candidate, stages)
            and replicas in (None, entry.part.candidate.replicas)
        ]

    def _divide(self, entry: Waiting) -> None:
        """Let the parts of a part wait; one of the smallest is searched for itself."""
        parts = entry.part.parts(self._problem)
        for part in parts:
            bound_s = max(entry.bound_s, part.bound_s(self._problem))
            if self._best is None or bound_s <= self._best.step_s * (1 + TIE):
                self._queue.push(bound_s, part)
        if not parts:
            self._take(entry.part, self._dive(entry.part))
            self._queue.push(entry.bound_s, entry.part, 1)

    def _dive(self, part: Part) -> Balance | None:
        """A plan of one of the smallest parts, found quickly."""
        if part not in self._plans:
            had_time = not self._deadline.over
            search = self._alone(part, 0)
            plan = search.first(part.bound_s(self._problem))
            self._in_vain_s += search.spent_s
            self._large |= search.spent_s > LARGE_S
            if plan is None and had_time and self._deadline.over:
                return None  # it was cut off, and may be looked at again
            self._plans[part] = plan
        return self._plans[part]

    def _search(self, entry: Waiting) -> None:
        """Search one of the smallest parts with the limits of its level."""
        part, level = entry.part, entry.level
        entry = entry._replace(bound_s=max(entry.bound_s, self._by_paths(part, level)))
        if self._best is not None and entry.bound_s >= self._best.step_s * (1 - CLOSED):
            self._left_s = min(self._left_s, entry.bound_s)
            return
        plan, search = self._plans[part], self._alone(part, level)
        if plan is None and level > 1:
            plan = search.first(part.bound_s(self._problem))
        self._plans[part] = plan
        start = plan or self._best
        result = None if start is None else search.run(start, own=plan is not None)
        self._in_vain_s += search.spent_s
        if result is not None and (plan is not None or (result.proven and result.best is not start)):
            self._plans[part] = result.best
            self._take(part, result.best)
        if result is not None and result.proven:
            return
        bound_s = max(entry.bound_s, -np.inf if result is None else result.lower_bound_s)
        if level < LAST_LEVEL:
            self._queue.push(bound_s, part, level + 1)
        else:
            self._left_s = min(self._left_s, bound_s)

    def _by_paths(self, part: Part, level: int) -> float:
        """What no plan of one of the smallest parts is below, from its paths, and perhaps a better plan of it."""
        if SCHEDULES[part.candidate.schedule].objective is not Objective.ROUNDS:
            return -np.inf
        if part not in self._paths:
            self._paths[part] = PathSearch(part.problem(self._problem), part.candidate, self._deadline)
        search = self._paths[part]
        had_s, enough_s = search.spent_s, np.inf if self._best is None else self._best.step_s
        self._plans[part], bound_s = search.run(Limits.at(level).programs, self._plans[part], enough_s)
        self._in_vain_s += search.spent_s - had_s
        self._take(part, self._plans[part])
        return bound_s

    def _search_of(self, part: Part) -> CandidateSearch:
        """One that proves: what it may take depends on what others took."""
        return CandidateSearch(part.problem(self._problem), part.candidate, Limits.at(1), self._budget, self._deadline)

    def _alone(self, part: Part, level: int) -> CandidateSearch:
        """One that depends on the part alone; without any plan there is nothing to return, and it goes on for a while.

        One that is begun in time ends when time is up: what needs least memory is then looked at.
        """
        limits = Limits.at(level)
        heeds = self._best is not None or self._reached is not None or self._problem.dispensable
        heeds |= not self._deadline.over
        deadline = self._deadline if heeds else self._last
        return CandidateSearch(part.problem(self._problem), part.candidate, limits, limits.segments(), deadline)

    def _take(self, part: Part, plan: Balance | None) -> None:
        """The best plan may be this one; then another number of micro-batches may be better still."""
        if plan is None or not (found := part.in_whole(self._problem, plan)).better_than(self._best):
            return
        if self._best is None or found.step_s < self._best.step_s * (1 - WORTH_WAITING):
            self._in_vain_s = 0.0
        self._best = found
        if self._large:
            self._ahead = self._ahead_of(found)
            self._near = None if self._ahead is None else self._ahead.candidate

    def _ahead_of(self, best: Balance) -> Part | None:
        """The number of micro-batches that would make the best plan faster, if there is one."""
        found = fastest_count(self._problem, best, self._waiting(best.candidate.replicas), best.step_s)
        return None if found is None else replace(self._part_of(best), candidate=found)

    def _with_others(self, best: Balance) -> Balance:
        """The same stages with the numbers of micro-batches and replicas that make them fastest, of those that wait.

        What was found in haste needs least memory, and so has the smallest micro-batches, and as few replicas as may
        be: with 63,000 samples its step took 7 times as long, with 1,024 devices 500 times.
        """
        for replicas in self._problem.replicas():
            found = fastest_count(self._problem, best, self._waiting(replicas), best.step_s)
            if found is not None:
                best = replace(best, candidate=found, step_s=evaluate_s(self._problem, found, best.stages))
        return best

    def _part_of(self, plan: Balance) -> Part:
        """The smallest part that it is in."""
        used = Counter(stage.device_class for stage in plan.stages)
        classes = range(len(self._problem.classes))
        devices = tuple(used[one] for one in classes) if len(classes) > 1 else None
        return Part(plan.candidate, len(plan.stages), devices)


def _count(part: Part) -> int:
    return part.candidate.split.count


def _differ_in_count(one: Part, other: Part) -> bool:
    """Whether one bound may be for both."""
    return replace(one, candidate=other.candidate) == other and alike(one.candidate, other.candidate)


def _needed(part: Part) -> tuple[bool, int, int]:
    """What plans with little memory have least of: micro-batches in flight, replicas, and samples of a micro-batch."""
    candidate = part.candidate
    return SCHEDULES[candidate.schedule].keeps_all, candidate.replicas, candidate.split.largest
