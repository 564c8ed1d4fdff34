"""Plans of schedules whose order is made for each plan: cuts, recompute and order together.

    plans = OwnOrderPlans(problem, candidate)
    choice = plans.fitted((2, 5, 8), (0, 0, 0))              # stages of layers 0-1, 2-4, 5-7

What a stage may hold follows from its device and its layers, and the order from that (`planner.solve.own_orders`); so
recompute makes room to run ahead, and is tried wherever there is not room for all micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.cost.stage_memory import StageMoments, stage_moments
from planner.kernel.list_scheduler import Room
from planner.plan.held import Held
from planner.solve.any_order import any_order_s
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans, Stops, segments_of_stage
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.order_arrays import held_in, orders_of, texts_of
from planner.solve.own_orders import best_orders, moved
from planner.solve.problem import Candidate, Problem

MOST_TRIED = 1_000
"""Micro-batches of stages that are looked at for all sets of stages to recompute; of more sets, one stage changes at a
time [chosen]."""


MOST_CHANGED = 100_000
"""Micro-batches of stages that are looked at for changes of single stages of one plan [chosen: each change of 64 stages
of 1,024 micro-batches takes 3 s]."""


class StageRoom(NamedTuple):
    """Of one stage, see `planner.kernel.list_scheduler.Room`."""

    free: float
    flying: float
    waiting: float

    @property
    def over(self) -> float:
        """Bytes that one micro-batch needs too many; at most 0 if it fits."""
        return self.flying - self.free

    def most(self, count: int) -> int:
        """Micro-batches in flight at most, while none waits."""
        return count if not self.flying else min(count, int(self.free // self.flying))

    def holds_all(self, count: int) -> bool:
        """Whether the order need not look at memory."""
        return self.flying + (count - 1) * max(self.flying, self.waiting) <= self.free


def room_of(
    memory: Callable[[Sequence[Held]], StageMoments], limit: int, count: int, *, always: bool = True
) -> StageRoom:
    """What a stage may hold on a device of so many bytes.

    Args:
        memory: its bytes where it holds so many micro-batches in flight, and waiting for gradients of parameters.
        limit: bytes of the device.
        count: micro-batches of a step.
        always: whether that is asked for where there is room for all micro-batches, too.
    """
    many = (1, min(2, count), max(1, count - 1), count)
    at = memory([*((one, one if count > 1 else 0) for one in many), (count, 0), (1, count - 1)])
    one, two, before, last, *all_there = (at.at(moment) for moment in range(len(many) + 2))
    if not always and all(each.total <= limit for each in all_there):
        return StageRoom(np.inf, 0.0, 0.0)
    flying = max(two.activations - one.activations, last.activations - before.activations)
    waiting = max(two.deferred - one.deferred, last.deferred - before.deferred)
    return StageRoom(float(limit - one.total + flying + waiting), float(flying), float(waiting))


class OwnOrderPlans(ChunkPlans):
    """Plans of one schedule, R, M and number of stages, as `ChunkPlans`, with orders of their own."""

    tries_all = False
    walks = 16

    def __init__(self, problem: Problem, candidate: Candidate, deadline: Deadline = NO_DEADLINE) -> None:
        super().__init__(problem, candidate, deadline)
        self._rooms: dict[tuple[int, int, int, int, bool], StageRoom] = {}

    def fitted(
        self, stops: Stops, classes: tuple[int, ...], below_s: float = np.inf, *, thorough: bool = True
    ) -> ChunkChoice | None:
        """The fastest plan found with these cuts that fits; None if none does, or none takes less than `below_s`.

        If it need not be thorough, and there are many sets of stages to recompute, the fewest and the most alone.
        """
        if self.at_best_s(stops, classes) >= below_s:
            return None
        modes = [self._modes(stage, stops, classes) for stage in range(self.stages)]
        best: ChunkChoice | None = None
        for recompute in self._chosen(modes):
            if best is not None and self.deadline.over:
                break
            found = self._ordered(stops, classes, recompute, below_s if best is None else best.step_s)
            if found is not None and found.step_s < (below_s if best is None else best.step_s):
                best = found
        if best is not None and thorough and self._many_sets(modes):
            best = self._one_by_one(best, modes)
        return best if best is None or self._fits(best) else None

    def finished(self, choice: ChunkChoice) -> ChunkChoice:
        """The plan with recompute of single stages changed, and single passes moved, so that the step is shorter."""
        if self.deadline.over:
            return choice
        modes = [self._modes(stage, choice.stops, choice.classes) for stage in range(self.stages)]
        if self._many_sets(modes):
            choice = self._one_by_one(choice, modes)
        seconds = self.seconds(choice.stops, choice.classes, choice.recompute)
        rooms, least_s = self._rooms_of(choice.stops, choice.classes, choice.recompute, seconds)
        count = self.candidate.split.count
        orders = orders_of(choice.orders, count)
        end_s = self.end_s(choice.stops, choice.classes)
        found = self._choice(moved((choice.step_s - end_s, orders), seconds, rooms, least_s), choice)
        return found if found.step_s < choice.step_s and self._fits(found) else choice

    def _fits(self, choice: ChunkChoice) -> bool:
        """Whether all stages fit as the report counts: smaller micro-batches may need more of some messages."""
        count = self.candidate.split.count
        starts = (0, *choice.stops)
        return self.candidate.split.equal or all(
            self._moments(
                stage,
                group := choice.classes[stage],
                starts[stage],
                starts[stage + 1],
                choice.recompute[stage],
                held_in(order, count),
            ).largest.total
            <= self.problem.classes[group].device.memory_bytes
            for stage, order in enumerate(orders_of(choice.orders, count))
        )

    def at_best_s(self, stops: Stops, classes: Sequence[int]) -> float:
        """What no order and no recompute of these cuts takes less than."""
        modes = [self._modes(stage, stops, classes) for stage in range(self.stages)]
        if not all(modes):
            return np.inf
        count = self.candidate.split.count
        seconds = self.seconds(stops, classes, [mode == (True,) for mode in modes])
        most = [
            max(self._room(stage, stops, classes, flag).most(count) for flag in mode)
            for stage, mode in enumerate(modes)
        ]
        return any_order_s(seconds, np.array(most)) + self.end_s(stops, classes)

    def over_bytes(self, rank: int, stops: Stops, classes: Sequence[int]) -> int:
        """Bytes that a stage needs beyond its device for one micro-batch, recomputed or not; 0 if it fits."""
        mode = self.problem.settings.recompute
        flags = {"always": (True,), "never": (False,), "auto": (False, True)}[mode]
        return int(max(0.0, min(self._room(rank, stops, classes, flag).over for flag in flags)))

    def _modes(self, stage: int, stops: Stops, classes: Sequence[int]) -> tuple[bool, ...]:
        """Whether to recompute a stage: what fits, and makes sense."""
        mode = self.problem.settings.recompute
        flags = {"always": (True,), "never": (False,), "auto": (False, True)}[mode]
        rooms = {flag: self._room(stage, stops, classes, flag) for flag in flags}
        if len(flags) > 1 and rooms[False].holds_all(self.candidate.split.count):
            return (False,)
        return tuple(flag for flag, room in rooms.items() if room.over <= 0)

    def _chosen(self, modes: Sequence[tuple[bool, ...]]) -> Iterator[tuple[bool, ...]]:
        """All sets of stages to recompute where they are few; else as few stages as may be, and as many."""
        if not all(modes):
            return iter(())
        if not self._many_sets(modes):
            return itertools.product(*modes)
        return iter({tuple(mode[0] for mode in modes), tuple(mode[-1] for mode in modes)})

    def _many_sets(self, modes: Sequence[tuple[bool, ...]]) -> bool:
        """Whether there are so many sets of stages to recompute that not all are tried."""
        return math.prod(len(mode) for mode in modes) * self.stages * self.candidate.split.count > MOST_TRIED

    def _one_by_one(self, best: ChunkChoice, modes: Sequence[tuple[bool, ...]]) -> ChunkChoice:
        """Change single stages as long as the step becomes shorter, of many large ones the last few alone."""
        several = [stage for stage, mode in enumerate(modes) if len(mode) > 1]
        most = max(1, MOST_CHANGED // (self.stages * self.candidate.split.count))
        for stage in several[-most:]:
            if not self.deadline.over:
                flags = best.recompute
                changed = (*flags[:stage], not flags[stage], *flags[stage + 1 :])
                found = self._ordered(best.stops, best.classes, changed, best.step_s)
                if found is not None and found.step_s < best.step_s:
                    best = found
        return best

    def _ordered(
        self, stops: Stops, classes: tuple[int, ...], recompute: tuple[bool, ...], below_s: float
    ) -> ChunkChoice | None:
        """With the fastest order found, if any may take less than `below_s`."""
        seconds = self.seconds(stops, classes, recompute)
        rooms, least_s = self._rooms_of(stops, classes, recompute, seconds)
        end_s = self.end_s(stops, classes)
        if least_s + end_s >= below_s:
            return None
        found = best_orders(seconds, rooms, least_s, self.deadline, below_s - end_s)
        return None if found is None else self._choice(found, ChunkChoice(np.inf, stops, classes, recompute))

    def _choice(self, found: tuple[float, Indices], plan: ChunkChoice) -> ChunkChoice:
        """A plan with these orders."""
        makespan_s, orders = found
        texts = texts_of(orders, self.candidate.split.count)
        return replace(plan, step_s=makespan_s + self.end_s(plan.stops, plan.classes), orders=texts)

    def _rooms_of(
        self, stops: Stops, classes: Sequence[int], recompute: Sequence[bool], seconds: Floats
    ) -> tuple[Room, float]:
        """What the stages may hold, and what no order takes less than."""
        rooms = [self._room(stage, stops, classes, flag) for stage, flag in enumerate(recompute)]
        least_s = any_order_s(seconds, np.array([room.most(self.candidate.split.count) for room in rooms]))
        return Room(*map(np.array, zip(*rooms, strict=True))), least_s

    def _room(self, stage: int, stops: Stops, classes: Sequence[int], recomputed: bool) -> StageRoom:
        """What a stage may hold: bytes of its device less what is there in any case, and of each micro-batch.

        A micro-batch counts with what the second or the last one needs: the more of them, the larger or the smaller.
        """
        first, group = stops[stage - 1] if stage else 0, classes[stage]
        key = stage, group, first, stops[stage], recomputed
        if key not in self._rooms:
            self._rooms[key] = self.limited_room(*key, always=False)
        return self._rooms[key]

    def limited_room(
        self, stage: int, group: int, first: int, stop: int, recomputed: bool, *, always: bool = True
    ) -> StageRoom:
        """The same; `always` where there is room for all micro-batches, too."""
        memory = partial(self._moments, stage, group, first, stop, recomputed)
        limit = self.problem.classes[group].device.memory_bytes
        return room_of(memory, limit, self.candidate.split.count, always=always)

    def _moments(
        self, stage: int, group: int, first: int, stop: int, recomputed: bool, held: Sequence[Held]
    ) -> StageMoments:
        """Bytes of a stage that holds so many micro-batches, at each of these moments."""
        device = self.problem.classes[group].device
        return stage_moments(
            self.problem.costs,
            self.problem.parameters,
            device,
            self.candidate.schedule,
            self.candidate.split,
            self.problem.costs.optimizer(device.kind, self.problem.optimizer),
            number=self.stages - stage,
            first=first,
            stop=stop,
            segments=segments_of_stage(first, stop, recomputed),
            ring=self.candidate.ring,
            held=held,
            shares=self.problem.shares(self.candidate.replicas),
            carrier=self.problem.carrier(device),
        )
