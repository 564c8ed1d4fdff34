"""A plan as the search has it, and what its step takes: the simulator's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.hosts import Placement
from planner.cost.layer_costs import Floats
from planner.cost.stage_memory import stage_memory
from planner.cost.time_ledger import end_s, layer_seconds
from planner.cost.transfers import Shares, copied_shares
from planner.kernel.makespan import B, W, makespan_s, walked_s, with_copies
from planner.plan.schedules import SCHEDULES, Ring
from planner.plan.stage import Segment
from planner.solve.order_arrays import orders_of
from planner.solve.problem import Candidate, Problem
from profiler.device import Link

TIE = 1e-12
"""Relative difference of two step times that counts as none: rounding of sums in another order."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage of a plan.

    Attributes:
        first: of its layers.
        stop: of its layers.
        device_class: position in `Problem.classes`.
        segments: what is recomputed.
    """

    first: int
    stop: int
    device_class: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """The balancer's answer.

    Attributes:
        candidate: schedule, R and M.
        stages: in pipeline order.
        step_s: seconds of the step, all-reduce and optimizer included.
        lower_bound_s: no plan for the same problem is faster.
        orders: the passes of each stage as letters, where the plan has its own.
    """

    candidate: Candidate
    stages: tuple[StageChoice, ...]
    step_s: float
    lower_bound_s: float
    orders: tuple[str, ...] = ()

    @property
    def _order(self) -> tuple[int, int, bool, int, tuple[int, ...]]:
        replicas, count = self.candidate.replicas, self.candidate.split.count
        keeps_all = SCHEDULES[self.candidate.schedule].keeps_all
        return len(self.stages) * replicas, replicas, keeps_all, count, tuple(stage.stop for stage in self.stages)

    def better_than(self, other: Balance | None) -> bool:
        """Whether it is faster.

        On a tie whether it has fewer devices, then fewer replicas, then not all micro-batches under way at once (on one
        device 1F1B and GPipe are as fast), then fewer micro-batches, then earlier cuts.
        """
        if other is None or self.step_s < other.step_s * (1 - TIE):
            return True
        return self.step_s <= other.step_s * (1 + TIE) and self._order < other._order


@dataclass(slots=True)
class Unsettled:
    """What searches leave that end without a plan, and not because there is none.

    Attributes:
        least_s: no plan that they did not come to is below; infinite if there is none.
    """

    least_s: float = np.inf

    def note(self, least_s: float) -> None:
        """One more search ended so."""
        self.least_s = min(self.least_s, least_s)


def best_of(reached: Balance | None, found: Balance | None, least_s: float) -> Balance | None:
    """The better of two plans.

    Args:
        reached: of some candidates, with a lower bound of them.
        found: of the others.
        least_s: what no plan of the others is below.
    """
    if found is None or (reached is not None and not found.better_than(reached)):
        return None if reached is None else replace(reached, lower_bound_s=min(reached.lower_bound_s, least_s))
    least_s = least_s if reached is None else min(reached.lower_bound_s, least_s)
    return replace(found, lower_bound_s=min(found.step_s, least_s))


def fits(problem: Problem, candidate: Candidate, stages: tuple[StageChoice, ...]) -> bool:
    """Whether every stage fits its device."""
    return all(
        stage_memory(
            problem.costs,
            problem.parameters,
            device := problem.classes[stage.device_class].device,
            candidate.schedule,
            candidate.split,
            problem.costs.optimizer(device.kind, problem.optimizer),
            number=len(stages) - position,
            first=stage.first,
            stop=stage.stop,
            segments=stage.segments,
            ring=candidate.ring.over(len(stages)),
            replicas=problem.as_replicas(candidate.replicas),
            carrier=problem.carrier(device),
        ).total
        <= device.memory_bytes
        for position, stage in enumerate(stages)
    )


def evaluate_s(
    problem: Problem, candidate: Candidate, stages: tuple[StageChoice, ...], orders: Sequence[str] = ()
) -> float:
    """Seconds of the step of a plan: the simulator's number."""
    seconds, placement = passes_seconds(problem, candidate, stages), placement_of(problem, candidate, stages)
    ring = candidate.ring.over(len(stages))
    ends = [
        sum(end_seconds(problem, candidate, stage, placement.averaging(ring.rank_of(number))))
        for number, stage in enumerate(stages)
    ]
    end_s = max(sum(ends[stage] for stage in ring.stages_of(rank)) for rank in range(ring.ranks))
    if not orders:
        return makespan_s(candidate.schedule, seconds, ring.chunks) + end_s
    return walked_s(orders_of(orders, candidate.split.count, ring.chunks), seconds, ring) + end_s


def passes_seconds(problem: Problem, candidate: Candidate, stages: tuple[StageChoice, ...]) -> Floats:
    """Of all passes and messages, as `planner.kernel.makespan.makespan_s` has them."""
    split, splits = candidate.split, SCHEDULES[candidate.schedule].splits_backward
    placement = placement_of(problem, candidate, stages)
    ring = candidate.ring.over(len(stages))
    large, small = (
        stage_seconds(problem, size, stages, ring, splits=splits, placement=placement)
        for size in (split.largest, split.smallest)
    )
    number = split.number_largest
    seconds: Floats = np.concatenate(
        (np.repeat(large[..., None], number, axis=2), np.repeat(small[..., None], split.count - number, axis=2)), axis=2
    )
    if splits:
        seconds[B] -= seconds[W]
    return with_copies(seconds, shares_of(problem, placement, ring))


def shares_of(problem: Problem, placement: Placement, ring: Ring) -> list[Shares]:
    """What of messages the ends copy, after each stage but the last one."""
    near, hosts = copied_shares(problem.link), placement.hosts
    far = near if hosts is None else copied_shares(hosts.between)
    return [far if hosts is not None and _is_far(placement, ring, stage) else near for stage in range(ring.stages - 1)]


def _is_far(placement: Placement, ring: Ring, stage: int) -> bool:
    """Whether what a stage sends to the next one leaves a host."""
    return placement.is_far(ring.rank_of(stage), ring.rank_of(stage + 1))


def placement_of(problem: Problem, candidate: Candidate, stages: tuple[StageChoice, ...]) -> Placement:
    """Where the ranks of these stages are: all stages of a rank have its class."""
    ring = candidate.ring.over(len(stages))
    classes = [stage.device_class for stage in stages]
    assert classes == [classes[ring.rank_of(stage)] for stage in range(ring.stages)], (classes, ring)
    return problem.placement(classes[: ring.ranks], candidate.replicas)


def end_seconds(
    problem: Problem, candidate: Candidate, stage: StageChoice, averaging: Link | None = None
) -> tuple[float, float]:
    """Seconds of a stage's all-reduce, of replicas on several hosts over that link, and of its optimizer step."""
    device = problem.classes[stage.device_class].device
    trainable = float(problem.parameters.trainable[stage.first, stage.stop])
    if not trainable:
        return 0.0, 0.0
    terms = end_s(problem.end_figures(device.kind, candidate.replicas, averaging))
    (reduce_s, reduce_byte_s), (optimizer_s, optimizer_byte_s) = terms["all_reduce_s"], terms["optimizer_s"]
    stepped = float(problem.parameters.stepped(problem.shares(candidate.replicas))[stage.first, stage.stop])
    return reduce_s + reduce_byte_s * trainable, optimizer_s + optimizer_byte_s * stepped


def stage_seconds(
    problem: Problem,
    size: int,
    stages: tuple[StageChoice, ...],
    ring: Ring,
    *,
    splits: bool,
    placement: Placement | None = None,
) -> Floats:
    """Seconds of F, R, B, SEND_F, SEND_B and W, which is a part of B, of every stage for that size, shape (6, K).

    Passes are without copies, and messages with them.

    Args:
        problem: that the stages are of.
        size: of a micro-batch.
        stages: the cuts.
        ring: which rank runs which.
        splits: whether the schedule takes W apart.
        placement: of the ranks, where there are several hosts.
    """
    near = problem.messages_s(size)
    sent = [near] * (len(stages) + 1)  # at the boundary before each stage
    if placement is not None and placement.hosts is not None:
        far = problem.messages_s(size, far=True)
        sent[1:-1] = [far if _is_far(placement, ring, stage) else near for stage in range(len(stages) - 1)]
    within = (np.zeros(problem.layers + 1),) * 2
    sent[1:-1] = [within if ring.is_turn(stage) else sent[stage + 1] for stage in range(len(stages) - 1)]
    rows = []
    for number, stage in enumerate(stages):
        costs = layer_seconds(problem.costs, problem.classes[stage.device_class].device.kind, size)
        forward_s, _, backward_s, weight_s, split_s = costs.of(stage.first, stage.stop)
        split_s *= splits
        recompute_s = [costs.of(segment.first, segment.stop)[1] for segment in stage.segments]
        rows.append(
            (
                forward_s,
                recompute_s[-1] if recompute_s else 0.0,
                backward_s + sum(recompute_s[:-1]) + split_s,
                sent[number + 1][0][stage.stop],
                sent[number][1][stage.first],
                weight_s + split_s,
            )
        )
    return np.array(rows, dtype=np.float64).T
