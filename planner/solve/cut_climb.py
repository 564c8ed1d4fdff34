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
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans, Stops
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import Deadline

FEW_CUTS = 2_000
"""Ways to cut that are all tried [chosen: 0.2 s]."""
REACH = (1, 2, 4, 8)
"""Places by which cuts are moved."""
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
MOST_ORDERS = 60
"""Orders of unlike devices that are tried; the bound is for all."""
MOST_PASSES = 1_000_000
"""Passes, of all cuts tried of one candidate together [chosen: 0.25 s]."""
FEWEST_TRIED, MOST_AT_FEWEST = 200, 20_000_000
"""Cuts that are tried at least, or a tenth of them where they have more passes than that."""
HALVINGS = 40
"""Of the interval that the most work of a stage is in."""
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
        rules = plans.problem.rules
        self._places = [int(place) for place in np.flatnonzero(rules.allowed)][1:-1]
        self._demanded = {int(place) for place in np.flatnonzero(rules.demanded)}
        self._layers = plans.problem.layers
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
            self._climbed(self._kicked(stops), classes)
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
        best, seen, moves = None, {stops}, [move for move in self._moves() if sum(map(abs, move)) <= AROUND]
        moved = True
        while moved:
            moved = False
            for move in moves:
                other = self._moved(stops, move)
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
        if not self._demanded <= {*stops}:
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
            self._climbed(self._kicked(stops), classes)
            self._in_vain = 0 if len(self._tried) > tried else self._in_vain + 1
            if self._in_vain > MOST_IN_VAIN:
                break
        return next(iter(self._finished()), None)

    @property
    def tries_all_cuts(self) -> bool:
        """Whether there are so few ways to cut and to order devices that all are tried."""
        ways = math.comb(len(self._places), self._plans.stages - 1) * len(self._orders)
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

        every = [
            (*inner, self._layers)
            for inner in itertools.combinations(self._places, self._plans.stages - 1)
            if self._demanded <= {*inner}
        ]
        at_best = []
        for stops, classes in itertools.product(every, orders):
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
        starts = [self._laid(work, even)]
        if self._bound is not None:
            best = self._bound.stops if self._bound.stops and self._demanded <= {*self._bound.stops} else None
            starts = [best, self._balanced(work), *starts]
        return list(dict.fromkeys(start for start in starts if start is not None))

    def _laid(self, sums: Floats, shares: Floats) -> Stops | None:
        """The cuts that are nearest in sum to these shares of the work; None where the rules allow none."""
        places = [0, *self._places, self._layers]
        wanted = shares * sums[-1]
        demanded = [number for number, place in enumerate(places[1:], start=1) if place in self._demanded]
        away = np.abs(sums[places][None, :] - wanted[:, None])
        reached = np.full(len(places), np.inf)
        reached[0] = 0.0
        came_from = np.zeros((len(wanted), len(places)), dtype=np.int64)
        for stage in range(len(wanted)):
            following = np.full(len(places), np.inf)
            for first, last in pairwise([0, *demanded, len(places) - 1]):  # no stage goes on after a demanded cut
                if first == last:
                    continue
                before = reached[first:last]
                least = np.minimum.accumulate(before)
                new = np.r_[True, before[1:] < least[:-1]]
                came_from[stage, first + 1 : last + 1] = first + np.maximum.accumulate(
                    np.where(new, np.arange(len(new)), 0)
                )
                following[first + 1 : last + 1] = least + away[stage, first + 1 : last + 1]
            reached = following
        if not np.isfinite(reached[-1]):
            return None
        number, stops = len(places) - 1, []
        for stage in reversed(range(len(wanted))):
            stops.append(places[number])
            number = int(came_from[stage, number])
        return tuple(reversed(stops))

    def _balanced(self, sums: Floats) -> Stops | None:
        """The cuts whose stage with most work has the least; None where the rules allow none."""
        places = np.array([0, *self._places, self._layers])
        demanded = np.array([0, *np.cumsum(np.isin(places[1:-1], [*self._demanded])), len(self._demanded)])
        found: Stops | None = None
        low, high = 0.0, float(sums[-1])
        for _ in range(HALVINGS):
            most = (low + high) / 2 if found is not None else high
            stops = self._greedy(sums[places], places, demanded, most)
            if stops is None and found is None:
                return None
            low, high, found = (low, most, stops) if stops is not None else (most, high, found)
        return found

    def _greedy(self, sums: Floats, places: Indices, demanded: Indices, most: float) -> Stops | None:
        """Cuts such that no stage has more work than that, if each takes as many layers as it may."""
        at, stops = 0, []
        for left in reversed(range(self._plans.stages)):
            reach = int(np.searchsorted(sums, sums[at] + most, side="right")) - 1
            wall = int(np.searchsorted(demanded[:-1], demanded[at] + 1))  # the next place where a cut must be
            at, before = min(reach, wall, len(places) - 1 - left), at
            if at <= before:
                return None
            stops.append(int(places[at]))
        return tuple(stops) if at == len(places) - 1 else None

    def _climbed(self, stops: Stops, classes: tuple[int, ...]) -> None:
        """Move these cuts until no move makes them better."""
        best = self._score(stops, classes, Score(np.inf, np.inf, None))
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


class Score(NamedTuple):
    """Bytes too many on all devices together, the step's seconds if it fits, and the plan."""

    over_bytes: float
    step_s: float
    choice: ChunkChoice | None

    def rank(self) -> tuple[float, float]:
        """Less is better."""
        return self.over_bytes, self.step_s


def device_orders(plans: ChunkPlans) -> list[tuple[int, ...]]:
    """Orders of devices, as classes by rank; all of them where they are few.

    The first one takes the devices with most memory, those with most of it first, which earlier stages need as a rule.
    Of many there are besides the fastest devices and chosen ones by chance, both with most memory first and last.
    """
    classes, ranks = plans.problem.classes, plans.ranks
    every = [number for number, count in enumerate(_able(plans)) for _ in range(count)]
    if len(every) < ranks:
        return []

    def roomiest(some: Iterable[int]) -> list[int]:
        return sorted(some, key=lambda number: -classes[number].device.memory_bytes)

    orders = {tuple(roomiest(every)[:ranks]): None}
    few = all_orders(plans)
    if few is not None:
        return [*(orders | dict.fromkeys(few))]
    seconds = (plans.forward_s[0] + plans.backward_s[0])[:, -1]
    chosen = [every, sorted(every, key=lambda number: seconds[number])[:ranks]]
    chance = random.Random(0)
    for _ in range(MOST_ORDERS // 4):
        able_ones = roomiest(every)[: chance.randint(ranks, len(every))]
        chosen += [chance.sample(able_ones, ranks)]
    for some in chosen:
        first = roomiest(some)[:ranks]
        orders |= dict.fromkeys([tuple(first), tuple(reversed(first)), tuple(some[:ranks])])
    return [*orders][:MOST_ORDERS]


def all_orders(plans: ChunkPlans) -> list[tuple[int, ...]] | None:
    """All orders of devices there are, None where they are many: those that are tried prove nothing of the others."""
    few = [*itertools.islice(arrangements(_able(plans), plans.ranks), MOST_ORDERS)]
    return few if len(few) < MOST_ORDERS else None


def _able(plans: ChunkPlans) -> list[int]:
    """Ranks that each class of devices could run."""
    return [min(plans.ranks, group.capacity(plans.candidate.replicas)) for group in plans.problem.classes]


def arrangements(available: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """All different orders of so many of several kinds, the smallest first.

    >>> [*arrangements([2, 1], 2)]
    [(0, 0), (0, 1), (1, 0)]

    Args:
        available: how many there are of each kind.
        length: how many are taken.
    """
    left, order = [*available], list[int]()
    if sum(left) < length:
        return
    while True:
        while len(order) < length:
            kind = next(kind for kind, number in enumerate(left) if number)
            order.append(kind)
            left[kind] -= 1
        yield tuple(order)
        larger = None
        while order and larger is None:
            last = order.pop()
            left[last] += 1
            larger = next((kind for kind in range(last + 1, len(left)) if left[kind]), None)
        if larger is None:
            return
        order.append(larger)
        left[larger] -= 1
