"""A plan with layers moved from its slowest stages to others, each stage with what it then recomputes at best.

    moved = MovedLayers(problem, stage_of, deadline)
    plan = moved.from_slowest(plan, slowest=3, most=1000)

The search's objective is only a bound of the step. Where messages differ between layers and memory leaves few cuts, its
plans are some percent slower than those beside them by the simulator's seconds, which decide here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from planner.kernel.makespan import B, F, R
from planner.solve.allowed_cuts import REACH, Stops
from planner.solve.balance import Balance, StageChoice, evaluate_s, passes_seconds
from planner.solve.deadline import Deadline
from planner.solve.problem import Problem

StageOf = Callable[[int, int, int, int], StageChoice | None]
"""A stage by its position, its layers [first, stop) and its class of devices; None where there can be none."""


class MovedLayers:
    """Plans with layers moved.

    Args:
        problem: whose plans.
        stage_of: the best stage of some layers.
        deadline: when to end.

    Attributes:
        evaluated: stages of all plans that were evaluated.
    """

    def __init__(self, problem: Problem, stage_of: StageOf, deadline: Deadline) -> None:
        self._problem, self._stage_of, self._deadline = problem, cache(stage_of), deadline
        self._places = [int(place) for place in np.flatnonzero(problem.rules.allowed)]
        self.evaluated = 0

    def from_slowest(self, plan: Balance, slowest: int, most: int) -> Balance:
        """The plan after all moves that make it faster.

        Args:
            plan: to begin with.
            slowest: from so many of its stages layers go to others, the slowest first.
            most: plans that are tried.
        """
        tried: set[Stops] = set()
        best: Balance | None = plan
        while best is not None:
            plan, best = best, self._faster(best, slowest, most, tried)
        return plan

    def _faster(self, plan: Balance, slowest: int, most: int, tried: set[Stops]) -> Balance | None:
        """The first move that makes it faster."""
        for stops in self._moves(plan, slowest):
            if stops in tried:
                continue
            if len(tried) >= most or self._deadline.over:
                return None
            tried.add(stops)
            found = self._with_stops(plan, stops)
            if found is not None and found.better_than(plan):
                return found
        return None

    def _moves(self, plan: Balance, slowest: int) -> Iterator[Stops]:
        """From the slowest stages to all others, those that take least first; the stages between keep their sizes."""
        passes_s = passes_seconds(self._problem, plan.candidate, plan.stages)[[F, R, B], :, 0].sum(axis=0)
        by_time = [int(stage) for stage in np.argsort(passes_s, kind="stable")]
        at = [bisect_left(self._places, stage.stop) for stage in plan.stages[:-1]]
        for giver in reversed(by_time[-slowest:]):
            for reach in REACH:
                for taker in by_time:
                    cuts = range(min(giver, taker), max(giver, taker))
                    step = reach if taker < giver else -reach
                    moved = [0, *(place + step * (cut in cuts) for cut, place in enumerate(at)), len(self._places) - 1]
                    if taker != giver and all(one < other for one, other in pairwise(moved)):
                        yield tuple(self._places[place] for place in moved[1:])

    def _with_stops(self, plan: Balance, stops: Stops) -> Balance | None:
        """The plan with stages that end there, if each can be."""
        stages = []
        for position, (first, stop) in enumerate(pairwise((0, *stops))):
            stage = self._stage_of(position, first, stop, plan.stages[position].device_class)
            if stage is None:
                return None
            stages.append(stage)
        self.evaluated += len(stages)
        return replace(plan, stages=tuple(stages), step_s=evaluate_s(self._problem, plan.candidate, tuple(stages)))
