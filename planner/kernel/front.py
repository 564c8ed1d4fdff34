"""The front of a plan, the stages before some position, in a few numbers: what any of them take at least.

With the quantities of `planner.kernel.makespan` five numbers bound a plan: it takes at least

    sum(through) + max(max forward + max backward, max both) + max(optimizer)

with the steady bottlenecks of forward and backward phase and `both` of one stage; where forward and backward passes
alternate, `both` alone counts. With two sizes of micro-batches there are fifteen: the four of
`planner.kernel.two_sizes` for each phase and for both, and three more. `planner.kernel.rear` says the like of the
stages after that position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.candidate_stages import (
    BACKWARD,
    FLOW_SHOPS,
    FORWARD,
    IMPOSSIBLE,
    OPTIMIZER,
    RECOMPUTES,
    ROUND,
    THROUGH,
    Arcs,
)
from planner.kernel.compiled import compiled
from planner.kernel.devices_used import used_numbers
from planner.kernel.rounds import ROUNDS, round_recomputes
from planner.kernel.two_sizes import (
    BACKWARD_PHASE,
    BOTH_PHASES,
    FORWARD_PHASE,
    PHASES,
    both_phases,
    four_of,
    front_with,
    link_machines,
    stage_machines,
)

FRONT_PASSES_S, FRONT_FORWARD_S, FRONT_BACKWARD_S, FRONT_BOTH_S, FRONT_OPTIMIZER_S, FRONT_COLUMNS = range(6)
"""Columns of `before_bounds` for micro-batches of one size, and how many there are."""
LEAST_STAY_S, SIZED_FRONT_OPTIMIZER_S, SIZED_FRONT_COLUMNS = 12, 14, 15
"""Columns with two sizes of micro-batches: after four numbers for each phase and for both the least seconds of the
longest stay of large micro-batches, forward and backward, and of the slowest optimizer; and how many there are."""


class _Front(NamedTuple):
    """The fields of `Arcs` that `_lower` reads: to hand over all of them takes several times as long as it does."""

    objective: int
    steady_recomputes: int
    more_large: float
    recompute_share: float
    backward_link: Floats
    backward_head: Floats
    least_recompute_s: Floats
    terms: Floats


@compiled
def before_bounds(arcs: Arcs) -> Floats:
    """What the stages in front cost at least: at [u, i, :] of layers [0, i), when those after use choice u.

    Each number is the smallest of its own; infinite where nothing leads to the start, or no stages after lead to the
    end.
    """
    used, total = used_numbers(arcs.capacity)
    choices, classes = used.shape
    positions = len(arcs.allowed)
    before = np.full((choices, positions, SIZED_FRONT_COLUMNS if arcs.two_sizes else FRONT_COLUMNS), np.inf)
    lowest = _lowest(arcs)
    facts = _Front(
        arcs.objective,
        arcs.steady_recomputes,
        arcs.more_large,
        arcs.recompute_share,
        arcs.backward_link,
        arcs.backward_head,
        arcs.least_recompute_s,
        arcs.terms,
    )
    for choice in range(choices - 1, -1, -1):
        if total[choice] > arcs.most_stages:
            continue
        if total[choice] >= arcs.least_stages:
            before[choice, 0, :] = 0.0
        if total[choice] == arcs.most_stages:
            continue
        in_flight_index = total[choice] if arcs.by_number else 0
        stride = 1
        for device in range(classes):
            rest = choice + stride
            stride *= arcs.capacity[device] + 1
            if used[choice, device] == arcs.capacity[device]:
                continue
            for stop in range(max(1, lowest[choice]), positions):
                for step in range(arcs.length[in_flight_index, device, stop]):
                    first = stop - 1 - step
                    place = arcs.offset[in_flight_index, device, stop] + step
                    if arcs.need[place] == IMPOSSIBLE or before[rest, first, FRONT_PASSES_S] == np.inf:
                        continue
                    if arcs.two_sizes:
                        _lower_two_sizes(arcs, device, first, stop, place, before[rest, first], before[choice, stop])
                    else:
                        _lower(facts, total[choice] + 1, first, place, before[rest, first], before[choice, stop])
    return before


@compiled
def may_reach(arcs: Arcs) -> bool:
    """Whether stages lead from the start to the end, as many as there may be, whatever devices they are on.

    That is less than `before_bounds` says, and takes a tenth of its time.
    """
    in_flight_indices, classes, positions = arcs.length.shape
    fewest = np.full(positions, arcs.most_stages + 1)
    fewest[0] = 0
    for stop in range(1, positions):
        for in_flight_index in range(in_flight_indices):
            for device in range(classes):
                for step in range(arcs.length[in_flight_index, device, stop]):
                    if arcs.need[arcs.offset[in_flight_index, device, stop] + step] != IMPOSSIBLE:
                        fewest[stop] = min(fewest[stop], fewest[stop - 1 - step] + 1)
    return bool(fewest[-1] <= arcs.most_stages)


@compiled
def _lowest(arcs: Arcs) -> Indices:
    """For each choice of devices a position such that no stages on them reach from further in front to the end."""
    used, total = used_numbers(arcs.capacity)
    choices, classes = used.shape
    positions = len(arcs.allowed)
    lowest = np.full(choices, positions, dtype=np.int64)
    lowest[0] = positions - 1
    for choice in range(1, choices):
        if total[choice] > arcs.most_stages:
            continue
        in_flight_index = total[choice] - 1 if arcs.by_number else 0
        stride = 1
        for device in range(classes):
            rest = choice - stride
            stride *= arcs.capacity[device] + 1
            if used[choice, device] > 0:
                for stop in range(lowest[rest], positions):
                    lowest[choice] = min(lowest[choice], stop - arcs.length[in_flight_index, device, stop])
    return lowest


@compiled
def _lower(facts: _Front, number: int, first: int, place: int, front: Floats, here: Floats) -> None:
    """Lower the numbers `here` to those of a front with one more stage after it, the so many-th from the end."""
    terms = facts.terms[place]
    forward, backward = 0.0, 0.0
    both = max(0.0, terms[BACKWARD] + facts.steady_recomputes * facts.least_recompute_s[place])
    if facts.objective == ROUNDS:
        again = round_recomputes(facts.more_large, facts.recompute_share, number)
        both = max(both, terms[ROUND] + again * facts.least_recompute_s[place])
    if facts.objective == FLOW_SHOPS:
        forward = terms[FORWARD]
        backward = max(both, facts.backward_link[first]) + facts.backward_head[first]
        both = forward + backward
    here[FRONT_PASSES_S] = min(here[FRONT_PASSES_S], front[FRONT_PASSES_S] + terms[THROUGH])
    here[FRONT_FORWARD_S] = min(here[FRONT_FORWARD_S], max(front[FRONT_FORWARD_S], forward))
    here[FRONT_BACKWARD_S] = min(here[FRONT_BACKWARD_S], max(front[FRONT_BACKWARD_S], backward))
    here[FRONT_BOTH_S] = min(here[FRONT_BOTH_S], max(front[FRONT_BOTH_S], both))
    here[FRONT_OPTIMIZER_S] = min(here[FRONT_OPTIMIZER_S], max(front[FRONT_OPTIMIZER_S], terms[OPTIMIZER]))


@compiled
def _lower_two_sizes(arcs: Arcs, device: int, first: int, stop: int, place: int, front: Floats, here: Floats) -> None:
    """The same with two sizes of micro-batches."""
    n, m = arcs.more_large, arcs.more_small
    stage, stage_back = stage_machines(arcs.sized, arcs.copies, device, first, stop, arcs.need[place] == RECOMPUTES)
    link, link_back = link_machines(arcs.sized_links, first)
    for phase in range(PHASES):
        one, other = link, stage
        if phase == BACKWARD_PHASE:
            one, other = link_back, stage_back
        elif phase == BOTH_PHASES:
            one, other = both_phases(link, link_back), both_phases(stage, stage_back)
        four = front_with(front_with(four_of(front, phase), one, n, m), other, n, m)
        for index in range(4):
            here[4 * phase + index] = min(here[4 * phase + index], four[index])
        if phase != BOTH_PHASES:
            stay_s = max(one.large_stay, other.large_stay, front[LEAST_STAY_S + phase])
            here[LEAST_STAY_S + phase] = min(here[LEAST_STAY_S + phase], stay_s)
    slowest_s = max(front[SIZED_FRONT_OPTIMIZER_S], arcs.terms[place, OPTIMIZER])
    here[SIZED_FRONT_OPTIMIZER_S] = min(here[SIZED_FRONT_OPTIMIZER_S], slowest_s)


@compiled
def step_bound_s(arcs: Arcs, front: Floats) -> float:
    """What a plan takes at least whose stages `front` describes."""
    if arcs.two_sizes:
        whole = 3  # the last of four numbers has all of the path in the front
        forward_s, backward_s = front[4 * FORWARD_PHASE + whole], front[4 * BACKWARD_PHASE + whole]
        return float(max(forward_s + backward_s, front[4 * BOTH_PHASES + whole]) + front[SIZED_FRONT_OPTIMIZER_S])
    stays_s = max(front[FRONT_FORWARD_S] + front[FRONT_BACKWARD_S], front[FRONT_BOTH_S])
    return float(front[FRONT_PASSES_S] + stays_s + front[FRONT_OPTIMIZER_S])
