"""What no plan of a candidate takes less than, whatever its cuts; and the cuts that it would have.

The makespan is no less than any path from pass to pass, and a path's length is a weighted sum of the stages' seconds
and messages. Of prefix sums F over the layers a stage takes F(its end) - F(its start), and what it copies of messages
there, so a weighted sum of paths is a sum over the cuts of what depends on the place of that cut alone. Its least over
all cuts in order is found by going through them once, and with weights that add up to 1 it is a lower bound:

    min over cuts of max over paths  >=  max over weights of min over cuts of the weighted paths.

1. Weights are found by a linear program over the paths and the cuts that are known so far; the cuts that are least for
   them are one more, and the longest path there is one path more (Dantzig and Wolfe, Operations Research 8, 1960).
2. A stage is left out if the weighted paths are above the best plan for all cuts that have it, and so is one that takes
   as long by itself (`planner.kernel.cut_walk`): a mixture of cuts could else share a slow stage among many. So does
   each new path by itself: of the stages at which it stays it leaves those that are not too slow, and where layers do
   not divide evenly that is more than the mixture says.
3. What is left between both sides is closed by halves: one cut has its place before or after some place, and each
   half has a bound of its own.

Of unlike devices the cheapest counts; memory, recompute and waiting for links only add to a step. Where orders are made
for each plan there are paths of any order, see `planner.kernel.any_order`.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from planner.cost.layer_costs import Floats, Indices, prefix_sums
from planner.cost.transfers import copies_s
from planner.kernel.critical_path import longest_path
from planner.kernel.cut_walk import free_ends, least_cuts
from planner.kernel.turns import turns_of
from planner.plan.schedules import SCHEDULES, Ring
from planner.solve.allowed_cuts import Stops
from planner.solve.chunk_bound import CERTAINTY, least_end_s, least_s
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.deadline import Deadline
from planner.solve.work_bound import work_bound_s

MOST_ROUNDS = 60
"""Programs of all cuts together, before they are halved [chosen]."""
ROUNDS_OF_HALF = 12
"""Programs of a half of the cuts until it is halved again [chosen]."""
CLOSE = 1e-3
"""Relative distance between both sides at which a bound is good enough [chosen]."""
HALF_CLOSE = 1e-6
"""The same of halves, where it is a proof that is looked for."""
TWO = 2
"""Places of which there is a choice."""
MOST_ALONE_IN_VAIN, FEWER = 10, 0.999
"""Paths in a row by which no more stages than that are left out by themselves, until no more are tried [chosen]."""
MOST_KNOWN = 150
"""Paths, and cuts, of one program: the last ones [chosen: 10 ms]."""


@dataclass(order=True)
class _Half:
    """Some of the cuts.

    Attributes:
        bound_s: none of them takes less.
        number: of it.
        free: stages that they may have, see `planner.kernel.cut_walk`.
        weights: of the paths, with which the bound was found: of stages and of messages.
        mixture: of cuts with the least makespan: their places and shares.
    """

    bound_s: float
    number: int
    free: NDArray[np.bool_] = field(compare=False)
    weights: Floats | None = field(compare=False)
    mixture: tuple[Indices, Floats] | None = field(default=None, compare=False)


class CutBound:
    """The bound of one candidate, which is made better as often as it is worth it.

    Args:
        plans: of the candidate.

    Attributes:
        step_s: no plan takes less.
        rounds: programs so far.
        done: whether it is as good as it gets without halves.
        closed: whether it is as good as it gets.
        stops: the best cuts known, as far as the bound sees.
    """

    def __init__(self, plans: ChunkPlans) -> None:
        candidate, count = plans.candidate, plans.candidate.split.count
        record = SCHEDULES[candidate.schedule]
        self._plans, self._stages, self._ranks = plans, plans.stages, plans.ranks
        self._any_order = record.made_for_plan
        self._turns = (
            None if self._any_order else turns_of(candidate.schedule, plans.ranks, count, candidate.ring.chunks)
        )
        self._end_s = least_end_s(plans)
        self.step_s = least_s(plans)
        if candidate.ring.chunks == 1 and record.splits_backward:
            self.step_s = max(self.step_s, work_bound_s(plans.problem, candidate))
        places = np.flatnonzero(plans.problem.rules.allowed)
        self._places = places
        sized = [np.diff(sums, axis=-1).min(axis=1) for sums in plans.passes_s]  # (2 sizes, L) each
        self._sums = np.array([prefix_sums(large)[places] for large, _ in sized])
        messages = np.zeros((2, 2, len(places)))  # outputs and gradients, of both sizes
        if plans.ranks > 1:
            messages = np.array(plans.messages_s)[:, :, places]
        messages[..., [0, -1]] = 0.0
        copied = np.zeros((2, len(sized), len(places)))
        if not plans.ring.folds:  # else there are none at its turns, wherever these are
            copied[:, :2] = copies_s(plans.shares, messages[:1, 0], messages[1:, 0])
        self._begins, self._ends = self._sums - copied[0], self._sums + copied[1]
        self._messages = (1 - sum(plans.shares)) * messages[:, 0]
        if any(plans.shares):
            sized[:2] = [np.concatenate(both, axis=1) for both in zip(sized[:2], messages, strict=True)]
        larger = np.arange(count) < candidate.split.number_largest
        self._shares, self._send_shares = (
            np.array([np.where(larger, 1.0, _least_ratio(small, large)) for large, small in both])
            for both in (sized, messages)
        )
        self._kinds = len(sized)
        self._paths: list[Floats] = []  # of stages and of messages, shape (kinds + 2, K)
        self._cuts: dict[tuple[int, ...], Floats] = {}  # by places where stages end, seconds of the same shape
        self._numbers = itertools.count()
        self._halves: list[_Half] = []
        self._best_s, self._settled_s = np.inf, np.inf
        self.stops: Stops | None = None
        self._alone_in_vain = 0
        self.rounds, self.done, self.closed, self._begun = 0, False, False, False
        self._note_first()

    def tightened(self, rounds: int, deadline: Deadline, enough_s: float = np.inf) -> float:
        """The bound after so many programs more, halves left aside; once it is above `enough_s` nobody asks how far."""
        self._begin(enough_s)
        for _ in range(rounds):
            if self.done or deadline.over or self.step_s > enough_s:
                break
            self.done = self._improved(self._halves[0], enough_s, CLOSE) or self.rounds >= MOST_ROUNDS
            self._raise(enough_s)
        return self.step_s

    def halved(self, rounds: int, deadline: Deadline, enough_s: float) -> float:
        """The bound after so many programs more, of halves; there need be no better plan than one of `enough_s`."""
        stop = self.rounds + rounds
        self._begin(enough_s)
        while not self.closed and self.rounds < stop and not deadline.over and self.step_s < enough_s:
            half = heapq.heappop(self._halves)
            for _ in range(ROUNDS_OF_HALF):
                if self._improved(half, enough_s, HALF_CLOSE) or deadline.over:
                    break
            if half.bound_s + self._end_s < self._limit_s(enough_s) * (1 - HALF_CLOSE):
                for part in self._parts(half):
                    heapq.heappush(self._halves, part)
            elif half.bound_s < np.inf:
                self._settled_s = min(self._settled_s, half.bound_s)
            self._raise(enough_s)
        return self.step_s

    def _begin(self, enough_s: float) -> None:
        """All cuts are one half at first."""
        if not self._begun:
            self._begun = True
            self._halves.append(_Half(0.0, next(self._numbers), self._all_free(enough_s), None))

    def _all_free(self, enough_s: float) -> NDArray[np.bool_]:
        """Every stage but those that take too long by themselves, and those inside which a cut must be.

        Whatever the order, a stage does all its work once a micro-batch has come to it, and the last gradient then goes
        back; gradients of parameters are not waited for, so some may be made meanwhile.
        """
        places, slack = len(self._places), max(0, len(self._places) - self._stages)
        allowed = self._not_too_long(min(slack, 2 * places // self._stages), enough_s)
        if allowed[:, -1:].any():  # else no longer one is free
            allowed = self._not_too_long(slack, enough_s)
        allowed = allowed[:, : _longest(allowed)]
        return np.array([allowed[stage : stage + slack] for stage in range(self._stages)])

    def _not_too_long(self, longest: int, enough_s: float) -> NDArray[np.bool_]:
        """The same by place where they begin and by length, up to so many places."""
        places = len(self._places)
        begin, length = np.arange(places - 1)[:, None], np.arange(1, longest + 1)
        end = np.minimum(begin + length, places - 1)
        forward_s, backward_s, *weights_s = self._shares.sum(axis=1)[:, None] * self._sums
        work_s, later_s = forward_s + backward_s, sum(weights_s, start=np.zeros(places))
        back_s = self._shares[1, -1] * self._sums[1]
        demanded = np.cumsum(self._plans.problem.rules.demanded[self._places])
        alone_s = self._sums[0][begin] + work_s[end] - work_s[begin] + self._end_s
        alone_s = alone_s + np.maximum(later_s[end] - later_s[begin], back_s[begin])
        inside = (demanded[end - 1] == demanded[begin]) & (begin + length < places)
        allowed: NDArray[np.bool_] = (alone_s * CERTAINTY < enough_s) & inside
        return allowed

    def _raise(self, enough_s: float) -> None:
        """The bound of all halves together; places that were left out are above `enough_s` and no more is known."""
        least_s = min([self._settled_s, *(half.bound_s for half in self._halves[:1])])
        self.step_s = max(self.step_s, min(enough_s, min(self._best_s, least_s) * CERTAINTY + self._end_s))
        self.closed = not self._halves

    def _limit_s(self, enough_s: float) -> float:
        """Cuts that take no less are not looked for."""
        return min(enough_s, self._best_s + self._end_s)

    def _improved(self, half: _Half, enough_s: float, close: float) -> bool:
        """One program more for some of the cuts; whether nothing more comes of it."""
        self.rounds += 1
        known = [
            (cuts, seconds)
            for cuts, seconds in itertools.islice(reversed(self._cuts.items()), MOST_KNOWN)
            if _are_free(half.free, (*cuts, len(self._places) - 1))
        ]
        program_s, weights, mixed = np.inf, half.weights, None
        if known:
            found = self._program([seconds for _, seconds in known])
            if found is not None:
                program_s, weights, shares = found
                mixed = np.tensordot(shares, np.array([seconds for _, seconds in known]), 1)
                half.mixture = np.array([cuts for cuts, _ in known]), shares
        if weights is None:
            weights = self._paths[0]
        least_s, cuts = self._least(half, weights, enough_s)
        if least_s > half.bound_s:
            half.bound_s, half.weights = least_s, weights
        if cuts is None or half.bound_s + self._end_s >= self._limit_s(enough_s):
            return True
        had = len(self._paths)
        new = self._note_cuts(cuts)
        if mixed is not None and not self._any_order:
            new |= self._note_path(mixed)[1]
        for path in self._paths[had:] if self._alone_in_vain < MOST_ALONE_IN_VAIN else ():
            many = np.count_nonzero(half.free)
            half.bound_s = max(half.bound_s, self._least(half, path, enough_s)[0])
            self._alone_in_vain = 0 if np.count_nonzero(half.free) < many * FEWER else self._alone_in_vain + 1
        if half.bound_s + self._end_s >= self._limit_s(enough_s):
            return True
        settled = half.bound_s >= program_s * (1 - close) and self._best_s <= half.bound_s * (1 + close)
        return not new or (settled and not self._any_order)

    def _program(self, known: list[Floats]) -> tuple[float, Floats, Floats] | None:
        """The least makespan of mixtures of these cuts by the paths that are known, these weighted, and the mixture."""
        some = self._paths if self._any_order else self._paths[-MOST_KNOWN:]
        paths = np.array(some).reshape(-1, self._paths[0].size)
        seconds = np.array(known).reshape(len(known), -1)
        lengths = paths @ seconds.T
        scale = lengths.max()
        if not 0 < scale < np.inf:
            return None
        answer = linprog(
            np.r_[np.zeros(len(known)), 1.0],
            A_ub=np.hstack((lengths / scale, -np.ones((len(paths), 1)))),
            b_ub=np.zeros(len(paths)),
            A_eq=np.r_[np.ones(len(known)), 0.0][None],
            b_eq=[1.0],
            bounds=(0.0, None),
            method="highs",
        )
        if answer.status != 0 or answer.x is None or answer.fun is None:
            return None
        shares = np.clip(-answer.ineqlin.marginals, 0.0, None)
        if not shares.sum() > 0:
            return None
        shape = self._paths[0].shape
        weights = (shares / shares.sum()) @ paths
        return float(answer.fun) * scale, weights.reshape(shape), answer.x[:-1]

    def _least(self, half: _Half, weights: Floats, enough_s: float) -> tuple[float, tuple[int, ...] | None]:
        """The least of the weighted paths over some of the cuts, and where; stages that are above all plans go."""
        of_stages, of_messages = weights[: self._kinds], weights[self._kinds :]
        always_s = float(of_stages[:, -1] @ self._sums[:, -1])
        costs = np.zeros((self._stages, len(self._places)))
        costs[:-1] = of_stages[:, :-1].T @ self._ends - of_stages[:, 1:].T @ self._begins
        costs[:-1] += of_messages[:, :-1].T @ self._messages
        limit_s = self._limit_s(enough_s) * (1 + 1e-9) / CERTAINTY - always_s - self._end_s
        least_s, ends = least_cuts(costs, half.free, limit_s)
        return least_s + always_s, tuple(map(int, ends[:-1])) if least_s < np.inf else None

    def _parts(self, half: _Half) -> list[_Half]:
        """Its halves: of the cut that may be at most places."""
        ends = free_ends(half.free, len(self._places))
        many = ends.sum(axis=1)
        if many.max() < TWO:  # paths of earlier programs may say more than those of its own
            only = tuple(int(np.argmax(row)) for row in ends[:-1])
            self._note_cuts(only)
            self._settled_s = min(self._settled_s, self._note_path(self._cuts[only])[0])
            return []
        stage, middle = self._divided(half, ends)
        _, begins, longest = half.free[:, :, : _longest(half.free)].shape
        later = stage + np.arange(begins)[:, None] + 1 + np.arange(longest) >= middle
        parts = []
        for side in (later, ~later):
            free = half.free[:, :, :longest].copy()
            free[stage] &= side
            parts.append(_Half(half.bound_s, next(self._numbers), free, half.weights))
        return parts

    def _divided(self, half: _Half, ends: NDArray[np.bool_]) -> tuple[int, int]:
        """A cut, and the place that divides it: where cuts that are mixed lie furthest apart, or most are free."""
        if half.mixture is not None:
            places, shares = half.mixture
            means = shares @ places
            apart = shares @ (places - means) ** 2
            cut = int(np.argmax(apart))
            middle = int(np.floor(means[cut])) + 1
            if apart[cut] > 1e-9 and ends[cut, :middle].any() and ends[cut, middle:].any():
                return cut, middle
        cut = int(np.argmax(ends.sum(axis=1)))
        at = np.flatnonzero(ends[cut])
        return cut, int(at[len(at) // 2])

    def _note_cuts(self, cuts: tuple[int, ...]) -> bool:
        """Keep cuts, and the longest path there; whether they are new."""
        if cuts in self._cuts:
            return False
        self._cuts[cuts] = seconds = self._seconds(cuts)
        length_s, _ = self._note_path(seconds)
        if length_s < self._best_s:
            self._best_s = length_s
            self.stops = tuple(int(self._places[cut]) for cut in (*cuts, len(self._places) - 1))
        return True

    def _seconds(self, cuts: tuple[int, ...]) -> Floats:
        """Of the stages between these places, and of the messages there."""
        ends = np.array((0, *cuts, len(self._places) - 1))
        seconds = np.zeros((self._kinds + 2, self._stages))
        seconds[: self._kinds] = self._ends[:, ends[1:]] - self._begins[:, ends[:-1]]
        seconds[self._kinds :, :-1] = self._messages[:, ends[1:-1]]
        return seconds

    def _note_path(self, seconds: Floats) -> tuple[float, bool]:
        """Keep the longest path for these seconds; its length, and whether it is new."""
        if self._turns is None:
            return max(float((path * seconds).sum()) for path in self._paths), False
        each, sends = np.ascontiguousarray(seconds[: self._kinds]), np.ascontiguousarray(seconds[self._kinds :])
        length_s, on_path, on_links = longest_path(
            self._turns, self._ranks, each, self._shares, sends, self._send_shares
        )
        path = np.concatenate((on_path, on_links))
        if any(np.array_equal(path, known) for known in self._paths[-MOST_KNOWN:]):
            return length_s, False
        self._paths.append(path)
        return length_s, True

    def _longest_s(self, path: Floats) -> float:
        """A path is no longer than that, wherever the cuts are."""
        copied_s = (self._ends - self._begins).max(axis=1) * (self._stages - 1)
        of_messages = path[self._kinds :].sum(axis=1) @ self._messages.max(axis=1)
        return float(path[: self._kinds].max(axis=1) @ (self._sums[:, -1] + copied_s) + of_messages)

    def _note_first(self) -> None:
        """Paths that are known before any cuts are: of any order, or of equal stages."""
        if self._any_order:
            self._paths = _paths_of_ranks(self._plans.ring, self._shares, self._send_shares)
            of_links = _paths_of_links(self._plans.ring, self._shares, self._send_shares)
            self._paths += [path for path in of_links if self._longest_s(path) + self._end_s > self.step_s]
            return
        even = np.zeros((self._kinds + 2, self._stages))
        even[: self._kinds] = self._sums[:, -1:] / self._stages
        self._note_path(even)


def _paths_of_ranks(ring: Ring, shares: Floats, send_shares: Floats) -> list[Floats]:
    """Paths that there are in any order of passes, see `planner.kernel.any_order`: 1, two of each rank."""
    forward, backward, weights, outputs, gradients = range(5)
    totals, last, paths = shares.sum(axis=1), shares[:, -1], []
    for rank in range(ring.ranks):
        stages = [*ring.stages_of(rank)]
        first = stages[0]
        path = np.zeros((5, ring.stages))
        path[forward, :first], path[outputs, :first] = 1.0, 1.0
        path[forward, stages], path[backward, stages] = totals[forward], totals[backward]
        own = path.copy()
        own[weights, stages] = totals[weights]
        path[backward, :first], path[gradients, :first] = last[backward], send_shares[1, -1]
        path[weights, 0] += last[weights]
        paths += [own, path]
    return paths


def _paths_of_links(ring: Ring, shares: Floats, send_shares: Floats) -> list[Floats]:
    """The same, 5: of each stage's messages, and of all that go over one link."""
    forward, backward, weights, outputs, gradients = range(5)
    end = 4 * ring.stages - 1
    way = np.zeros((end + 1, 5, ring.stages))  # to the end and back: passes and messages
    links: dict[tuple[int, int], list[int]] = {}
    for stage in range(ring.stages):
        way[2 * stage, forward, stage] = way[end - 2 * stage - 1, backward, stage] = 1.0
        if stage < ring.stages - 1 and not ring.is_turn(stage):
            way[2 * stage + 1, outputs, stage] = way[end - 2 * stage - 2, gradients, stage] = 1.0
            for sender, place in ((stage, 2 * stage + 1), (stage + 1, end - 2 * stage - 2)):
                link = ring.rank_of(sender), ring.direction(sender, forward=sender == stage)
                links.setdefault(link, []).append(place)
    way[end, weights, 0] = 1.0
    all_shares = np.concatenate((shares, send_shares))
    first, last, every = (way * some[:, None] for some in (all_shares[:, 0], all_shares[:, -1], all_shares.sum(axis=1)))
    own = [[place] for places in links.values() for place in places]
    return [
        first[: min(places)].sum(axis=0) + every[places].sum(axis=0) + last[max(places) + 1 :].sum(axis=0)
        for places in (*own, *(places for places in links.values() if len(places) > 1))
    ]


def _are_free(free: NDArray[np.bool_], ends: tuple[int, ...]) -> bool:
    """Whether the stages that end at these places all are."""
    longest = free.shape[2]
    return all(
        end - begin <= longest and free[stage, begin - stage, end - begin - 1]
        for stage, (begin, end) in enumerate(pairwise((0, *ends)))
    )


def _longest(free: NDArray[np.bool_]) -> int:
    """Over how many places the longest stage goes that is free; one by the last axis."""
    lengths = np.flatnonzero(free.any(axis=tuple(range(free.ndim - 1))))
    return int(lengths[-1]) + 1 if len(lengths) else 1


def _least_ratio(upper: Floats, lower: Floats) -> float:
    """The least that `upper` is of `lower`, where `lower` is not 0."""
    counted = lower > 0
    with np.errstate(over="ignore"):
        ratio = float(np.min(upper[counted] / lower[counted], initial=np.inf)) if counted.any() else 0.0
    return ratio if ratio < np.inf else 0.0
