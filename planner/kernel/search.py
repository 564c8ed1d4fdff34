"""The best cuts, devices and segments for one schedule, R and M: a dynamic program from the last stage to the first.

A label is the rear part of a plan: layers [i, L), the devices that they use, and its numbers. With S the sum of
`through`, the objective of a plan is, see `planner.kernel.makespan`,

    GPipe    T = S + max forward + max backward + max optimizer; with two sizes of micro-batches see
             `planner.kernel.two_sizes`
    any      T >= V + max optimizer, where V, what the rear takes by itself, is built from stage to stage:
    order    V(k) = max( through(k) + V(k + 1),                        the rear, and the way there and back
                         through(k) + steady (f + b + e) )             stage k is never idle
    1F1B     V(k) = max( the same,
                         S(k) + both(k),                               it waits once for the whole rear
                         rounds * S(k) + rest )                        it waits each time its micro-batches are all
                         ahead

Label A dominates B at the same place when none of its numbers is larger: no continuation makes B the better one.
`planner.kernel.candidate_stages.before_bounds` says what any continuation costs at least; what cannot beat the
incumbent is dropped. What is dropped for want of room, and stages whose segments were not solved exactly, enter the
bound, never silently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Floats, Indices
from planner.kernel.candidate_stages import (
    BACKWARD,
    FLOW_SHOPS,
    FORWARD,
    FRONT_OPTIMIZER,
    IMPOSSIBLE,
    KEEPS,
    OPTIMIZER,
    RECOMPUTES,
    REST,
    ROUNDS,
    STAYS_LEAST,
    THROUGH,
    Arcs,
    front_four,
    link_machines,
    stage_machines,
    step_bound_s,
    used_numbers,
)
from planner.kernel.compiled import compiled
from planner.kernel.two_sizes import rear_with, longest


class Choices(NamedTuple):
    """Ways to recompute the stages looked at so far, see `planner.kernel.segments`.

    Attributes:
        first_of: for each arc its first way, or -1 when it was not looked at.
        number_of: for each arc how many ways it has.
        exact: for each arc whether there are no better ways.
        wanted: for each arc whether a search came by that would have liked to know.
        extra: e of each way.
        turning: x of each way.
    """

    first_of: Indices
    number_of: Indices
    exact: NDArray[np.bool_]
    wanted: NDArray[np.bool_]
    extra: Floats
    turning: Floats


class Ends(NamedTuple):
    """Complete plans, the most promising first.

    Attributes:
        objective_s: T of each (for 1F1B and unequal micro-batches a lower bound of it), shape (P,).
        stages: K of each.
        cuts: positions 0, ..., L of each, shape (P, most stages + 1).
        classes: of each stage, shape (P, most stages).
        ways: of recomputing each stage, a place in `Choices`; -1 for one that keeps everything.
        dropped_s: no plan that is not here has a smaller T.
        work: labels tried, a measure of time.
    """

    objective_s: Floats
    stages: Indices
    cuts: Indices
    classes: Indices
    ways: Indices
    dropped_s: float
    work: int


class _Labels(NamedTuple):
    """All labels; a place is how many devices of each class the rear uses, and where it begins.

    Attributes:
        numbers: of each label, see `_grow`.
        parent: the rear behind its first stage; -1 for the empty one.
        device: class of its first stage.
        way: of recomputing its first stage.
        position: where it begins.
    """

    numbers: Floats
    parent: Indices
    device: Indices
    way: Indices
    position: Indices


class _Shelf(NamedTuple):
    """The labels of one place while it is filled.

    Attributes:
        numbers: of each label.
        compared: the same, raised to what makes no difference to any continuation.
        bound_s: what it takes at least when it is completed.
        parent: as in `_Labels`, and so the others.
        device: class of the first stage.
        way: of recomputing the first stage.
    """

    numbers: Floats
    compared: Floats
    bound_s: Floats
    parent: Indices
    device: Indices
    way: Indices


class _Finish(NamedTuple):
    """The best complete plans so far, ascending.

    Attributes:
        objective_s: T of each.
        label: the rear behind its first stage.
        device: class of its first stage.
        way: of recomputing its first stage.
    """

    objective_s: Floats
    label: Indices
    device: Indices
    way: Indices


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
) -> Ends:
    """The plans with T below `below_s`.

    Args:
        arcs: stages to choose from.
        before: see `before_bounds`.
        choices: ways to recompute stages.
        below_s: the incumbent.
        width: labels kept at each place.
        most_plans: 1 for the best plan alone; with more, dominated labels are kept, too, and that many plans returned.
        hopeful: whether a stage that was not looked at counts with what it needs at least; otherwise it is left out,
            and the bound knows.
        most_work: labels that may be tried; then the search ends with the plans that it has.
    """
    used, total = used_numbers(arcs.capacity)
    ways, classes = used.shape
    positions = len(arcs.allowed)
    last = positions - 1
    dropped_s, limit_s, work = np.inf, below_s, 0
    all_plans = most_plans > 1
    numbers = 9 if arcs.two_sizes else 4

    labels = _Labels(np.zeros((1024, numbers)), _none(1024), _none(1024), _none(1024), _none(1024))
    count = 1
    labels.position[0], labels.parent[0] = last, -1
    begin, end = np.zeros((ways, positions), dtype=np.int64), np.zeros((ways, positions), dtype=np.int64)
    end[0, last] = 1
    finish = _Finish(
        np.full(most_plans + 1, np.inf), _none(most_plans + 1), _none(most_plans + 1), _none(most_plans + 1)
    )
    finished = 0
    shelf = _Shelf(
        np.zeros((width, numbers)),
        np.zeros((width, numbers)),
        np.zeros(width),
        _none(width),
        _none(width),
        _none(width),
    )
    new, compared = np.zeros(numbers), np.zeros(numbers)

    for number in range(1, arcs.most_stages + 1):
        variant = number - 1 if arcs.by_number else 0
        for way in range(ways):
            if total[way] != number:
                continue
            for first in range(last):
                if not arcs.allowed[first] or before[way, first, 0] == np.inf:
                    continue
                front = before[way, first]
                kept = 0
                stride = 1
                for device in range(classes):
                    rest = way - stride
                    stride *= arcs.capacity[device] + 1
                    if used[way, device] == 0:
                        continue
                    for stop in range(first + 1, positions):
                        step = stop - 1 - first
                        if step >= arcs.length[variant, device, stop]:
                            if arcs.allowed[stop]:
                                break
                            continue
                        if end[rest, stop] == begin[rest, stop]:
                            continue
                        place = arcs.offset[variant, device, stop] + step
                        need = arcs.need[place]
                        if need == IMPOSSIBLE:
                            continue
                        looked_at = need == KEEPS or choices.first_of[place] >= 0
                        stage = (number, device, first, stop, place)
                        for label in range(begin[rest, stop], end[rest, stop]):
                            work += 1
                            bound_s = _grow(arcs, stage, arcs.extra[place], 0.0, labels.numbers, label, front, new)
                            if bound_s >= limit_s:
                                continue
                            options, option_begin = 1, -1
                            if need == RECOMPUTES and looked_at:
                                options, option_begin = choices.number_of[place], choices.first_of[place]
                                if not choices.exact[place]:
                                    dropped_s = min(dropped_s, bound_s)
                            elif need == RECOMPUTES:
                                choices.wanted[place] = True
                                if not hopeful:
                                    dropped_s = min(dropped_s, bound_s)
                                    break
                            for option in range(options):
                                chosen = -1
                                if option_begin >= 0:
                                    chosen = option_begin + option
                                    extra, turning = choices.extra[chosen], choices.turning[chosen]
                                    bound_s = _grow(arcs, stage, extra, turning, labels.numbers, label, front, new)
                                    if bound_s >= limit_s:
                                        continue
                                if first == 0:
                                    over_s = _finish(finish, finished, bound_s, label, device, chosen)
                                    finished = min(finished + 1, most_plans)
                                    if all_plans:
                                        dropped_s = min(dropped_s, over_s)
                                    else:
                                        limit_s = min(limit_s, finish.objective_s[0] * (1 - 1e-12))
                                    continue
                                _raise(arcs, new, front, compared)
                                if not all_plans:
                                    kept = _without_dominated(shelf, kept, compared)
                                    if kept < 0:
                                        kept = -1 - kept
                                        continue
                                slot = kept
                                if kept == width:
                                    slot = int(np.argmax(shelf.bound_s))
                                    dropped_s = min(dropped_s, max(bound_s, shelf.bound_s[slot]))
                                    if shelf.bound_s[slot] <= bound_s:
                                        continue
                                else:
                                    kept += 1
                                shelf.numbers[slot], shelf.compared[slot], shelf.bound_s[slot] = new, compared, bound_s
                                shelf.parent[slot], shelf.device[slot], shelf.way[slot] = label, device, chosen
                if first > 0:
                    while count + kept > len(labels.parent):
                        labels = _with_room(labels)
                    begin[way, first] = count
                    for slot in range(kept):
                        if shelf.bound_s[slot] < limit_s:
                            labels.numbers[count], labels.position[count] = shelf.numbers[slot], first
                            labels.parent[count], labels.device[count] = shelf.parent[slot], shelf.device[slot]
                            labels.way[count] = shelf.way[slot]
                            count += 1
                    end[way, first] = count
                if work > most_work:
                    least_s = step_bound_s(arcs, before[0, last])
                    return _traced(labels, finish, finished, arcs.most_stages, last, min(dropped_s, least_s), work)
    return _traced(labels, finish, finished, arcs.most_stages, last, dropped_s, work)


@compiled
def _none(count: int) -> Indices:
    return np.zeros(count, dtype=np.int64)


@compiled
def _with_room(labels: _Labels) -> _Labels:
    """The same labels with room for as many more."""
    more = _none(len(labels.parent))
    return _Labels(
        np.concatenate((labels.numbers, np.zeros_like(labels.numbers))),
        np.concatenate((labels.parent, more)),
        np.concatenate((labels.device, more)),
        np.concatenate((labels.way, more)),
        np.concatenate((labels.position, more)),
    )


@compiled
def _finish(finish: _Finish, finished: int, objective_s: float, label: int, device: int, way: int) -> float:
    """Put a complete plan in its place, and say what the one takes that falls off the end."""
    slot = finished
    while slot > 0 and finish.objective_s[slot - 1] > objective_s:
        finish.objective_s[slot], finish.label[slot] = finish.objective_s[slot - 1], finish.label[slot - 1]
        finish.device[slot], finish.way[slot] = finish.device[slot - 1], finish.way[slot - 1]
        slot -= 1
    finish.objective_s[slot], finish.label[slot] = objective_s, label
    finish.device[slot], finish.way[slot] = device, way
    over_s = finish.objective_s[-1]
    finish.objective_s[-1] = np.inf
    return float(over_s)


@compiled
def _without_dominated(shelf: _Shelf, kept: int, compared: Floats) -> int:
    """How many labels are left on the shelf without those that a new one dominates.

    If one of them dominates the new one, all stay, and their number comes back as -1 - number.
    """
    columns = len(compared)
    other = 0
    while other < kept:
        no_more, no_less = True, True
        for column in range(columns):
            no_more &= shelf.compared[other, column] <= compared[column]
            no_less &= shelf.compared[other, column] >= compared[column]
        if no_more:
            return -1 - kept
        if no_less:
            kept -= 1
            shelf.numbers[other], shelf.compared[other] = shelf.numbers[kept], shelf.compared[kept]
            shelf.bound_s[other], shelf.parent[other] = shelf.bound_s[kept], shelf.parent[kept]
            shelf.device[other], shelf.way[other] = shelf.device[kept], shelf.way[kept]
            continue
        other += 1
    return kept


@compiled
def _traced(
    labels: _Labels, finish: _Finish, finished: int, most_stages: int, last: int, dropped_s: float, work: int
) -> Ends:
    """The complete plans, from their first stage to their last."""
    stages, cuts = _none(finished), np.zeros((finished, most_stages + 1), dtype=np.int64)
    classes = np.full((finished, most_stages), -1, dtype=np.int64)
    ways = np.full((finished, most_stages), -1, dtype=np.int64)
    for plan in range(finished):
        device, way, label = finish.device[plan], finish.way[plan], finish.label[plan]
        count = 0
        while True:
            classes[plan, count], ways[plan, count] = device, way
            count += 1
            cuts[plan, count] = labels.position[label]
            if labels.position[label] == last:
                break
            device, way = labels.device[label], labels.way[label]
            label = labels.parent[label]
        stages[plan] = count
    return Ends(finish.objective_s[:finished].copy(), stages, cuts, classes, ways, dropped_s, work)


@compiled
def _raise(arcs: Arcs, new: Floats, front: Floats, compared: Floats) -> None:
    """Fill `compared` with numbers as large as makes no difference in any continuation: two labels compare better.

    With two sizes of micro-batches a path that changes size in front, where it takes the small job on from some stage,
    is no longer than one that goes on with the large job and changes in the first stage behind, but for that stage's
    small job; and the large ones stay in front for some stage at least.
    """
    if arcs.two_sizes:
        for phase in range(2):
            at = 4 * phase
            small, stays, changes, whole = new[at], new[at + 1], new[at + 2], new[at + 3]
            stays = max(stays, changes - arcs.largest_change[phase])
            compared[at] = max(small, stays - arcs.more_small * arcs.largest_stay[phase])
            compared[at + 1], compared[at + 2] = stays, changes
            compared[at + 3] = max(whole, changes + arcs.more_large * front[STAYS_LEAST + phase])
        compared[8] = max(new[8], front[FRONT_OPTIMIZER])
    elif arcs.objective == FLOW_SHOPS:
        compared[0], compared[1], compared[2] = new[0], max(new[1], front[1]), max(new[2], front[2])
        compared[3] = max(new[3], front[4])
    else:
        compared[0], compared[1], compared[2] = new[0], max(new[1], new[0] + front[3]), 0.0
        compared[3] = max(new[3], front[4])


@compiled
def _grow(
    arcs: Arcs,
    stage: tuple[int, int, int, int, int],
    extra: float,
    turning: float,
    numbers: Floats,
    label: int,
    front: Floats,
    new: Floats,
) -> float:
    """Fill `new` with the numbers of a rear with one more stage; what it takes at least when it is completed.

    The numbers are S, then of flow shops both bottlenecks and else V and nothing, then the slowest optimizer; with two
    sizes of micro-batches the four of `planner.kernel.two_sizes` for each phase, then the slowest optimizer.

    Args:
        arcs: the stages.
        stage: its number from the end, class, first and stop layer, and arc.
        extra: e of the stage.
        turning: x of the stage.
        numbers: of all labels.
        label: the rear.
        front: see `before_bounds`.
        new: to be filled.
    """
    number, device, first, stop, place = stage
    if arcs.two_sizes:
        return _grow_two_sizes(arcs, device, first, stop, place, numbers, label, front, new)
    terms = arcs.terms
    stage_through = terms[place, THROUGH] + turning
    steady_extra = arcs.steady_again * extra
    through, slowest = numbers[label, 0] + stage_through, max(numbers[label, 3], terms[place, OPTIMIZER])
    new[0], new[3] = through, slowest
    if arcs.objective != FLOW_SHOPS:
        value = max(stage_through + numbers[label, 1], stage_through + terms[place, FORWARD] + steady_extra)
        if arcs.objective == ROUNDS:
            rounds = arcs.steady // number
            waits_once_s = through + terms[place, BACKWARD] + steady_extra
            waits_often_s = through + rounds * (through - arcs.crossing[first]) + terms[place, REST]
            value = max(value, max(waits_once_s, waits_often_s))
        new[1], new[2] = value, 0.0
        return float(max(value + front[0], through + front[0] + front[3]) + max(slowest, front[4]))
    backward = max(terms[place, BACKWARD] + steady_extra, arcs.backward_link[first]) + arcs.backward_head[first]
    forward, backward = max(numbers[label, 1], terms[place, FORWARD]), max(numbers[label, 2], backward)
    new[1], new[2] = forward, backward
    steady = max(max(forward, front[1]) + max(backward, front[2]), front[3])
    return float(through + front[0] + steady + max(slowest, front[4]))


@compiled
def _grow_two_sizes(
    arcs: Arcs, device: int, first: int, stop: int, place: int, numbers: Floats, label: int, front: Floats, new: Floats
) -> float:
    """The same with two sizes of micro-batches."""
    n, m = arcs.more_large, arcs.more_small
    forward = (numbers[label, 0], numbers[label, 1], numbers[label, 2], numbers[label, 3])
    backward = (numbers[label, 4], numbers[label, 5], numbers[label, 6], numbers[label, 7])
    one, other = stage_machines(arcs, device, first, stop, arcs.need[place] == RECOMPUTES)
    link, link_back = link_machines(arcs, first)
    forward = rear_with(rear_with(forward, one, n, m), link, n, m)
    backward = rear_with(rear_with(backward, other, n, m), link_back, n, m)
    slowest = max(numbers[label, 8], arcs.terms[place, OPTIMIZER])
    new[0], new[1], new[2], new[3] = forward
    new[4], new[5], new[6], new[7] = backward
    new[8] = slowest
    both = (
        forward[0] + backward[0],
        forward[1] + backward[1],
        forward[2] + backward[2],
        forward[3] + backward[3],
    )
    apart_s = longest(front_four(front, 0), forward) + longest(front_four(front, 1), backward)
    return float(max(apart_s, longest(front_four(front, 2), both)) + max(slowest, front[FRONT_OPTIMIZER]))
