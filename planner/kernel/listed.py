"""What a step takes with plans that a search listed: each is walked through, thousands of them in a second.

The seconds of a stage are differences of prefix sums, and copies. What it recomputes is known for equal micro-batches
alone; with two sizes it is left out, so that no plan takes less than what is said here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.candidate_stages import OPTIMIZER, RECOMPUTES, Arcs
from planner.kernel.compiled import compiled
from planner.kernel.makespan import SEND_B, SEND_F, B, F, R, W, walked_in_turn
from planner.kernel.search import Choices, FoundPlans
from planner.kernel.tables import BACKWARD_SIZED, FORWARD_SIZED, copied_s
from planner.kernel.turns import Turns

LARGE, SMALL = range(2)
"""Sizes of micro-batches."""


class PassSums(NamedTuple):
    """Prefix sums of what layers take for a large and for a small micro-batch, of shape (2, C, N), and the sizes.

    Attributes:
        forward: of forward passes.
        backward: of backward passes; where the schedule splits them, of those of the inputs' gradients.
        weights: of the passes of the parameters' gradients.
        number_largest: how many micro-batches are large.
        micro_batches: M.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    number_largest: int
    micro_batches: int


@compiled
def listed_steps_s(
    turns: Turns, arcs: Arcs, choices: Choices, sums: PassSums, plans: FoundPlans, rows: Indices, stages: int
) -> Floats:
    """No step of these plans, which have as many stages, is shorter; with equal micro-batches none is longer, either.

    Args:
        turns: of the schedule, for that many stages.
        arcs: that they are made of.
        choices: how these recompute.
        sums: of the layers.
        plans: all that were found.
        rows: which of them.
        stages: K of these.
    """
    steps_s, seconds = np.zeros(len(rows)), np.zeros((6, stages, sums.micro_batches))
    for number in range(len(rows)):
        row = rows[number]
        end_s = 0.0
        for stage in range(stages):
            first, stop, device = plans.cuts[row, stage], plans.cuts[row, stage + 1], plans.classes[row, stage]
            in_flight_index = stages - 1 - stage if arcs.by_number else 0
            arc = arcs.offset[in_flight_index, device, stop] + stop - 1 - first
            end_s = max(end_s, arcs.terms[arc, OPTIMIZER])
            again_s, before_s = 0.0, 0.0
            if arcs.need[arc] == RECOMPUTES and sums.number_largest == sums.micro_batches:
                choice = plans.choices[row, stage]
                if choice < 0 and choices.number_of[arc] > 0:
                    choice = choices.first_of[arc]
                if choice >= 0:
                    before_s = choices.turnaround_s[choice]
                    again_s = max(0.0, choices.recompute_s[choice] - before_s)
            for batch in range(sums.micro_batches):
                size = LARGE if batch < sums.number_largest else SMALL
                forward_s = sums.forward[size, device, stop] - sums.forward[size, device, first]
                seconds[F, stage, batch] = forward_s + copied_s(arcs.copies, FORWARD_SIZED + size, first, stop)
                seconds[R, stage, batch] = again_s
                own_s = sums.backward[size, device, stop] - sums.backward[size, device, first]
                own_s += copied_s(arcs.copies, BACKWARD_SIZED + size, first, stop)
                seconds[B, stage, batch] = own_s + before_s
                seconds[SEND_F, stage, batch] = arcs.sized_links[size, stop]
                seconds[SEND_B, stage, batch] = arcs.sized_links[2 + size, first]
                seconds[W, stage, batch] = sums.weights[size, device, stop] - sums.weights[size, device, first]
        steps_s[number] = walked_in_turn(turns, stages, seconds) + end_s
    return steps_s
