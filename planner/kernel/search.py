"""The best cuts, devices and segments for one schedule, R and M: a dynamic program from the last stage to the first.

A plan with K stages on layers [0, L) is a path 0 = p_K < ... < p_1 < p_0 = L of positions, where stage k from the end,
on layers [p_k, p_(k-1)), runs on one of the devices and recomputes by one of its choices of segments. Wanted is the
path with the smallest objective T (`planner.kernel.rear`) among those that fit, have from `least_stages` to
`most_stages` stages, and use no device twice; devices of a class are equal, so the search counts how many of each
class are in use. A label is the rear of a plan: the stages of layers [i, L), in a few numbers. Label A dominates B at
the same place (devices in use, position) if none of its numbers is larger: no continuation makes B the better one.

1. The empty label has no devices, at position L.
2. For k = 1, 2, ..., for each combination of k devices in use and each position i, the place is filled: each stage
   [i, j) on each class in use goes in front of each label that uses one device of the class less and begins at j.
3. A new label that, with what any stages in front of it take (`before_bounds`), does not beat the incumbent is dropped;
   first with the least recompute that its first stage needs, then with each of its choices.
4. At i = 0 the plan is complete: the incumbent, or one of the best.
5. Elsewhere a label that another one dominates is dropped, and so are those that it dominates. Of more than `width`
   labels the one with the largest bound goes, and enters the bound of what was not looked at, `dropped_s`.
6. The plans are read off from first stage to last.

What is dropped for want of room, and stages whose segments were not solved exactly, enter the bound, never silently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.candidate_stages import IMPOSSIBLE, RECOMPUTES, Arcs
from planner.kernel.compiled import compiled, inlined
from planner.kernel.devices_used import used_numbers
from planner.kernel.front import FRONT_PASSES_S, step_bound_s
from planner.kernel.labels import (
    CHOICE,
    DEVICE,
    PARENT,
    POSITION,
    BestPlans,
    Labels,
    ParetoSet,
    empty_label,
    empty_set,
    insert_label,
    insert_plan,
    is_dominated,
    no_plans,
    with_place,
)
from planner.kernel.rear import (
    COLUMNS,
    SIZED_COLUMNS,
    SearchObjective,
    grow,
    objective_of,
    raise_to_front,
    stage_in_front,
)

ROUNDING = 1e-12
"""A plan is better than another if it is by that share."""


class Choices(NamedTuple):
    """How the stages that were looked at may recompute, see `planner.kernel.segments`.

    Attributes:
        first_of: for each arc its first choice, or -1 when it was not looked at.
        number_of: for each arc how many choices it has.
        exact: for each arc whether there are no better choices.
        wanted: for each arc whether a search came by that would have liked to know.
        recompute_s: e of each choice.
        turnaround_s: x of each choice.
    """

    first_of: Indices
    number_of: Indices
    exact: NDArray[np.bool_]
    wanted: NDArray[np.bool_]
    recompute_s: Floats
    turnaround_s: Floats


class FoundPlans(NamedTuple):
    """Complete plans, the most promising first.

    Attributes:
        objective_s: T of each (for 1F1B and unequal micro-batches a lower bound of it), shape (P,).
        stages: K of each.
        cuts: positions 0, ..., L of each, shape (P, most stages + 1).
        classes: of each stage, shape (P, most stages).
        choices: how each stage recomputes, a place in `Choices`; -1 for one that keeps everything.
        dropped_s: no plan that is not here has a smaller T.
        work: labels tried, a measure of time.
    """

    objective_s: Floats
    stages: Indices
    cuts: Indices
    classes: Indices
    choices: Indices
    dropped_s: float
    work: int


class _Place(NamedTuple):
    """A place that is filled, and what is kept there.

    Attributes:
        from_end: number of the first stage from the end of the model, 1 for the last.
        devices_used: how many of each class, see `used_numbers`.
        first: where the labels begin.
        all_plans: whether dominated labels are kept, too.
        hopeful: see `search`.
    """

    from_end: int
    devices_used: int
    first: int
    all_plans: bool
    hopeful: bool


LIMIT_S, DROPPED_S = range(2)
"""Columns of the bounds of a search under way: only what is below the limit is of interest; see `FoundPlans`."""


@compiled
def search(
    arcs: Arcs,
    before: Floats,
    choices: Choices,
    below_s: float,
    width: int,
    most_plans: int,
    hopeful: bool,
    most_work: int,
) -> FoundPlans:
    """The plans with T below `below_s`.

    Args:
        arcs: stages to choose from.
        before: see `before_bounds`.
        choices: how stages may recompute.
        below_s: the incumbent.
        width: labels kept at each place.
        most_plans: 1 for the best plan alone; with more, dominated labels are kept, too, and that many plans returned.
        hopeful: whether a stage that was not looked at counts with what it needs at least; otherwise it is left out,
            and the bound knows.
        most_work: labels that may be tried; then the search ends with the plans that it has.
    """
    used, total = used_numbers(arcs.capacity)
    last = len(arcs.allowed) - 1
    objective, columns = objective_of(arcs), SIZED_COLUMNS if arcs.two_sizes else COLUMNS
    labels, pareto = empty_label(len(total), last + 1, columns), empty_set(width, columns)
    best, bounds = no_plans(most_plans), np.array([below_s, np.inf])
    new, raised = np.zeros(columns), np.zeros(columns)
    work = 0
    for from_end in range(1, arcs.most_stages + 1):
        for devices_used in range(len(total)):
            if total[devices_used] != from_end:
                continue
            for first in range(last):
                front = before[devices_used, first]
                if not arcs.allowed[first] or front[FRONT_PASSES_S] == np.inf:
                    continue
                place = _Place(from_end, devices_used, first, most_plans > 1, hopeful)
                work += _fill_place(
                    arcs, objective, choices, labels, used, place, front, new, raised, pareto, best, bounds
                )
                if pareto.size[0] > 0:
                    labels = with_place(labels, pareto, devices_used, first, bounds[LIMIT_S])
                if work > most_work:
                    bounds[DROPPED_S] = min(bounds[DROPPED_S], step_bound_s(arcs, before[0, last]))
                    return _traced(labels, best, arcs.most_stages, bounds[DROPPED_S], work)
    return _traced(labels, best, arcs.most_stages, bounds[DROPPED_S], work)


@inlined
def _fill_place(
    arcs: Arcs,
    objective: SearchObjective,
    choices: Choices,
    labels: Labels,
    used: Indices,
    place: _Place,
    front: Floats,
    new: Floats,
    raised: Floats,
    pareto: ParetoSet,
    best: BestPlans,
    bounds: Floats,
) -> int:
    """Step 2 for one place, where `front` is what any stages in front of it take: how many labels were tried."""
    in_flight_index = place.from_end - 1 if arcs.by_number else 0
    stride, work = 1, 0
    for device in range(len(arcs.capacity)):
        rest = place.devices_used - stride
        stride *= arcs.capacity[device] + 1
        if used[place.devices_used, device] == 0:
            continue
        for stop in range(place.first + 1, len(arcs.allowed)):
            step, longest = stop - 1 - place.first, arcs.length[in_flight_index, device, stop]
            if step >= longest:
                if longest > 0:  # one further on is further away; where nothing ends, nothing follows
                    break
                continue
            arc = arcs.offset[in_flight_index, device, stop] + step
            begin, end = labels.begin[rest, stop], labels.end[rest, stop]
            if begin == end or arcs.need[arc] == IMPOSSIBLE:
                continue
            stage = stage_in_front(arcs, place.from_end, device, place.first, stop, arc)
            recomputes, looked_at = arcs.need[arc] == RECOMPUTES, choices.first_of[arc] >= 0
            for label in range(begin, end):  # step 3
                work += 1
                bound_s = grow(objective, stage, stage.recompute_s, 0.0, labels.numbers, label, front, new)
                if bound_s >= bounds[LIMIT_S]:
                    continue
                if recomputes and not looked_at:
                    choices.wanted[arc] = True
                    if not place.hopeful:
                        bounds[DROPPED_S] = min(bounds[DROPPED_S], bound_s)
                        break
                if not recomputes or not looked_at:
                    _keep(objective, place, label, device, -1, bound_s, front, new, raised, pareto, best, bounds)
                    continue
                if not choices.exact[arc]:
                    bounds[DROPPED_S] = min(bounds[DROPPED_S], bound_s)
                for choice in range(choices.first_of[arc], choices.first_of[arc] + choices.number_of[arc]):
                    recompute_s, turnaround_s = choices.recompute_s[choice], choices.turnaround_s[choice]
                    bound_s = grow(objective, stage, recompute_s, turnaround_s, labels.numbers, label, front, new)
                    if bound_s < bounds[LIMIT_S]:
                        _keep(
                            objective, place, label, device, choice, bound_s, front, new, raised, pareto, best, bounds
                        )
    return work


@compiled
def _keep(
    objective: SearchObjective,
    place: _Place,
    parent: int,
    device: int,
    choice: int,
    bound_s: float,
    front: Floats,
    new: Floats,
    raised: Floats,
    pareto: ParetoSet,
    best: BestPlans,
    bounds: Floats,
) -> None:
    """Steps 4 and 5 for a label of the numbers `new`; `raised` is room for them, raised."""
    if place.first == 0:
        over_s = insert_plan(best, bound_s, parent, device, choice)
        if place.all_plans:
            bounds[DROPPED_S] = min(bounds[DROPPED_S], over_s)
        else:
            bounds[LIMIT_S] = min(bounds[LIMIT_S], best.objective_s[0] * (1 - ROUNDING))
        return
    raise_to_front(objective, new, front, raised)
    if place.all_plans or not is_dominated(pareto, raised):
        over_s = insert_label(pareto, new, raised, bound_s, parent, device, choice)
        bounds[DROPPED_S] = min(bounds[DROPPED_S], over_s)


@compiled
def _traced(labels: Labels, best: BestPlans, most_stages: int, dropped_s: float, work: int) -> FoundPlans:
    """Step 6."""
    found, last = best.size[0], labels.links[0, POSITION]
    stages, cuts = np.zeros(found, dtype=np.int64), np.zeros((found, most_stages + 1), dtype=np.int64)
    classes = np.full((found, most_stages), -1, dtype=np.int64)
    choices = np.full((found, most_stages), -1, dtype=np.int64)
    order = np.argsort(best.objective_s[:found], kind="mergesort")
    for plan in range(found):
        link, count, position = best.links[order[plan]], 0, 0
        while position < last:
            classes[plan, count], choices[plan, count] = link[DEVICE], link[CHOICE]
            link = labels.links[link[PARENT]]
            position = link[POSITION]
            count += 1
            cuts[plan, count] = position
        stages[plan] = count
    return FoundPlans(best.objective_s[:found][order], stages, cuts, classes, choices, dropped_s, work)
