"""Fills `Tables`, the arrays that the compiled search reads, from a problem and a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.cost.layer_costs import Floats, LayerArrays, prefix_sums
from planner.cost.stage_sums import stage_sums
from planner.cost.transfers import all_reduce_s, boundary_s
from planner.kernel.tables import ALWAYS, AUTO, NEVER, Tables
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES, Objective
from planner.rules import FREE
from planner.solve.problem import Candidate, Problem

PRICES = 16
"""Prices of memory that are tried to bound recompute from below [fitted]."""
_SECONDS = ("forward_s", "backward_s", "recompute_s")
_MODES = {"auto": AUTO, "always": ALWAYS, "never": NEVER}


def make_tables(problem: Problem, candidate: Candidate) -> Tables:
    """The arrays for one schedule, R and M."""
    split, settings = candidate.split, problem.settings
    record, classes = SCHEDULES[candidate.schedule], problem.classes
    kinds = [group.device.kind for group in classes]
    large = {kind: problem.costs.layers(kind, split.largest) for kind in kinds}
    small = {kind: problem.costs.layers(kind, split.smallest) for kind in kinds}
    most = problem.most_stages(candidate.replicas, split.count)
    numbers = range(1, 2 if record.keeps_all else most + 1)

    def sums(combine: Callable[[LayerArrays, LayerArrays], Floats]) -> Floats:
        return np.stack([prefix_sums(combine(large[kind], small[kind])) for kind in kinds])

    def steady(name: str) -> Floats:
        return sums(lambda more, less: steady_mean(split, getattr(more, name), getattr(less, name)))

    memory = stage_sums([problem.basis(kind, candidate) for kind in kinds], numbers)
    stack = problem.costs.stage_stack
    recompute = {kind: steady_mean(split, large[kind].recompute_s, small[kind].recompute_s) for kind in kinds}
    optimizers = [problem.costs.optimizer(kind, problem.optimizer) for kind in kinds]
    reduce_fixed_s, reduce_byte_s = all_reduce_s(problem.link, candidate.replicas)
    out_large, back_large = boundary_s(problem.link, problem.at_boundaries(split.largest))
    out_small, back_small = boundary_s(problem.link, problem.at_boundaries(split.smallest))
    forward_head, backward_head = _heads(problem, candidate, large, small)
    device_bytes = np.array([float(group.device.memory_bytes) for group in classes])
    class_of = {member: number for number, group in enumerate(classes) for member in group.members}
    return Tables(
        objective=int(record.objective),
        by_number=not record.keeps_all,
        last_turns_around=record.last_turns_around,
        two_sizes=record.objective is Objective.FLOW_SHOPS and not split.equal,
        steady=split.count - 1,
        recompute=_MODES[settings.recompute],
        least_stages=settings.stages or 1,
        most_stages=most,
        passing=sums(
            lambda more, less: np.minimum(more.forward_s, less.forward_s) + np.minimum(more.backward_s, less.backward_s)
        ),
        forward=steady("forward_s"),
        backward=steady("backward_s"),
        again=np.stack([prefix_sums(recompute[kind]) for kind in kinds]),
        again_passing=sums(lambda more, less: np.minimum(more.recompute_s, less.recompute_s)),
        forward_most=sums(lambda more, less: np.maximum(more.forward_s, less.forward_s)),
        forward_least=sums(lambda more, less: np.minimum(more.forward_s, less.forward_s)),
        crossing=np.minimum(out_large, out_small) + np.minimum(back_large, back_small),
        forward_link=steady_mean(split, out_large, out_small),
        backward_link=steady_mean(split, back_large, back_small),
        forward_head=forward_head,
        backward_head=backward_head,
        more_large=float(split.number_largest - 1),
        more_small=float(split.count - split.number_largest - 1),
        sized=np.stack([_of_size(sized, kinds, name) for name in _SECONDS for sized in (large, small)]),
        sized_links=np.stack([out_large, out_small, back_large, back_small]),
        memory=memory,
        stage_kept=stack.kept,
        stage_most=stack.most,
        stage_at=np.array(
            [[stack.around(kind, size)[:2] for size in (split.largest, split.smallest)] for kind in kinds]
        ),
        stage_share=np.array(
            [[stack.around(kind, size)[2] for size in (split.largest, split.smallest)] for kind in kinds]
        ),
        prices=np.stack(
            [
                np.stack([prices(row, recompute[kind]) for row in np.diff(held)])
                for kind, held in zip(kinds, memory.kept_layers, strict=True)
            ]
        ),
        trainable_bytes=problem.parameters.trainable,
        limit=device_bytes[:, None] - memory.always,
        optimizer_rate=np.array([cost.seconds_per_byte + reduce_byte_s for cost in optimizers]),
        optimizer_fixed=reduce_fixed_s,
        allowed=problem.rules.allowed,
        demanded=np.cumsum(problem.rules.demanded),
        pinned=np.array([FREE if device == FREE else class_of[int(device)] for device in problem.rules.pinned]),
        capacity=np.array([min(most, group.capacity(candidate.replicas)) for group in classes]),
    )


def _of_size(costs: dict[str, LayerArrays], kinds: Sequence[str], name: str) -> Floats:
    """Prefix sums of one field, shape (C, N)."""
    return np.stack([prefix_sums(getattr(costs[kind], name)) for kind in kinds])


def steady_mean(split: MicroBatches, large: Floats, small: Floats) -> Floats:
    """Mean over the first M - 1 micro-batches of what takes `large` and `small` for the two sizes."""
    if split.equal:
        return large
    return (split.number_largest * large + (split.count - split.number_largest - 1) * small) / (split.count - 1)


def prices(held_bytes: Floats, seconds: Floats) -> Floats:
    """Seconds per byte of some layers, spread over all, shape (PRICES,)."""
    per_byte = np.sort(seconds[held_bytes > 0] / held_bytes[held_bytes > 0])
    if not len(per_byte):
        return np.zeros(PRICES)
    some: Floats = per_byte[np.linspace(0, len(per_byte) - 1, PRICES).round().astype(int)]
    return some * np.linspace(0.9, 1.1, PRICES)


def _heads(
    problem: Problem, candidate: Candidate, large: dict[str, LayerArrays], small: dict[str, LayerArrays]
) -> tuple[Floats, Floats]:
    """What layers 0 to i - 1 take longer with a large micro-batch than with a small one, at least, two (L + 1,) arrays.

    Zero for equal micro-batches.
    """
    if candidate.split.equal or SCHEDULES[candidate.schedule].objective is not Objective.FLOW_SHOPS:
        return np.zeros(problem.layers + 1), np.zeros(problem.layers + 1)

    def least(name: str) -> Floats:
        smallest: Floats = np.min(
            [np.maximum(getattr(large[kind], name) - getattr(small[kind], name), 0.0) for kind in large], axis=0
        )
        return smallest

    return prefix_sums(least("forward_s")), prefix_sums(least("backward_s"))
