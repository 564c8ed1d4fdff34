"""GPipe with micro-batches of two sizes, n of the larger and then m of the smaller: what a step takes, exactly.

Stages and links are machines in a row, and each phase is a flow shop: its time is the longest path that goes from
machine to machine and from job to job. Jobs of one size are alike, so the longest path stays at one machine for all
large jobs (n - 1 times) and at one for all small jobs (m - 1 times), and changes from large to small at a machine
between these two:

    machine a, stays n - 1 times     machine t, changes size     machine b, stays m - 1 times
    o---large--->@@@@---large------->o/o---small------------->@@@@---small--->o

In the backward phase the small ones come first, from the last stage to the first; the path is the same one read from
the front. To come to a machine with another job costs less than to stay (`stay` has the recompute that is done while
the gradient travels). Between the phases the path turns around at the last stage: to turn earlier saves work and gains
none.

A part of the row is described by four numbers, which take in more and more of the path. For the machines after some
position, seen from the front (the rear):

    small      the small job passes           a+t, b and the change lie before them
    stays      and the small ones stay        the change lies before them
    changes    and the size changes           the large ones stay before them
    whole      and the large ones stay        everything lies in the rear

and the machines before that position (the front) have the four complements in that order reversed. The whole row takes
the largest of the four sums.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from planner.cost.layer_costs import Floats
from planner.kernel.compiled import compiled
from planner.kernel.tables import BACKWARD_SIZED, FORWARD_SIZED, copied_s

Four: TypeAlias = tuple[float, float, float, float]
NOTHING: Four = (0.0, 0.0, 0.0, 0.0)
"""Of no machine; it stands for the impossible change in no machine, too, since that is never the longest."""


FORWARD_PHASE, BACKWARD_PHASE, BOTH_PHASES, PHASES = range(4)
"""Which four of some numbers: `four_of`; and how many phases have four."""


class Machine(NamedTuple):
    """Seconds of one stage or link in one phase.

    Attributes:
        large: coming with a large job.
        large_stay: one more large job.
        small: coming with a small job.
        small_stay: one more small job.
    """

    large: float
    large_stay: float
    small: float
    small_stay: float


@compiled
def rear_with(rest: Four, machine: Machine, more_large: float, more_small: float) -> Four:
    """`small`, `stays`, `changes` and `whole` of a machine and the rest after it.

    Args:
        rest: the numbers of the machines after it.
        machine: the one before them.
        more_large: n - 1.
        more_small: m - 1.
    """
    rest_small, rest_stays, rest_changes, rest_whole = rest
    small = machine.small + rest_small
    stays = max(machine.small + rest_stays, small + more_small * machine.small_stay)
    changes = max(machine.large + rest_changes, machine.large_stay + stays)
    whole = max(machine.large + rest_whole, more_large * machine.large_stay + changes)
    return small, stays, changes, whole


@compiled
def front_with(rest: Four, machine: Machine, more_large: float, more_small: float) -> Four:
    """The complements of `whole`, `changes`, `stays` and `small`, of a machine and the rest before it."""
    rest_large, rest_stays, rest_changes, rest_whole = rest
    large = machine.large + rest_large
    stays = max(machine.large + rest_stays, large + more_large * machine.large_stay)
    changes = max(machine.small + rest_changes, stays + machine.large_stay - machine.large + machine.small)
    whole = max(machine.small + rest_whole, changes + more_small * machine.small_stay)
    return large, stays, changes, whole


@compiled
def longest(front: Four, rear: Four) -> float:
    """What all machines take."""
    small, stays, changes, whole = rear
    return max(front[0] + whole, front[1] + changes, front[2] + stays, front[3] + small)


@compiled
def both_phases(machine: Machine, other: Machine) -> Machine:
    """A path that stays at the same machines in both phases."""
    return Machine(
        machine.large + other.large,
        machine.large_stay + other.large_stay,
        machine.small + other.small,
        machine.small_stay + other.small_stay,
    )


@compiled
def four_of(numbers: Floats, phase: int) -> Four:
    """The four numbers of one phase, or of both, among those of a rear or a front."""
    at = 4 * phase
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]


@compiled
def put_four(numbers: Floats, phase: int, four: Four) -> None:
    """The reverse of `four_of`."""
    at = 4 * phase
    numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = four


@compiled
def stage_machines(
    sums: Floats, copies: Floats, device: int, first: int, stop: int, recomputes: bool
) -> tuple[Machine, Machine]:
    """A stage of layers [first, stop) in the forward and in the backward phase.

    Args:
        sums: `Tables.sized`.
        copies: those of `Tables`.
        device: its class.
        first: of its layers.
        stop: of its layers.
        recomputes: whether it recomputes all of them.
    """
    large, small = sums[0, device, stop] - sums[0, device, first], sums[1, device, stop] - sums[1, device, first]
    back, back_small = sums[2, device, stop] - sums[2, device, first], sums[3, device, stop] - sums[3, device, first]
    large += copied_s(copies, FORWARD_SIZED, first, stop)
    small += copied_s(copies, FORWARD_SIZED + 1, first, stop)
    back += copied_s(copies, BACKWARD_SIZED, first, stop)
    back_small += copied_s(copies, BACKWARD_SIZED + 1, first, stop)
    again_large, again_small = 0.0, 0.0
    if recomputes:
        again_large = sums[4, device, stop] - sums[4, device, first]
        again_small = sums[5, device, stop] - sums[5, device, first]
    return Machine(large, large, small, small), Machine(back, back + again_large, back_small, back_small + again_small)


@compiled
def link_machines(seconds: Floats, position: int) -> tuple[Machine, Machine]:
    """The link at a position in both phases; `seconds` are `Tables.sized_links`."""
    there, there_small = seconds[0, position], seconds[1, position]
    back, back_small = seconds[2, position], seconds[3, position]
    return Machine(there, there, there_small, there_small), Machine(back, back, back_small, back_small)
