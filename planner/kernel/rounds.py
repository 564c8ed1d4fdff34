"""What a step of 1F1B takes at least where a stage waits for all after it with two micro-batches.

A path from pass to pass, with what it has of all stages known from the layers alone: nothing but the stage where it
stays depends on the cuts. So it bounds each stage by itself, and where layers do not divide evenly that is more than a
mean over all stages says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
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


class RoundSums(NamedTuple):
    """The fields of `Tables` that `round_s` reads: to hand over all of them takes seven times as long as it does."""

    large: Indices
    small: Indices
    sized: Floats
    copies: Floats
    around: Floats
    around_crossing: Floats
    first_back: Floats


@compiled
def round_sums(tables: Tables) -> RoundSums:
    """Those of these tables."""
    return RoundSums(
        tables.large,
        tables.small,
        tables.sized,
        tables.copies,
        tables.around,
        tables.around_crossing,
        tables.first_back,
    )


@compiled
def round_s(sums: RoundSums, late: Late, number: int, device: int, first: int, stop: int, copies: bool) -> float:
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
        sums.sized[0, device, stop] - sums.sized[0, device, first],
        sums.sized[1, device, stop] - sums.sized[1, device, first],
        sums.sized[2, device, stop] - sums.sized[2, device, first],
        sums.sized[3, device, stop] - sums.sized[3, device, first],
    )
    if copies:
        forward += copied_s(sums.copies, FORWARD_SIZED, first, stop)
        forward_small += copied_s(sums.copies, FORWARD_SIZED + 1, first, stop)
        backward += copied_s(sums.copies, BACKWARD_SIZED, first, stop)
        backward_small += copied_s(sums.copies, BACKWARD_SIZED + 1, first, stop)
    both, both_small = forward + backward, forward_small + backward_small
    # the number of large ones with the smallest and the largest M, and of small ones; scalars, for arrays cost more
    large, other_large = sums.large[0], sums.large[1]
    small, other_small = sums.small[0], sums.small[1]
    fewest, most = min(large, other_large), max(large, other_large)
    around_s = sums.around[0, -1] - sums.around[0, first] + (number - 1) * sums.around_crossing[0]
    all_back_s = sums.first_back[-1]
    back_s = all_back_s - sums.first_back[first]
    # F2 to F(number), and as many of the last backward passes
    early_large, early_small = min(fewest, number) - 1, max(0, number - most)
    late_small = min(number, small, other_small)
    left_out_s = early_large * forward + early_small * forward_small
    left_out_s += (number - 1 - early_large - early_small) * max(forward, forward_small) + forward_small
    left_out_s += late_small * backward_small + (number - late_small) * max(backward, backward_small)
    longest_s = 0.0
    if fewest > number:
        end_s, other_end_s = late.end_s if number <= late.end_number else (0.0, 0.0)
        stays_s, other_stays_s = (large - 1 - number) * both, (other_large - 1 - number) * both
        one_s = min(stays_s + small * backward_small, other_stays_s + other_small * backward_small)
        longest_s = back_s + around_s + one_s
        fewest_s = (fewest - 1 - number) * both
        longest_s = max(longest_s, all_back_s + around_s + fewest_s)
        other_s = min(stays_s + end_s, other_stays_s + other_end_s)
        longest_s = max(longest_s, all_back_s + around_s + other_s)
        if number <= late.number:
            round_s = min(
                stays_s + max(0, small - late.number) * both_small,
                other_stays_s + max(0, other_small - late.number) * both_small,
            )
            longest_s = max(longest_s, around_s + late.around_s + round_s)
    if min(large + small, other_large + other_small) > number:
        stays_s = min((large - 1) * both + small * both_small, (other_large - 1) * both + other_small * both_small)
        around_s = sums.around[1, -1] - sums.around[1, first] + (number - 1) * sums.around_crossing[1]
        longest_s = max(longest_s, back_s + around_s + stays_s - left_out_s)
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
