"""The best cuts, devices and segments for one schedule, R and M: a dynamic program from the last stage to the first.

A label is the rear part of a plan: layers [i, L), the devices that they use, and its numbers. With S the sum of
`through`, the objective of a plan is, see `planner.objective`,

    GPipe    T = S + max forward + max backward + max optimizer
    1F1B     T >= V + max optimizer, where V, what the rear takes by itself, is built from stage to stage:
             V(k) = max( through(k) + V(k + 1),                        the rear, and the way there and back
                         through(k) + steady (f + b + e),              stage k is never idle
                         S(k) + both(k),                               it waits once for the whole rear
                         rounds * S(k) + rest )                        it waits each time its micro-batches are all
                         ahead

Label A dominates B at the same place when none of its numbers is larger: no continuation makes B the better one.
`planner.arcs.before_bounds` says what any continuation costs at least; what cannot beat the incumbent is dropped.
What is dropped for want of room, and stages whose segments were not solved exactly, enter the bound, never silently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arcs import Arcs, used_numbers
from planner.compiled import compiled
from planner.costs import Floats, Indices


class Choices(NamedTuple):
    """Ways to recompute the stages looked at so far, see `planner.segments`.

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
    """

    objective_s: Floats
    stages: Indices
    cuts: Indices
    classes: Indices
    ways: Indices
    dropped_s: float


@compiled
def search(
    arcs: Arcs,
    before: Floats,
    choices: Choices,
    below_s: float,
    width: int,
    most_plans: int,
    hopeful: bool,
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
    """
    used, total = used_numbers(arcs.capacity)
    ways, classes = used.shape
    positions = len(arcs.allowed)
    last = positions - 1
    dropped_s = np.inf
    all_plans, keep_ends = most_plans > 1, most_plans
    limit_s = below_s

    room = 1024
    through, first_number, second_number, slowest = np.zeros(room), np.zeros(room), np.zeros(room), np.zeros(room)
    parent, device_of = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
    way_of, position_of = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
    labels = 1
    position_of[0], parent[0] = last, -1
    begin = np.zeros((ways, positions), dtype=np.int64)
    stop_label = np.zeros((ways, positions), dtype=np.int64)
    stop_label[0, last] = 1

    end_label = np.zeros(keep_ends + 1, dtype=np.int64)  # the label before the first stage
    end_s, end_device = np.full(keep_ends + 1, np.inf), np.zeros(keep_ends + 1, dtype=np.int64)
    end_way = np.zeros(keep_ends + 1, dtype=np.int64)
    ends = 0

    kept_numbers = np.zeros((width, 4))
    compared = np.zeros((width, 4))
    kept_bound = np.zeros(width)
    kept_parent, kept_device = np.zeros(width, dtype=np.int64), np.zeros(width, dtype=np.int64)
    kept_way = np.zeros(width, dtype=np.int64)

    for number in range(1, arcs.most_stages + 1):
        variant = number - 1 if arcs.one_f_one_b else 0
        for way in range(ways):
            if total[way] != number:
                continue
            for first in range(last):
                if not arcs.allowed[first]:
                    continue
                if before[way, first, 0] == np.inf:
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
                        if stop_label[rest, stop] == begin[rest, stop]:
                            continue
                        place = arcs.offset[variant, device, stop] + step
                        need = arcs.need[place]
                        if need == 0:
                            continue
                        looked_at = need == 1 or choices.first_of[place] >= 0
                        for label in range(begin[rest, stop], stop_label[rest, stop]):
                            numbers = (through[label], first_number[label], second_number[label], slowest[label])
                            bound_s = _grown(arcs, number, first, place, arcs.extra[place], 0.0, numbers, front)[0]
                            if bound_s >= limit_s:
                                continue
                            options, option_begin = 1, -1
                            if need == 2 and looked_at:
                                options, option_begin = choices.number_of[place], choices.first_of[place]
                                if not choices.exact[place]:
                                    dropped_s = min(dropped_s, bound_s)
                            elif need == 2:
                                choices.wanted[place] = True
                                if not hopeful:
                                    dropped_s = min(dropped_s, bound_s)
                                    break
                            for option in range(options):
                                extra, turning, option_place = arcs.extra[place], 0.0, -1
                                if option_begin >= 0:
                                    option_place = option_begin + option
                                    extra, turning = choices.extra[option_place], choices.turning[option_place]
                                bound_s, new_through, new_first, new_second, new_slowest = _grown(
                                    arcs, number, first, place, extra, turning, numbers, front
                                )
                                if bound_s >= limit_s:
                                    continue
                                if first == 0:
                                    slot = ends
                                    while slot > 0 and end_s[slot - 1] > bound_s:
                                        end_s[slot], end_label[slot] = end_s[slot - 1], end_label[slot - 1]
                                        end_device[slot], end_way[slot] = end_device[slot - 1], end_way[slot - 1]
                                        slot -= 1
                                    end_s[slot], end_label[slot], end_device[slot] = bound_s, label, device
                                    end_way[slot] = option_place
                                    ends += 1
                                    if ends > keep_ends:
                                        ends -= 1
                                        if all_plans:
                                            dropped_s = min(dropped_s, end_s[ends])
                                    if not all_plans:
                                        limit_s = min(limit_s, end_s[0] * (1 - 1e-12))
                                    continue
                                if arcs.one_f_one_b:
                                    compare_first = max(new_first, new_through + front[3])
                                    compare_second = 0.0
                                else:
                                    compare_first = max(new_first, front[1])
                                    compare_second = max(new_second, front[2])
                                compare_slowest = max(new_slowest, front[4])
                                dominated = False
                                if not all_plans:
                                    other = 0
                                    while other < kept:
                                        if (
                                            compared[other, 0] <= new_through
                                            and compared[other, 1] <= compare_first
                                            and compared[other, 2] <= compare_second
                                            and compared[other, 3] <= compare_slowest
                                        ):
                                            dominated = True
                                            break
                                        if (
                                            compared[other, 0] >= new_through
                                            and compared[other, 1] >= compare_first
                                            and compared[other, 2] >= compare_second
                                            and compared[other, 3] >= compare_slowest
                                        ):
                                            kept -= 1
                                            kept_numbers[other], compared[other] = kept_numbers[kept], compared[kept]
                                            kept_bound[other], kept_parent[other] = kept_bound[kept], kept_parent[kept]
                                            kept_device[other], kept_way[other] = kept_device[kept], kept_way[kept]
                                            continue
                                        other += 1
                                if dominated:
                                    continue
                                slot = kept
                                if kept == width:
                                    slot = int(np.argmax(kept_bound))
                                    dropped_s = min(dropped_s, max(bound_s, kept_bound[slot]))
                                    if kept_bound[slot] <= bound_s:
                                        continue
                                else:
                                    kept += 1
                                kept_numbers[slot, 0], kept_numbers[slot, 1] = new_through, new_first
                                kept_numbers[slot, 2], kept_numbers[slot, 3] = new_second, new_slowest
                                compared[slot, 0], compared[slot, 1] = new_through, compare_first
                                compared[slot, 2], compared[slot, 3] = compare_second, compare_slowest
                                kept_bound[slot], kept_parent[slot], kept_device[slot] = bound_s, label, device
                                kept_way[slot] = option_place
                if first == 0:
                    continue
                begin[way, first] = labels
                for slot in range(kept):
                    if kept_bound[slot] >= limit_s:
                        continue
                    if labels == room:
                        more = np.zeros(room)
                        through, first_number = np.concatenate((through, more)), np.concatenate((first_number, more))
                        second_number, slowest = np.concatenate((second_number, more)), np.concatenate((slowest, more))
                        none = np.zeros(room, dtype=np.int64)
                        parent, device_of = np.concatenate((parent, none)), np.concatenate((device_of, none))
                        way_of, position_of = np.concatenate((way_of, none)), np.concatenate((position_of, none))
                        room *= 2
                    through[labels], first_number[labels] = kept_numbers[slot, 0], kept_numbers[slot, 1]
                    second_number[labels], slowest[labels] = kept_numbers[slot, 2], kept_numbers[slot, 3]
                    parent[labels], device_of[labels] = kept_parent[slot], kept_device[slot]
                    way_of[labels], position_of[labels] = kept_way[slot], first
                    labels += 1
                stop_label[way, first] = labels

    ends = min(ends, keep_ends)
    stages, cuts = np.zeros(ends, dtype=np.int64), np.zeros((ends, arcs.most_stages + 1), dtype=np.int64)
    chosen = np.full((ends, arcs.most_stages), -1, dtype=np.int64)
    chosen_way = np.full((ends, arcs.most_stages), -1, dtype=np.int64)
    for end in range(ends):
        device, option_place, label = end_device[end], end_way[end], end_label[end]
        count = 0
        while True:
            chosen[end, count], chosen_way[end, count] = device, option_place
            count += 1
            cuts[end, count] = position_of[label]
            if position_of[label] == last:
                break
            device, option_place = device_of[label], way_of[label]
            label = parent[label]
        stages[end] = count
    return Ends(end_s[:ends].copy(), stages, cuts, chosen, chosen_way, dropped_s)


@compiled
def _grown(
    arcs: Arcs,
    number: int,
    first: int,
    place: int,
    extra: float,
    turning: float,
    numbers: tuple[float, float, float, float],
    front: Floats,
) -> tuple[float, float, float, float, float]:
    """What a rear with one more stage costs at least when it is completed, and its numbers.

    The numbers are S, then for GPipe both bottlenecks and for 1F1B V and nothing, then the slowest optimizer.
    """
    stage_through, stage_first, stage_second, stage_optimizer, rest, _ = arcs.terms[place]
    stage_through += turning
    steady_extra = arcs.steady * extra
    through, slowest = numbers[0] + stage_through, max(numbers[3], stage_optimizer)
    if arcs.one_f_one_b:
        rounds = arcs.steady // number
        value = max(
            max(stage_through + numbers[1], stage_through + stage_first + steady_extra),
            max(
                through + stage_second + steady_extra,
                through + rounds * (through - arcs.crossing[first]) + rest,
            ),
        )
        bound_s = max(value + front[0], through + front[0] + front[3]) + max(slowest, front[4])
        return bound_s, through, value, 0.0, slowest
    backward = max(stage_second + steady_extra, arcs.backward_link[first]) + arcs.backward_head[first]
    forward, backward = max(numbers[1], stage_first), max(numbers[2], backward)
    steady = max(max(forward, front[1]) + max(backward, front[2]), front[3])
    return through + front[0] + steady + max(slowest, front[4]), through, forward, backward, slowest
