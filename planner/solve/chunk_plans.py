"""Plans of ranks with several chunks, from cuts to what a step takes and what has to be recomputed for it to fit.

    plans = ChunkPlans(problem, candidate)                   # schedule, R, M, ranks and chunks
    choice = plans.fitted((2, 4, 5, 8), (0, 0))              # stages of layers 0-1, 2-3, 4, 5-7 on two ranks
    plans.balance(choice)

A device holds all chunks of its rank: what each keeps counts, of what is there for a moment the largest, and what a
process has once counts once. A stage is kept or recomputed as a whole here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from planner.cost.layer_costs import Floats, Indices, prefix_sums
from planner.cost.stage_memory import stage_moments
from planner.cost.time_ledger import layer_seconds
from planner.cost.transfers import Shares, copied_shares
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W, makespan_s, with_copies
from planner.plan.schedules import SCHEDULES
from planner.plan.stage import Segment
from planner.solve.allowed_cuts import Stops
from planner.solve.balance import Balance, StageChoice, end_seconds, evaluate_s
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.problem import Candidate, Problem

MOST_PASSES_OF_SETS = 2_000_000
"""Passes that are walked to find out which chunks of some cuts are best recomputed, where all ways are tried [chosen:
30 ms]."""
Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """A plan with several chunks a rank.

    Attributes:
        step_s: seconds of the step.
        stops: index after the last layer of each stage.
        classes: position in `Problem.classes` of each rank's devices.
        recompute: whether each stage is recomputed.
        orders: the passes of each stage as letters, where the plan has its own.
    """

    step_s: float
    stops: Stops
    classes: tuple[int, ...]
    recompute: tuple[bool, ...]
    orders: tuple[str, ...] = ()


class ChunkPlans:
    """Plans of one schedule, R, M, number of ranks and of chunks.

    Args:
        problem: that they solve.
        candidate: with its ring.
        deadline: when to look for nothing better.

    Attributes:
        ring: which rank runs which stages.
        ranks: how many there are.
        stages: K.
        tries_all: whether `fitted` has found the fastest of all plans with its cuts, whenever it was asked.
        walks: through all passes that it takes to find out what cuts are worth.
        moves_passes: whether a plan is made faster by moving single passes, which takes far longer than that.
    """

    tries_all = True
    walks = 1
    moves_passes = False

    def __init__(self, problem: Problem, candidate: Candidate, deadline: Deadline = NO_DEADLINE) -> None:
        self.problem, self.candidate = problem, candidate
        self.ring = candidate.ring
        self.ranks, self.stages = candidate.ring.ranks, candidate.ring.stages
        split = candidate.split
        self.sizes = split.largest, split.smallest
        self.deadline = deadline
        self._counts = np.array([split.number_largest, split.count - split.number_largest])
        self._splits = SCHEDULES[candidate.schedule].splits_backward
        self._bytes: dict[tuple[int, int, int, int, bool], Floats] = {}
        self._sets_known: dict[tuple[int, int, tuple[tuple[int, ...], ...]], list[tuple[bool, ...]]] = {}
        self._ends: dict[tuple[int, int, int], float] = {}

    @cached_property
    def forward_s(self) -> Floats:
        """Sums of layers [0, i) for a large and for a small micro-batch, shape (2, C, L + 1)."""
        return self._sums("forward_s")

    @cached_property
    def recompute_s(self) -> Floats:
        """The same of recompute."""
        return self._sums("recompute_s")

    @cached_property
    def backward_s(self) -> Floats:
        """The same of whole backward passes."""
        return self._sums("backward_s")

    @cached_property
    def weight_s(self) -> Floats:
        """The same of the gradients of parameters, as a pass of their own."""
        return self._sums("weight_s") + self._sums("split_s")

    @cached_property
    def inputs_s(self) -> Floats:
        """The same of the rest of the backward pass."""
        return self.backward_s - self._sums("weight_s")

    @cached_property
    def messages_s(self) -> tuple[Floats, Floats]:
        """Of outputs and of gradients at each boundary for a large and for a small micro-batch, shape (2, L + 1)."""
        between = [self.problem.messages_s(size) for size in self.sizes]
        outputs_s, gradients_s = zip(*between, strict=True)
        return np.array(outputs_s), np.array(gradients_s)

    @cached_property
    def shares(self) -> Shares:
        """What of messages their senders and receivers copy."""
        return copied_shares(self.problem.link)

    def _sums(self, name: str) -> Floats:
        kinds = [group.device.kind for group in self.problem.classes]
        return np.array(
            [
                [prefix_sums(getattr(layer_seconds(self.problem.costs, kind, size), name)) for kind in kinds]
                for size in self.sizes
            ]
        )

    def step_s(self, stops: Stops, classes: Sequence[int], recompute: Sequence[bool] = ()) -> float:
        """Seconds of the step, up to rounding; nothing is recomputed by default. Whether it fits is not asked."""
        seconds = self.seconds(stops, classes, recompute)
        return makespan_s(self.candidate.schedule, seconds, self.ring.chunks) + self.end_s(stops, classes)

    @property
    def passes_s(self) -> tuple[Floats, ...]:
        """Of each kind of pass the sums over layers: forward and backward, the latter in two where it is split."""
        if not self._splits:
            return self.forward_s, self.backward_s
        return self.forward_s, self.inputs_s, self.weight_s

    def seconds(self, stops: Stops, classes: Sequence[int], recompute: Sequence[bool] = ()) -> Floats:
        """Of all passes and messages, as `planner.kernel.makespan.makespan_s` has them."""
        first, stop = np.array((0, *stops[:-1])), np.array(stops)
        group = np.array(classes)[self._ranks_of]
        seconds = np.zeros((6 if self._splits else 5, self.stages, 2))
        outputs_s, gradients_s = self.messages_s
        for size in range(2):
            seconds[F, :, size] = _between(self.forward_s[size], group, first, stop)
            if any(recompute):
                seconds[R, :, size] = _between(self.recompute_s[size], group, first, stop) * np.array(recompute)
            backward_s = self.inputs_s if self._splits else self.backward_s
            seconds[B, :, size] = _between(backward_s[size], group, first, stop)
            seconds[SEND_F, :-1, size] = outputs_s[size][stop[:-1]] * self._sends
            seconds[SEND_B, 1:, size] = gradients_s[size][first[1:]] * self._sends
            if self._splits:
                seconds[W, :, size] = _between(self.weight_s[size], group, first, stop)
        return np.repeat(with_copies(seconds, [self.shares] * (self.stages - 1)), self._counts, axis=2)

    @cached_property
    def _ranks_of(self) -> Indices:
        """The rank of each stage, shape (K,)."""
        return np.array([self.ring.rank_of(stage) for stage in range(self.stages)])

    @cached_property
    def _sends(self) -> Floats:
        """1 for each stage that sends to the next one, and 0 where that is on the same rank, shape (K - 1,)."""
        return np.array([not self.ring.is_turn(stage) for stage in range(self.stages - 1)], dtype=np.float64)

    def end_s(self, stops: Stops, classes: Sequence[int]) -> float:
        """Of the slowest rank's all-reduce and optimizer step."""
        spent = [0.0] * self.ranks
        for index, (first, stop) in enumerate(pairwise((0, *stops))):
            rank = self._ranks_of[index]
            key = classes[rank], first, stop
            if key not in self._ends:
                self._ends[key] = sum(
                    end_seconds(self.problem, self.candidate, StageChoice(first, stop, classes[rank], ()))
                )
            spent[rank] += self._ends[key]
        return max(spent)

    def fitted(
        self, stops: Stops, classes: tuple[int, ...], below_s: float = np.inf, *, thorough: bool = True
    ) -> ChunkChoice | None:
        """The fastest plan with these cuts that fits; None if none does, or none takes less than `below_s`.

        Of each rank that is too full, every set of chunks is tried that lets it fit when recomputed and of which no
        chunk can be left out; if it need not be thorough, the one alone that takes least to recompute. Where these are
        too many for all ranks together, one rank changes at a time.
        """
        at_best_s = self.at_best_s(stops, classes)
        if at_best_s >= below_s:
            return None
        mode = self.problem.settings.recompute
        sets = [self._sets_of(rank, stops, classes, mode) for rank in range(self.ranks)]
        if not all(sets):
            return None
        if not thorough:
            sets = [flags[:1] for flags in sets]

        def made(chosen: Sequence[tuple[bool, ...]]) -> ChunkChoice:
            recompute = self.by_stage(chosen)
            priced = any(recompute) and mode == "auto"
            return ChunkChoice(
                self.step_s(stops, classes, recompute) if priced else at_best_s, stops, classes, recompute
            )

        if math.prod(map(len, sets)) * 2 * self.stages * self.candidate.split.count <= MOST_PASSES_OF_SETS:
            best = min(map(made, itertools.product(*sets)), key=lambda choice: choice.step_s)
        else:
            self.tries_all = False
            best = self._rank_by_rank(sets, made)
        return best if best.step_s < below_s else None

    def by_stage(self, chosen: Sequence[tuple[Said, ...]]) -> tuple[Said, ...]:
        """What is said of each rank's chunks, in pipeline order."""
        return tuple(chosen[rank][stage // self.ranks] for stage, rank in enumerate(self._ranks_of))

    def _rank_by_rank(
        self,
        sets: Sequence[Sequence[tuple[bool, ...]]],
        made: Callable[[Sequence[tuple[bool, ...]]], ChunkChoice],
    ) -> ChunkChoice:
        """What the ranks recompute is changed one rank at a time, as long as the step becomes shorter."""
        chosen = [flags[0] for flags in sets]
        best, faster = made(chosen), True
        while faster:
            faster = False
            for rank, flags in enumerate(sets):
                for other in flags:
                    if self.deadline.over:
                        return best
                    if other == chosen[rank]:
                        continue
                    changed = [*chosen[:rank], other, *chosen[rank + 1 :]]
                    choice = made(changed)
                    if choice.step_s < best.step_s:
                        best, chosen, faster = choice, changed, True
        return best

    def levelled(self, stops: Stops, classes: tuple[int, ...]) -> Stops:
        """Cuts to begin with, from these: the same where the order of passes does not depend on them."""
        return stops

    def _recompute_s(self, rank: int, stops: Stops, classes: Sequence[int], flags: Sequence[bool]) -> float:
        """Seconds to recompute these chunks of a rank for one micro-batch."""
        sums, starts = self.recompute_s[0, classes[rank]], (0, *stops)
        stages = self.ring.stages_of(rank)
        return float(
            sum(sums[stops[stage]] - sums[starts[stage]] for stage, flag in zip(stages, flags, strict=True) if flag)
        )

    def finished(self, choice: ChunkChoice) -> ChunkChoice:
        """The plan with what is looked for around the best cuts alone: every set of chunks to recompute."""
        if not any(choice.recompute) or self.deadline.over:
            return choice
        return self.fitted(choice.stops, choice.classes, choice.step_s) or choice

    def at_best_s(self, stops: Stops, classes: Sequence[int]) -> float:
        """Seconds of the step with as little recompute as the settings allow, whether it fits or not."""
        always = self.problem.settings.recompute == "always"
        return self.step_s(stops, classes, (True,) * self.stages if always else ())

    def over_bytes(self, rank: int, stops: Stops, classes: Sequence[int]) -> int:
        """Bytes that a rank needs beyond its device with the recompute that needs least; 0 if it fits."""
        chunks = self.ring.chunks
        sets = [frozenset(range(chunks))] if self.problem.settings.recompute != "never" else []
        if self.problem.settings.recompute != "always":
            sets.append(frozenset())
        needed = min(self.rank_bytes(rank, stops, classes, chosen) for chosen in sets)
        return max(0, needed - self.problem.classes[classes[rank]].device.memory_bytes)

    def _sets_of(self, rank: int, stops: Stops, classes: Sequence[int], mode: str) -> list[tuple[bool, ...]]:
        """Which chunks of a rank to recompute, those first that take least."""
        starts = (0, *stops)
        key = rank, classes[rank], tuple(starts[stage : stage + 2] for stage in self.ring.stages_of(rank))
        if key not in self._sets_known:
            recompute_s = partial(self._recompute_s, rank, stops, classes)
            self._sets_known[key] = sorted(self._sets(rank, stops, classes, mode), key=recompute_s)
        return self._sets_known[key]

    def _sets(self, rank: int, stops: Stops, classes: Sequence[int], mode: str) -> Iterator[tuple[bool, ...]]:
        """Which chunks of a rank to recompute, by chunk."""
        chunks = self.ring.chunks
        limit = self.problem.classes[classes[rank]].device.memory_bytes
        numbers = {"always": [chunks], "never": [0], "auto": range(chunks + 1)}[mode]
        found: list[frozenset[int]] = []
        for number in numbers:
            for chosen in map(frozenset, itertools.combinations(range(chunks), number)):
                if any(fewer <= chosen for fewer in found):
                    continue
                if self.rank_bytes(rank, stops, classes, chosen) <= limit:
                    found.append(chosen)
                    yield tuple(chunk in chosen for chunk in range(chunks))

    def rank_bytes(self, rank: int, stops: Stops, classes: Sequence[int], recomputed: frozenset[int]) -> int:
        """Bytes of a rank's device if these of its chunks are recomputed, at the moment that needs most."""
        needed = np.zeros(1)
        for chunk, stage in enumerate(self.ring.stages_of(rank)):
            first = stops[stage - 1] if stage else 0
            needed = needed + self._stage_bytes(stage, classes[rank], first, stops[stage], chunk in recomputed)
        return int(needed.max())

    def _stage_bytes(self, stage: int, group: int, first: int, stop: int, recomputed: bool) -> Floats:
        """What a stage has at each moment of its rank, what passes only where it is the one that computes."""
        key = stage, group, first, stop, recomputed
        if key not in self._bytes:
            chunk, rank = stage // self.ranks, self.ring.rank_of(stage)
            device, split, ring = self.problem.classes[group].device, self.candidate.split, self.ring
            moments = SCHEDULES[self.candidate.schedule].moments(rank, split.count, ring)
            found = stage_moments(
                self.problem.costs,
                self.problem.parameters,
                device,
                self.candidate.schedule,
                split,
                self.problem.costs.optimizer(device.kind, self.problem.optimizer),
                number=self.stages - stage,
                first=first,
                stop=stop,
                segments=segments_of_stage(first, stop, recomputed),
                replicas=self.problem.as_replicas(self.candidate.replicas),
                carrier=self.problem.carrier(device),
                ring=ring,
                held=[held[chunk] for _, held in moments],
            )
            waits = np.array([computing != chunk for computing, _ in moments])
            self._bytes[key] = found.totals - waits * found.passing
        return self._bytes[key]

    def balance(self, choice: ChunkChoice, lower_bound_s: float = np.inf) -> Balance:
        """The plan as the balancer's answer, with the simulator's number for its step.

        Args:
            choice: the plan.
            lower_bound_s: no plan is faster; by default as if this were the only one there is.
        """
        stages = tuple(
            StageChoice(
                first,
                stop,
                choice.classes[self.ring.rank_of(index)],
                segments_of_stage(first, stop, choice.recompute[index]),
            )
            for index, (first, stop) in enumerate(pairwise((0, *choice.stops)))
        )
        step_s = evaluate_s(self.problem, self.candidate, stages, choice.orders)
        return Balance(self.candidate, stages, step_s, lower_bound_s, choice.orders)


def _between(sums: Floats, group: Indices, first: Indices, stop: Indices) -> Floats:
    """Of each stage, from sums of layers [0, i) of shape (C, L + 1)."""
    seconds: Floats = sums[group, stop] - sums[group, first]
    return seconds


def segments_of_stage(first: int, stop: int, recomputed: bool) -> tuple[Segment, ...]:
    """Of a stage that is kept or recomputed as a whole."""
    return (Segment(first=first, stop=stop),) if recomputed else ()
