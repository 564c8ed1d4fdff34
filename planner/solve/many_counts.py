"""What no plan takes less than with any of many numbers of micro-batches: one bound for all of them.

Between two divisors of a batch all M have micro-batches of the same two sizes, and their bounds hardly differ: with
1,024 samples 511 of them have sizes 2 and 1. To bound each takes as long for the last as for the first. What a stage
takes is, from one of these M to the next, the seconds of some fewer large and some more small micro-batches: on a line.
So the smaller of both ends is below all between. Memory is no less than with as many large micro-batches as the last
one has, and as many in all as the first. A problem with these seconds and this memory has a bound that holds for all.

Where it is not high enough for all, it may be for each half of them: the one with the smaller bound comes first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost.layer_costs import Floats
from planner.kernel.candidate_stages import make_arcs
from planner.kernel.front import before_bounds, step_bound_s
from planner.kernel.tables import BACKWARD_STEADY, FORWARD_STEADY, Tables
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES, Objective
from planner.solve.problem import Candidate, Problem
from planner.solve.tables import make_tables, message_seconds, pass_seconds, recompute_share


def alike(one: Candidate, other: Candidate) -> bool:
    """Whether a bound may be for both: they differ in M alone, and not in the sizes of micro-batches.

    Where the inputs of all micro-batches are kept, memory depends on M, and unequal ones have a closed form of their
    own (`planner.kernel.two_sizes`): for these there is none.
    """
    record, split = SCHEDULES[one.schedule], one.split
    return (
        record.objective is not Objective.FLOW_SHOPS
        and not record.keeps_all
        and (one.schedule, one.replicas, one.ring) == (other.schedule, other.replicas, other.ring)
        and not split.equal
        and not other.split.equal
        and split.batch_size == other.split.batch_size
        and split.smallest == other.split.smallest
    )


def bound_of_all_s(problem: Problem, fewest: Candidate, most: Candidate, enough_s: float) -> tuple[float, int]:
    """What no plan of any M from one to the other is below, up to `enough_s`, and how many stages were looked at.

    Args:
        problem: whose plans.
        fewest: that with the smallest M.
        most: that with the largest one; all between are alike.
        enough_s: how high a bound is looked for.
    """
    if problem.most_stages(fewest.replicas, fewest.split.count) != problem.most_stages(most.replicas, most.split.count):
        return 0.0, 0
    arcs = make_arcs(make_tables(problem, most) if fewest == most else _tables(problem, fewest, most), enough_s)
    return min(enough_s, step_bound_s(arcs, before_bounds(arcs)[0, -1])), len(arcs.need)


def _tables(problem: Problem, fewest: Candidate, most: Candidate) -> Tables:
    """The least of all M from one to the other."""
    count, large = fewest.split.count, most.split.number_largest
    small_ones = replace(fewest, split=MicroBatches(count * fewest.split.smallest + large, count))
    room = make_tables(problem, small_ones)
    one, other = (pass_seconds(problem, candidate) for candidate in (fewest, most))
    ratio = (most.split.count - 1) / room.steady

    def least(of_one: Floats, of_other: Floats) -> Floats:
        """Prefix sums of the least that each layer takes, all micro-batches together, for each of `room.steady`."""
        layers: Floats = np.minimum(np.diff(of_one), ratio * np.diff(of_other))
        return np.concatenate((np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)), axis=1)

    steady = {name: least(one[name], other[name]) for name in ("forward", "backward", "steady_recompute")}
    copies, of_most = (message_seconds(problem, candidate)["copies"] for candidate in (fewest, most))
    for row in (FORWARD_STEADY, BACKWARD_STEADY):
        copies[:, row] = np.minimum(copies[:, row], ratio * of_most[:, row])
    return room._replace(
        **one
        | steady
        | {
            "copies": copies,
            "recompute_share": recompute_share(np.diff(one["sized"][-2:]), steady["steady_recompute"]),
            "large": np.array([fewest.split.number_largest, most.split.number_largest]),
            "small": np.array([one.split.count - one.split.number_largest for one in (fewest, most)]),
        }
    )
