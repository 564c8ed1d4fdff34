"""The cuts for which a sum over the cuts is least, of those whose stages are free; and the stages that are then not.

Places of cuts are numbered from 0, before the first layer, to that after the last one, and each stage goes from one
place to a later one. `free[k, a - k, n - 1]` says whether stage k may go from place a on over n places.

1. From the first stage to the last: the least for what ends at each place with each stage.
2. From the last to the first: the least of what begins there. With that before it and its own that is the least of all
   cuts that have a stage; if it is no less than what is known, the stage is free no more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.compiled import compiled


@compiled
def least_cuts(costs: Floats, free: NDArray[np.bool_], limit: float) -> tuple[float, Indices]:
    """The least sum, and the places at which its stages end; infinite if there are no such cuts.

    Args:
        costs: of a stage if it ends at a place, shape (K, places).
        free: stages, shape (K, places - K, longest); those of which no cuts are below the limit are taken out.
        limit: see there.
    """
    stages, places = costs.shape
    before = np.full((stages + 1, places), np.inf)
    after = np.full((stages + 1, places), np.inf)
    came_from = np.zeros((stages + 1, places), dtype=np.int64)
    before[0, 0] = after[stages, places - 1] = 0.0
    for stage in range(stages):
        for begin in range(stage, stage + free.shape[1]):
            if before[stage, begin] == np.inf:
                continue
            for end in range(begin + 1, min(begin + free.shape[2], places - 1) + 1):
                sum_s = before[stage, begin] + costs[stage, end]
                if free[stage, begin - stage, end - begin - 1] and sum_s < before[stage + 1, end]:
                    before[stage + 1, end] = sum_s
                    came_from[stage + 1, end] = begin
    for stage in range(stages - 1, -1, -1):
        for begin in range(stage, stage + free.shape[1]):
            for end in range(begin + 1, min(begin + free.shape[2], places - 1) + 1):
                rest_s = costs[stage, end] + after[stage + 1, end]
                if not before[stage, begin] + rest_s < limit:
                    free[stage, begin - stage, end - begin - 1] = False
                elif free[stage, begin - stage, end - begin - 1]:
                    after[stage, begin] = min(after[stage, begin], rest_s)
    ends = np.zeros(stages, dtype=np.int64)
    place = places - 1
    for stage in range(stages, 0, -1):
        ends[stage - 1] = place
        place = came_from[stage, place]
    return before[stages, places - 1], ends


@compiled
def free_ends(free: NDArray[np.bool_], places: int) -> NDArray[np.bool_]:
    """Whether a stage may end at a place, shape (K, places)."""
    stages, begins, longest = free.shape
    found = np.zeros((stages, places), dtype=np.bool_)
    for stage in range(stages):
        for begin in range(begins):
            for length in range(longest):
                if free[stage, begin, length]:
                    found[stage, stage + begin + length + 1] = True
    return found
