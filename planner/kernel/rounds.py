"""What a step of 1F1B takes at least where a stage waits for all after it with two micro-batches.

A path from pass to pass, with what it has of all stages known from the layers alone: nothing but the stage where it
stays depends on the cuts. So it bounds each stage by itself, and where layers do not divide evenly that is more than a
mean over all stages says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Indices
from planner.kernel.compiled import compiled
from planner.kernel.tables import BACKWARD_SIZED, FORWARD_SIZED, Tables, copied_s
from planner.plan.schedules import Objective

ROUNDS = int(Objective.ROUNDS)


class Late(NamedTuple):
    """Of rounds, the small micro-batches, which come last.

    Attributes:
        number: the stage of that number from the end, or the first one, has no more in flight than there are of them.
        around_s: what one takes from there to the end and back, and what a large one takes longer back to there.
        end_s: what their backward passes take at some stage in front, less what a large one takes longer back from
            there, with the smallest and the largest M.
        end_number: of the stages up to which from the end these are in front.
    """

    number: int
    around_s: float
    end_s: tuple[float, float]
    end_number: int


NONE_LATE = Late(0, 0.0, (0.0, 0.0), 0)
"""As long as nothing is known of them."""


@compiled
def round_s(tables: Tables, late: Late, number: int, device: int, first: int, stop: int, copies: bool) -> float:
    """What a stage and those after it take beyond one pass of each, if it waits for them with two micro-batches.

    Of 1F1B there are at most as many in flight as the stage's number from the end. After the first one is back the
    stage goes on, one backward and one forward pass at a time, until a forward pass after which another one has to come
    back: that may be the last of all,

        F1 ... B1 F3 B2 F4 B3 ... F(M) ............. B(M)          stage k, which may have 2 in flight
           F1 B1                      F(M) B(M)                    all after it

    or the last large one. After that the small ones are left,

    1. of which the stage does the backward passes,
    2. or that one goes back to the start of the model, or to one of the first stages, which does these passes,
    3. or to a stage that has as many in flight as there are small ones, of which the last one goes to the end and back.

    0 where there are too few. Of many M each of these is on a line, so the smaller of both ends counts. Without copies
    it is no less for more layers.
    """
    forward, forward_small, backward, backward_small = (
        tables.sized[0, device, stop] - tables.sized[0, device, first],
        tables.sized[1, device, stop] - tables.sized[1, device, first],
        tables.sized[2, device, stop] - tables.sized[2, device, first],
        tables.sized[3, device, stop] - tables.sized[3, device, first],
    )
    if copies:
        forward += copied_s(tables.copies, FORWARD_SIZED, first, stop)
        forward_small += copied_s(tables.copies, FORWARD_SIZED + 1, first, stop)
        backward += copied_s(tables.copies, BACKWARD_SIZED, first, stop)
        backward_small += copied_s(tables.copies, BACKWARD_SIZED + 1, first, stop)
    both, both_small = forward + backward, forward_small + backward_small
    large, small = tables.large, tables.small
    around = tables.around[:, -1] - tables.around[:, first] + (number - 1) * tables.around_crossing
    all_back_s = tables.first_back[-1]
    back_s = all_back_s - tables.first_back[first]
    end_s = late.end_s if number <= late.end_number else (0.0, 0.0)
    # F2 to F(number), and as many of the last backward passes
    early_large, early_small = min(large[0], large[1], number) - 1, max(0, number - max(large[0], large[1]))
    late_small = min(number, small[0], small[1])
    left_out_s = early_large * forward + early_small * forward_small
    left_out_s += (number - 1 - early_large - early_small) * max(forward, forward_small) + forward_small
    left_out_s += late_small * backward_small + (number - late_small) * max(backward, backward_small)
    longest_s = 0.0
    if large.min() > number:
        one_s = min(
            (large[0] - 1 - number) * both + small[0] * backward_small,
            (large[1] - 1 - number) * both + small[1] * backward_small,
        )
        longest_s = back_s + around[0] + one_s
        fewest_s = (min(large[0], large[1]) - 1 - number) * both
        longest_s = max(longest_s, all_back_s + around[0] + fewest_s)
        other_s = min((large[0] - 1 - number) * both + end_s[0], (large[1] - 1 - number) * both + end_s[1])
        longest_s = max(longest_s, all_back_s + around[0] + other_s)
        if number <= late.number:
            round_s = min(
                (large[0] - 1 - number) * both + max(0, small[0] - late.number) * both_small,
                (large[1] - 1 - number) * both + max(0, small[1] - late.number) * both_small,
            )
            longest_s = max(longest_s, around[0] + late.around_s + round_s)
    if (large + small).min() > number:
        stays_s = min(
            (large[0] - 1) * both + small[0] * both_small,
            (large[1] - 1) * both + small[1] * both_small,
        )
        longest_s = max(longest_s, back_s + around[1] + stays_s - left_out_s)
    return longest_s


@compiled
def late_of(tables: Tables, length: Indices, fewest: Indices) -> Late:
    """What is known of the small micro-batches of rounds."""
    small, last = tables.small, length.shape[2] - 1
    if tables.objective != ROUNDS or small.min() < 1:
        return NONE_LATE
    longest = np.zeros(last + 1, dtype=np.int64)
    for stop in range(1, last + 1):
        longest[stop] = length[:, :, stop].max()
    most = tables.most_stages
    farthest, nearest = np.zeros(most + 1, dtype=np.int64), np.full(most + 1, last)  # after, before so many stages
    for stages in range(1, most + 1):
        farthest[stages] = farthest[stages - 1]
        for stop in range(farthest[stages - 1] + 1, last + 1):
            if stop - longest[stop] <= farthest[stages - 1]:
                farthest[stages] = stop
        for stop in range(nearest[stages - 1], last + 1):
            nearest[stages] = min(nearest[stages], stop - longest[stop])
    number = min(most, small.min())
    ahead = farthest[most - number]
    around_s = tables.around[1, -1] - tables.around[1, ahead] + tables.first_back[-1] - tables.first_back[ahead]
    least = max(tables.least_stages, min(most, fewest[last]))
    around_s += (min(number, least) - 1) * tables.around_crossing[1]
    one_s, other_s, end_number, before_s = 0.0, 0.0, 0, 0.0
    for stages in range(1, least):
        before_s += tables.first_back_most[farthest[stages - 1]]
        here_s = tables.small_back[nearest[most - stages]]
        if small.sum() * here_s - 2 * before_s > (one_s + other_s) * stages:
            one_s, other_s = (small[0] * here_s - before_s) / stages, (small[1] * here_s - before_s) / stages
            end_number = least - stages
    return Late(number, around_s, (one_s, other_s), end_number)


@compiled
def round_recomputes(more_large: float, recompute_share: float, number: int) -> float:
    """For how many steady micro-batches a stage recomputes at least in the time of `round_s`."""
    return max(0.0, more_large - number) * recompute_share
