"""Numbers of micro-batches that plans are looked for with, and what no plan with another one is below.

Up to `EVERY` all of them. A batch of 63,000 samples allows fifteen thousand, which bounds alone took minutes
for, and neighbours take nearly the same; so beyond some are left out. What these could gain is not
proven away: no plan does the work in less than an even share of it, and that is what is said of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.time_ledger import layer_seconds
from planner.plan.micro_batches import MicroBatches
from planner.solve.problem import Problem, counts_between

CERTAINTY = 1 - 1e-9
"""Factor that leaves room for rounding."""


def left_out_s(problem: Problem) -> float:
    """A step time that no plan is below whose M is left out: an even share of the work; infinite if none is."""
    shares = [problem.settings.batch_size // replicas for replicas in problem.replicas()]
    sizes = {size for share in shares for size in _sizes_left_out(problem, share)}
    if not sizes:
        return np.inf
    per_sample_s = min(_work_s(problem, size) / size for size in sizes)
    return CERTAINTY * per_sample_s * problem.settings.batch_size / len(problem.devices)


def _sizes_left_out(problem: Problem, share: int) -> Sequence[int]:
    """Samples of their micro-batches that the profile covers."""
    left_out = sorted({*counts_between(problem.settings, share)} - {*problem.counts_tried(share)})
    if not left_out:
        return ()
    smallest = MicroBatches(share, left_out[-1]).smallest
    largest = MicroBatches(share, left_out[0]).largest
    return [size for size in range(smallest, largest + 1) if problem.covers(size)]


def _work_s(problem: Problem, size: int) -> float:
    """Of a micro-batch, each layer on the fastest device for it."""
    costs = [layer_seconds(problem.costs, group.device.kind, size) for group in problem.classes]
    return float(np.min([one.forward_s + one.backward_s for one in costs], axis=0).sum())
