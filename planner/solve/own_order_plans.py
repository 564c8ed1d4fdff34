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
from typing import NamedTuple, TypeAlias

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.cost.stage_memory import StageMoments, stage_moments, together
from planner.kernel.any_order import any_order_s, ranks_s
from planner.kernel.list_scheduler import Room, lacking_bytes
from planner.kernel.turns import BACKWARD, WEIGHTS, ways
from planner.plan.held import Held, moments_in
from planner.plan.orders import PassKind
from planner.plan.schedules import Ring
from planner.solve.allowed_cuts import Stops
from planner.solve.chunk_plans import ChunkChoice, ChunkPlans, segments_of_stage
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.level_cuts import Level
from planner.solve.order_arrays import orders_of, texts_of
from planner.solve.own_orders import FEW_TO_MOVE, Tried, best_orders, moved
from planner.solve.problem import Candidate, Problem

MOST_TRIED = 1_000
"""Micro-batches of stages that are looked at for all sets of stages to recompute; of more sets, one stage changes at a
time [chosen]."""
MOST_COUNTED = 64
"""Micro-batches of a step up to which each number of them in flight is looked at [chosen]."""
MOST_CHANGED = 100_000
"""Micro-batches of stages that are looked at for changes of single stages of one plan [chosen: each change of 64 stages
of 1,024 micro-batches takes 3 s]."""


Flags: TypeAlias = tuple[bool, ...]
"""Of each chunk of a rank, or of each stage, whether it is recomputed."""
_Place: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A rank, the class of its device, and the first layer of each of its stages and that after the last."""


class RankRoom(NamedTuple):
    """Of one rank, by chunk; see `planner.kernel.list_scheduler.Room`."""

    free: Floats
    flying: Floats
    waiting: Floats

    @property
    def over(self) -> float:
        """Bytes that one micro-batch needs too many on its way through all chunks; at most 0 if it fits."""
        return lacking_bytes(Room(*self), np.arange(len(self.flying)))

    def most(self) -> tuple[int, ...]:
        """Micro-batches in flight at most in each chunk: they are so in all chunks before it, too."""
        fits = self.flying.cumsum(axis=0) <= self.free[BACKWARD][:, None]
        return tuple((fits.sum(axis=1) - 1).tolist())

    def holds_all(self) -> bool:
        """Whether the order need not look at memory."""
        each = self.flying + self.waiting[:, ::-1]
        most, computing = each.max(axis=1), each[:, 1:].max(axis=1)
        fits = computing + most.sum() - most <= self.free[BACKWARD]
        return bool(fits.all() and (most.sum() <= self.free[WEIGHTS]).all())


class RankModes(NamedTuple):
    """What a rank may recompute with these cuts.

    Attributes:
        flags: which chunks, each set that fits and makes sense, the fewest first; none if nothing fits.
        always: chunks that all of them recompute.
        most: micro-batches that each chunk holds at most, with any of them.
    """

    flags: tuple[Flags, ...]
    always: Flags
    most: tuple[int, ...]


class ChunkBytes(NamedTuple):
    """Of one stage.

    Attributes:
        kept: bytes with no micro-batch, whichever chunk of the rank computes.
        passing: those that are there while this one computes, by kind of pass and moment: with none, with one and with
            more micro-batches.
        flying: what so many micro-batches in flight need more than none, shape (M + 1,).
        waiting: what so many need that wait for the gradients of their parameters, likewise.
    """

    kept: float
    passing: Floats
    flying: Floats
    waiting: Floats


def chunk_bytes(memory: Callable[[Sequence[Held]], StageMoments], count: int) -> ChunkBytes:
    """What a stage needs that holds so many micro-batches in flight, or waiting for gradients of parameters.

    Where there are many micro-batches, each counts with what the first, the second or the last one needs: the more of
    them in flight, the smaller the next one may be, and the fewer receives are posted ahead.
    """
    many = range(count + 1) if count <= MOST_COUNTED else (0, 1, 2, count - 1, count)
    found = memory(
        [
            *(Held(flying, 0, kind) for kind in PassKind for flying in many),
            *(Held(0, waiting) for waiting in many),
        ]
    )
    passing = np.broadcast_to(found.passing, 4 * len(many))
    *_, flying, waiting = np.split(kept := found.totals - passing, 4)
    return ChunkBytes(float(kept[0]), passing.reshape(4, -1)[:-1], _growth(flying, many), _growth(waiting, many))


def room_of(chunks: Sequence[ChunkBytes], limit: int, *, always: bool = True) -> RankRoom:
    """What a rank may hold on a device of so many bytes.

    Args:
        chunks: that it runs.
        limit: bytes of the device.
        always: whether that is asked for where there is room for all micro-batches, too.
    """
    flying, waiting = np.array([chunk.flying for chunk in chunks]), np.array([chunk.waiting for chunk in chunks])
    kept, passing = sum(chunk.kept for chunk in chunks), np.array([chunk.passing for chunk in chunks])
    # the end of the step may need more than all that passes while few micro-batches are in flight
    least = flying[:, 1].cumsum() + kept + passing[:, :, 1].T
    free = limit - kept - passing.min(axis=2).T
    room = RankRoom(np.where(least <= limit, free, limit - least + flying[:, 1].cumsum()), flying, waiting)
    if not always and room.holds_all():
        return RankRoom(np.full_like(free, np.inf), np.zeros_like(flying), np.zeros_like(waiting))
    return room


def _growth(kept: Floats, many: Sequence[int]) -> Floats:
    """What micro-batches need more than none, from the bytes with so many of them, shape (M + 1,)."""
    if many[-1] < len(many):
        grown: Floats = np.maximum.accumulate(kept - kept[0])
        return grown
    each = float(np.diff(kept)[[0, 1, -1]].max())
    return np.arange(many[-1] + 1.0) * max(each, 0.0)


def room_arrays(rooms: Sequence[RankRoom], ring: Ring) -> Room:
    """What all ranks may hold, as the kernel takes it."""
    own = [(rooms[ring.rank_of(stage)], stage // ring.ranks) for stage in range(ring.stages)]
    return Room(
        np.array([room.free[:, chunk] for room, chunk in own]).T.copy(),
        np.array([room.flying[chunk] for room, chunk in own]),
        np.array([room.waiting[chunk] for room, chunk in own]),
    )


class OwnOrderPlans(ChunkPlans):
    """Plans of one schedule, R, M and number of stages, as `ChunkPlans`, with orders of their own."""

    tries_all = False
    walks = 16

    def __init__(self, problem: Problem, candidate: Candidate, deadline: Deadline = NO_DEADLINE) -> None:
        super().__init__(problem, candidate, deadline)
        self.moves_passes = self.stages * candidate.split.count <= FEW_TO_MOVE
        self._own = [self.ring.stages_of(rank) for rank in range(self.ranks)]
        self._rooms: dict[tuple[_Place, Flags], RankRoom] = {}
        self._rank_modes: dict[_Place, RankModes] = {}
        self._tried = Tried()
        self._ways = ways(self.ring)
        self._chunk_bytes: dict[tuple[int, int, int, int, bool], ChunkBytes] = {}
        self._levels: dict[tuple[int, ...], tuple[Indices, Level]] = {}

    def fitted(
        self, stops: Stops, classes: tuple[int, ...], below_s: float = np.inf, *, thorough: bool = True
    ) -> ChunkChoice | None:
        """The fastest plan found with these cuts that fits; None if none does, or none takes less than `below_s`.

        If it need not be thorough, and there are many sets of stages to recompute, the fewest and the most alone.
        """
        if self._works_s(stops, classes) >= below_s:
            return None
        if self.at_best_s(stops, classes) >= below_s:
            return None
        modes = self._modes(stops, classes)
        best: ChunkChoice | None = None
        tried = None if thorough else self._tried_if_several
        for recompute in self._chosen(modes):
            if best is not None and self.deadline.over:
                break
            limit_s = below_s if best is None else best.step_s
            found = self._ordered(stops, classes, recompute, limit_s, tried, moves=thorough)
            if found is not None and found.step_s < limit_s:
                best = found
        if best is not None and thorough and self._many_sets(modes):
            best = self._one_by_one(best, modes)
        return best if best is None or self._fits(best) else None

    def levelled(self, stops: Stops, classes: tuple[int, ...]) -> Stops:
        """With several chunks a rank, cuts near these by which the ranks are done at about the same time."""
        if self.ring.chunks == 1:
            return stops
        key = classes
        if key not in self._levels:
            rules = self.problem.rules
            places = np.flatnonzero(rules.allowed)
            group = list(classes)
            large, small = (sum(kind[size][group][:, places] for kind in self.passes_s) for size in range(2))
            work_s = self._counts[0] * large + self._counts[1] * small
            demanded = np.flatnonzero(np.isin(places, np.flatnonzero(rules.demanded)))
            head_s, messages_s = self.forward_s[0][group][:, places], self.messages_s[0][0][places]
            self._levels[key] = places, Level(work_s, head_s, messages_s, demanded.tolist(), self.ring)
        places, level = self._levels[key]
        cuts = np.searchsorted(places, stops[:-1])
        return (*(int(places[cut]) for cut in level.found(cuts.tolist())), stops[-1])

    def finished(self, choice: ChunkChoice) -> ChunkChoice:
        """The plan with recompute of single stages changed, and single passes moved, so that the step is shorter."""
        if self.deadline.over:
            return choice
        modes = self._modes(choice.stops, choice.classes)
        if self._many_sets(modes):
            choice = self._one_by_one(choice, modes)
        seconds = self.seconds(choice.stops, choice.classes, choice.recompute)
        rooms, least_s = self._rooms_of(choice.stops, choice.classes, choice.recompute, seconds)
        count = self.candidate.split.count
        orders = orders_of(choice.orders, count, self.ring.chunks)
        end_s = self.end_s(choice.stops, choice.classes)
        found = self._choice(moved((choice.step_s - end_s, orders), seconds, rooms, least_s, self.ring), choice)
        return found if found.step_s < choice.step_s and self._fits(found) else choice

    def _fits(self, choice: ChunkChoice) -> bool:
        """Whether all ranks fit as the report counts: smaller micro-batches may need more of some messages."""
        if self.candidate.split.equal:
            return True
        for rank, order in enumerate(orders_of(choice.orders, self.candidate.split.count, self.ring.chunks)):
            flags = tuple(choice.recompute[stage] for stage in self._own[rank])
            limit = self.problem.classes[choice.classes[rank]].device.memory_bytes
            has_all = np.isinf(self._room(rank, choice.stops, choice.classes, flags).free).all()
            if not has_all and self._needed(rank, choice, order) > limit:
                return False
        return True

    def _needed(self, rank: int, choice: ChunkChoice, order: Indices) -> int:
        """Bytes of a rank in that order, at the moment that needs most."""
        moments = moments_in(order, self.candidate.split.count, self.ring.chunks)
        stops, own = choice.stops, self._own[rank]
        found = [
            self._moments(
                stage, choice.classes[rank], stops, choice.recompute[stage], [held[chunk] for _, held in moments]
            )
            for chunk, stage in enumerate(own)
        ]
        whole = found[0] if len(own) == 1 else together(found, [computing for computing, _ in moments])
        return whole.largest.total

    def _works_s(self, stops: Stops, classes: Sequence[int]) -> float:
        """The same whether it fits or not: soon found, and mostly enough."""
        return ranks_s(self.seconds(stops, classes), self._ways) + self.end_s(stops, classes)

    def at_best_s(self, stops: Stops, classes: Sequence[int]) -> float:
        """What no order and no recompute of these cuts takes less than."""
        modes: list[RankModes] = []
        for rank in range(self.ranks):
            modes.append(self._modes_of(rank, stops, classes))
            if not modes[-1].flags:
                return np.inf
        seconds = self.seconds(stops, classes, self.by_stage([mode.always for mode in modes]))
        most = np.array(self.by_stage([mode.most for mode in modes]))
        return any_order_s(seconds, most, self._ways) + self.end_s(stops, classes)

    def over_bytes(self, rank: int, stops: Stops, classes: Sequence[int]) -> int:
        """Bytes that a rank needs beyond its device for one micro-batch, recomputed or not; 0 if it fits."""
        return int(max(0.0, min(self._room(rank, stops, classes, flags).over for flags in self._flags())))

    def _flags(self) -> list[Flags]:
        """Which chunks of a rank may be recomputed, the fewest first."""
        mode, chunks = self.problem.settings.recompute, self.ring.chunks
        if mode == "auto":
            return sorted(itertools.product((False, True), repeat=chunks), key=sum)
        return [(mode == "always",) * chunks]

    def _modes(self, stops: Stops, classes: Sequence[int]) -> list[tuple[Flags, ...]]:
        """Which chunks of each rank to recompute: what fits, and makes sense."""
        return [self._modes_of(rank, stops, classes).flags for rank in range(self.ranks)]

    def _modes_of(self, rank: int, stops: Stops, classes: Sequence[int]) -> RankModes:
        """The same of one rank, with what follows from it."""
        place = self._place(rank, stops, classes)
        if place not in self._rank_modes:
            every = self._flags()
            if len(every) > 1 and self._room(rank, stops, classes, every[0]).holds_all():
                every = every[:1]
            else:
                every = [flags for flags in every if self._room(rank, stops, classes, flags).over <= 0]
            most = (self._room(rank, stops, classes, flags).most() for flags in every)
            self._rank_modes[place] = RankModes(
                tuple(every), tuple(map(all, zip(*every, strict=True))), tuple(map(max, zip(*most, strict=True)))
            )
        return self._rank_modes[place]

    def _chosen(self, modes: Sequence[tuple[Flags, ...]]) -> Iterator[Flags]:
        """All sets of stages to recompute where they are few; else as few stages as may be, and as many."""
        if not all(modes):
            return iter(())
        if not self._many_sets(modes):
            return map(self.by_stage, itertools.product(*modes))
        return iter({self.by_stage([mode[0] for mode in modes]), self.by_stage([mode[-1] for mode in modes])})

    def _many_sets(self, modes: Sequence[tuple[Flags, ...]]) -> bool:
        """Whether there are so many sets of stages to recompute that not all are tried."""
        return math.prod(len(mode) for mode in modes) * self.stages * self.candidate.split.count > MOST_TRIED

    def _one_by_one(self, best: ChunkChoice, modes: Sequence[tuple[Flags, ...]]) -> ChunkChoice:
        """Change single ranks as long as the step becomes shorter, of many large ones the last few alone."""
        changes = [(rank, flags) for rank, mode in enumerate(modes) if len(mode) > 1 for flags in mode]
        most = 2 * max(1, MOST_CHANGED // (self.stages * self.candidate.split.count))
        for rank, flags in changes[-most:]:
            now = [tuple(best.recompute[stage] for stage in self._own[each]) for each in range(self.ranks)]
            if flags == now[rank] or self.deadline.over:
                continue
            changed = self.by_stage([*now[:rank], flags, *now[rank + 1 :]])
            found = self._ordered(best.stops, best.classes, changed, best.step_s, self._tried_if_several)
            if found is not None and found.step_s < best.step_s:
                best = found
        return best

    @property
    def _tried_if_several(self) -> Tried | None:
        return self._tried if self.ring.chunks > 1 else None

    def _ordered(
        self,
        stops: Stops,
        classes: tuple[int, ...],
        recompute: tuple[bool, ...],
        below_s: float,
        tried: Tried | None = None,
        *,
        moves: bool = True,
    ) -> ChunkChoice | None:
        """With the fastest order found, if any may take less than `below_s`."""
        seconds = self.seconds(stops, classes, recompute)
        rooms, least_s = self._rooms_of(stops, classes, recompute, seconds)
        end_s = self.end_s(stops, classes)
        if least_s + end_s >= below_s:
            return None
        found = best_orders(seconds, rooms, least_s, self.deadline, below_s - end_s, self.ring, tried, moves=moves)
        return None if found is None else self._choice(found, ChunkChoice(np.inf, stops, classes, recompute))

    def _choice(self, found: tuple[float, Indices], plan: ChunkChoice) -> ChunkChoice:
        """A plan with these orders."""
        makespan_s, orders = found
        texts = texts_of(orders, self.candidate.split.count)
        return replace(plan, step_s=makespan_s + self.end_s(plan.stops, plan.classes), orders=texts)

    def _rooms_of(
        self, stops: Stops, classes: Sequence[int], recompute: Sequence[bool], seconds: Floats
    ) -> tuple[Room, float]:
        """What the ranks may hold, and what no order takes less than."""
        flags = [tuple(recompute[stage] for stage in self._own[rank]) for rank in range(self.ranks)]
        rooms = [self._room(rank, stops, classes, own) for rank, own in enumerate(flags)]
        most = self.by_stage([room.most() for room in rooms])
        return room_arrays(rooms, self.ring), any_order_s(seconds, np.array(most), self._ways)

    def _room(self, rank: int, stops: Stops, classes: Sequence[int], recomputed: Flags) -> RankRoom:
        """What a rank may hold: bytes of its device less what is there in any case, and of each micro-batch."""
        key = self._place(rank, stops, classes), recomputed
        if key not in self._rooms:
            self._rooms[key] = self.limited_room(rank, classes[rank], stops, recomputed, always=False)
        return self._rooms[key]

    def _place(self, rank: int, stops: Stops, classes: Sequence[int]) -> _Place:
        """All of a plan that a rank's bytes depend on, but for what it recomputes."""
        ends: list[int] = []
        for stage in self._own[rank]:
            ends += _ends(stops, stage)
        return rank, classes[rank], tuple(ends)

    def limited_room(self, rank: int, group: int, stops: Stops, recomputed: Flags, *, always: bool = True) -> RankRoom:
        """The same; `always` where there is room for all micro-batches, too."""
        chunks = [
            self._bytes_of(stage, group, stops, flag) for stage, flag in zip(self._own[rank], recomputed, strict=True)
        ]
        return room_of(chunks, self.problem.classes[group].device.memory_bytes, always=always)

    def _bytes_of(self, stage: int, group: int, stops: Stops, recomputed: bool) -> ChunkBytes:
        key = stage, group, *_ends(stops, stage), recomputed
        if key not in self._chunk_bytes:
            memory = partial(self._moments, stage, group, stops, recomputed)
            self._chunk_bytes[key] = chunk_bytes(memory, self.candidate.split.count)
        return self._chunk_bytes[key]

    def _moments(self, stage: int, group: int, stops: Stops, recomputed: bool, held: Sequence[Held]) -> StageMoments:
        """Bytes of a stage that holds so many micro-batches, at each of these moments."""
        device, (first, stop) = self.problem.classes[group].device, _ends(stops, stage)
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
            replicas=self.problem.as_replicas(self.candidate.replicas),
            carrier=self.problem.carrier(device),
        )


def _ends(stops: Stops, stage: int) -> tuple[int, int]:
    """The layers of a stage: from the first one to before the second."""
    return stops[stage - 1] if stage else 0, stops[stage]
