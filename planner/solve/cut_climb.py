"""The search for the cuts of one candidate, and for the order of unlike devices.

1. Where there are few ways to cut, all are tried;
2. otherwise the bound's best cuts, and some more, are moved as long as the step becomes shorter: one cut, a
   run of neighbouring cuts, or two cuts against each other; then again from cuts near the best ones;
3. of cuts that do not fit, the ones with fewer bytes too many are better.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.solve.allowed_cuts import AllowedCuts, Stops
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import Deadline
from planner.solve.device_orders import all_orders, device_orders

FEW_CUTS = 2_000
"""Ways to cut that are all tried [chosen: 0.2 s]."""
FINISHED = 4
"""Of the best cuts those whose orders are gone over in full, where all of them have no more passes than are tried: the
best after that need not be the best before."""
NEAR = 1.03
"""By how much slower than the best plan one may be for its cuts to be moved together with single passes [chosen: with
the best one's alone a step of vgg16 on 4 devices was 0.8 % longer]."""
MOVED, AROUND = 20, 2
"""The best cuts of which single passes are moved, and by how many places together a plan's cuts are then moved."""
HOPELESS = 1.3
"""By how much slower than the best plan the fastest first cuts may be for them to be moved at all [measured: of 188
searches for 12 long chains of unlike layers moves made cuts up to 21 % faster, and the 36 with a better plan began
at most 20 % slower]."""
KICKS = 8
"""Times that cuts near the best ones are tried."""
MOST_PASSES = 1_000_000
"""Passes, of all cuts tried of one candidate together [chosen: 0.25 s]."""
FEWEST_TRIED, MOST_AT_FEWEST = 200, 20_000_000
"""Cuts that are tried at least, or a tenth of them where they have more passes than that."""
MOST_IN_VAIN = 1_000
"""Times that cuts near the best ones may be none but those that were tried before there seem to be no others."""


class CutClimb:
    """The search for the cuts of one candidate.

    Args:
        plans: of the candidate.
        bound: of it, where there is one.
        deadline: when to stop.

    Attributes:
        hopeless: whether the first cuts were so slow that none were moved.
    """

    hopeless = False

    def __init__(self, plans: ChunkPlans, bound: CutBound | None, deadline: Deadline) -> None:
        self._plans, self._bound, self._deadline = plans, bound, deadline
        self._bound_s = 0.0 if bound is None else bound.step_s
        self._cuts = AllowedCuts(plans.problem.rules, plans.problem.layers, plans.stages)
        self._chance = random.Random(0)
        self._in_vain = 0
        passes = 2 * plans.walks * plans.stages * plans.candidate.split.count
        fewest = min(FEWEST_TRIED, max(FEWEST_TRIED // 10, MOST_AT_FEWEST // passes))
        self._most_tried = max(fewest, MOST_PASSES // passes)
        self._most_finished = min(FINISHED, max(1, MOST_PASSES // passes))
        self._tried: dict[tuple[Stops, tuple[int, ...]], Score] = {}

    def found(self, below_s: float) -> tuple[list[ChunkChoice], float]:
        """The fastest plans that were found, and what no plan of the candidate is below, as far as that shows it.

        Args:
            below_s: slower ones are not looked for where all cuts are tried.
        """
        orders = self._orders
        if self.tries_all_cuts:
            only, least_s = self._best_of_all(orders, below_s)
            return [] if only is None else [only], least_s
        starts = {
            (begun, classes): None
            for start in self._starts()
            for classes in orders
            for begun in (self._plans.levelled(start, classes), start)
        }
        scored = [
            (self._score(start, classes, Score(np.inf, np.inf, None)).rank(), start, classes)
            for start, classes in starts
        ]
        (over_bytes, first_s), *_ = min(scored, default=((0.0, np.inf),))
        self.hopeless = not over_bytes and first_s > below_s * HOPELESS
        if self.hopeless:
            return [], 0.0
        for _, start, classes in sorted(scored):  # what is tried may be used up by the first
            self._climbed(start, classes)
        for _ in range(KICKS if self._tried else 0):
            stops, classes, best = self._best()
            if self._over or best.step_s <= self._bound_s:
                break
            self._climbed(self._cuts.near(stops, self._chance), classes)
        choices = self._finished()
        if choices and self._plans.moves_passes and choices[0].step_s < below_s * NEAR:
            nearer = self.around(choices[0].stops, choices[0].classes, choices[0].step_s)
            choices = choices if nearer is None else [nearer, *choices]
        return choices, 0.0

    def _finished(self) -> list[ChunkChoice]:
        """The best plans of all that were tried; with single passes moved, where that is done."""
        scores = sorted(self._tried.values(), key=Score.rank)
        most = MOVED if self._plans.moves_passes else self._most_finished
        fitting = [score.choice for score in scores[:most] if score.choice is not None]
        if not self._plans.moves_passes:
            return fitting
        best_s, found = np.inf, list[ChunkChoice]()
        for choice in fitting:
            made = None if self._deadline.over else self._plans.fitted(choice.stops, choice.classes, best_s)
            if made is not None:
                best_s, found = made.step_s, [made, *found]
        return found or fitting[:1]

    def around(self, stops: Stops, classes: tuple[int, ...], below_s: float) -> ChunkChoice | None:
        """The fastest plan after cuts were moved, and single passes with each, as long as the step becomes shorter.

        Args:
            stops: the cuts to begin with.
            classes: position of each rank's devices.
            below_s: seconds of the step with these.
        """
        best, seen, moves = None, {stops}, [move for move in self._cuts.moves() if sum(map(abs, move)) <= AROUND]
        moved = True
        while moved:
            moved = False
            for move in moves:
                other = self._cuts.moved(stops, move)
                if other is None or other in seen:
                    continue
                if self._deadline.over:
                    return best
                seen.add(other)
                found = self._plans.fitted(other, classes, below_s)
                if found is not None:
                    best, stops, below_s, moved = found, other, found.step_s, True
        return best

    def probed(self, below_s: float) -> ChunkChoice | None:
        """A first plan, with equal shares of the work; None if it does not fit or takes no less than `below_s`."""
        first, classes = self._first, self._orders[0]
        return None if first is None else self._plans.fitted(first, classes, below_s, thorough=False)

    @property
    def first_fits(self) -> bool:
        """Whether there is a first plan that fits."""
        first, classes = self._first, self._orders[0]
        return first is not None and not any(
            self._plans.over_bytes(rank, first, classes) for rank in range(self._plans.ranks)
        )

    @cached_property
    def _first(self) -> Stops | None:
        """Equal shares of the work, none where the rules allow none."""
        start = self._starts()[-1:]
        return self._plans.levelled(start[0], self._orders[0]) if start else None

    def at(self, stops: Stops, below_s: float) -> ChunkChoice | None:
        """The plan with these cuts; None if the rules forbid them, it does not fit or takes no less than `below_s`."""
        if not self._cuts.allow(stops):
            return None
        return self._plans.fitted(stops, self._orders[0], below_s)

    def kicked(self, times: int | None = None) -> ChunkChoice | None:
        """The fastest plan after cuts near the best ones were tried for as long as there is time.

        Args:
            times: as many cuts are tried, in those that the search tries by itself; None for no end.
        """
        self._most_tried = sys.maxsize if times is None else len(self._tried) + times * self._most_tried
        while self._tried and not self._over:
            tried = len(self._tried)
            stops, classes, best = self._best()
            if best.step_s <= self._bound_s:
                break
            self._climbed(self._cuts.near(stops, self._chance), classes)
            self._in_vain = 0 if len(self._tried) > tried else self._in_vain + 1
            if self._in_vain > MOST_IN_VAIN:
                break
        return next(iter(self._finished()), None)

    @property
    def tries_all_cuts(self) -> bool:
        """Whether there are so few ways to cut and to order devices that all are tried."""
        ways = math.comb(len(self._cuts.places), self._plans.stages - 1) * len(self._orders)
        return ways <= FEW_CUTS and all_orders(self._plans) is not None

    @cached_property
    def _orders(self) -> list[tuple[int, ...]]:
        return device_orders(self._plans)

    @property
    def _over(self) -> bool:
        """Whether enough was tried."""
        return self._deadline.over or len(self._tried) >= self._most_tried

    def _best(self) -> tuple[Stops, tuple[int, ...], Score]:
        """The best cuts and order of devices so far."""
        (stops, classes), score = min(self._tried.items(), key=lambda item: item[1].rank())
        return stops, classes, score

    def nearest(self) -> tuple[float, Stops, tuple[int, ...]] | None:
        """Bytes too many of the cuts with the fewest, these cuts and the order of the devices; None without cuts."""
        classes = self._orders[0]
        for start in self._starts():
            self._climbed(start, classes)
        if not self._tried:
            return None
        stops, classes, score = self._best()
        return score.over_bytes, stops, classes

    def _best_of_all(self, orders: Sequence[tuple[int, ...]], below_s: float) -> tuple[ChunkChoice | None, float]:
        """The best of all cuts, and the least that any may take: where orders are made, one not found may be faster.

        Where another candidate has a plan, this one's are looked at for as long as there is time, and nothing is then
        said of the least; likewise after an interrupt where another schedule may have one.
        """

        def ends(reached_s: float) -> bool:
            leaves = self._deadline.interrupted and self._plans.problem.dispensable
            return self._deadline.over and (leaves or reached_s < np.inf)

        at_best = []
        for stops, classes in itertools.product(self._cuts.every(), orders):
            if ends(below_s):
                return None, 0.0
            at_best.append((self._plans.at_best_s(stops, classes), stops, classes))
        best: ChunkChoice | None = None
        for step_s, stops, classes in sorted(at_best):
            reached_s = below_s if best is None else best.step_s
            if step_s >= reached_s:
                break
            if ends(reached_s):
                return best, 0.0
            best = self._plans.fitted(stops, classes, reached_s) or best
        if self._plans.tries_all:
            return best, below_s if best is None else best.step_s
        return best, min(at_best)[0] if at_best else np.inf

    def _starts(self) -> list[Stops]:
        """The bound's best cuts, those with the fastest slowest stage, and for equal shares of the work."""
        work = self._plans.forward_s[0].min(axis=0) + self._plans.backward_s[0].min(axis=0)
        even = np.arange(1, self._plans.stages + 1) / self._plans.stages
        starts = [self._cuts.laid(work, even)]
        if self._bound is not None:
            best = self._bound.stops if self._bound.stops and self._cuts.allow(self._bound.stops) else None
            starts = [best, self._cuts.balanced(work), *starts]
        return list(dict.fromkeys(start for start in starts if start is not None))

    def _climbed(self, stops: Stops, classes: tuple[int, ...]) -> None:
        """Move these cuts until no move makes them better."""
        best = self._score(stops, classes, Score(np.inf, np.inf, None))
        moved = True
        while moved:
            moved = False
            for move in self._cuts.moves():
                if self._over:
                    return
                other = self._cuts.moved(stops, move)
                if other is None or (other, classes) in self._tried:
                    continue
                score = self._score(other, classes, best)
                if score.rank() < best.rank():
                    best, stops, moved = score, other, True

    def _score(self, stops: Stops, classes: tuple[int, ...], best: Score) -> Score:
        """How good these cuts are; how slow exactly is found only for those faster than the best that fit."""
        key = stops, classes
        if key not in self._tried:
            below_s = best.step_s if best.over_bytes == 0 else np.inf
            choice = self._plans.fitted(stops, classes, below_s, thorough=False)
            if choice is not None:
                self._tried[key] = Score(0.0, choice.step_s, choice)
            elif below_s < np.inf:
                self._tried[key] = Score(np.inf, np.inf, None)
            else:
                over = sum(self._plans.over_bytes(rank, stops, classes) for rank in range(self._plans.ranks))
                self._tried[key] = Score(over, np.inf, None)
        return self._tried[key]


class Score(NamedTuple):
    """Bytes too many on all devices together, the step's seconds if it fits, and the plan."""

    over_bytes: float
    step_s: float
    choice: ChunkChoice | None

    def rank(self) -> tuple[float, float]:
        """Less is better."""
        return self.over_bytes, self.step_s
