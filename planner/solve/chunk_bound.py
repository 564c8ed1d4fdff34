"""What no plan with several chunks a rank takes less than, whatever its cuts: cheap, for all candidates.

`planner.solve.cut_bound` makes a better bound of those whose turn comes.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import prefix_sums
from planner.cost.stage_sums import pooled_bytes
from planner.cost.time_ledger import end_s
from planner.solve.chunk_plans import ChunkPlans

CERTAINTY = 1 - 1e-9
"""Factor that leaves room for rounding."""


def least_s(plans: ChunkPlans) -> float:
    """A cheap bound: an even share of the work, and what the rank with each layer has to do.

    Of unlike devices the fastest with each layer counts. Whatever the order of its passes, the first micro-batch comes
    to a layer through all layers before it, and the last gradient goes back through them, while gradients of parameters
    may wait (see `planner.kernel.any_order`).
    """
    split = plans.candidate.split
    passes = [[np.diff(sums, axis=-1).min(axis=0) for sums in sized] for sized in zip(*plans.passes_s, strict=True)]
    many = split.number_largest, split.count - split.number_largest
    total = [sum(number * one for number, one in zip(many, kind, strict=True)) for kind in zip(*passes, strict=True)]
    forward, backward = (prefix_sums(np.minimum(*kind))[:-1] for kind in list(zip(*passes, strict=True))[:2])
    weights = total[2] if len(total) > 2 else 0.0
    own = forward + total[0] + total[1] + np.maximum(weights, backward)
    share_s = float(np.sum(total)) / plans.ranks
    return CERTAINTY * max(share_s, float(own.max())) + least_end_s(plans)


def has_room(plans: ChunkPlans) -> bool:
    """Whether the ranks together have room for what stages hold whatever the cuts: parameters and what follows them."""
    problem, candidate = plans.problem, plans.candidate
    kinds = {group.device.kind for group in problem.classes}
    needed = min(pooled_bytes(problem.basis(kind, candidate)) for kind in kinds)
    rooms = sorted(
        (group.device.memory_bytes for group in problem.classes for _ in range(group.capacity(candidate.replicas))),
        reverse=True,
    )
    return needed <= sum(rooms[: plans.ranks])


def least_end_s(plans: ChunkPlans) -> float:
    """All-reduce and optimizer step of the slowest rank, if ranks and replicas shared the parameters evenly."""
    problem = plans.problem
    replicas = plans.candidate.replicas
    trainable = float(problem.parameters.trainable[0, -1]) / plans.ranks
    ends = [end_s(problem.end_figures(group.device.kind, replicas)) for group in problem.classes]
    return trainable * min(
        terms["all_reduce_s"][1] + terms["optimizer_s"][1] / problem.shares(replicas) for terms in ends
    )
