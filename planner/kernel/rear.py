"""The rear of a plan in a few numbers: how one more stage in front changes them, and what any whole plan then takes.

With the quantities of `planner.kernel.makespan`, S the seconds of a micro-batch through all stages and links, there and
back, and e and x those of recompute, a plan takes

    GPipe    T = S + max forward + max backward + max optimizer; with two sizes of micro-batches see
             `planner.kernel.two_sizes`
    any      T >= V + max optimizer, where V, what the rear takes by itself, is built from stage to stage:
    order    V(k) = max( through(k) + V(k + 1),                        the rear, and the way there and back
                         through(k) + steady (f + b + e) )             stage k is never idle
    1F1B     V(k) = max( the same,
                         S(k) + both(k),                               it waits once or twice for the whole rear
                         S(k) + rounds * S'(k) + rest )                it waits whenever all in flight are ahead

where S is of the first micro-batch, which is one of the large ones, and S' of any other, without the transfers before
stage k. So a rear needs S and both bottlenecks, or S, V and S', or the four numbers of `planner.kernel.two_sizes` for
each phase; and the slowest optimizer. `planner.kernel.front` says the like of the stages in front.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.layer_costs import Floats
from planner.kernel.candidate_stages import (
    BACKWARD,
    FLOW_SHOPS,
    FORWARD,
    OPTIMIZER,
    RECOMPUTES,
    REST,
    ROUND,
    THROUGH,
    THROUGH_LEAST,
    Arcs,
)
from planner.kernel.compiled import compiled
from planner.kernel.front import (
    FRONT_BACKWARD_S,
    FRONT_BOTH_S,
    FRONT_FORWARD_S,
    FRONT_OPTIMIZER_S,
    FRONT_PASSES_S,
    LEAST_STAY_S,
    SIZED_FRONT_OPTIMIZER_S,
)
from planner.kernel.rounds import ROUNDS, round_recomputes
from planner.kernel.two_sizes import (
    BACKWARD_PHASE,
    BOTH_PHASES,
    FORWARD_PHASE,
    Machine,
    four_of,
    link_machines,
    longest,
    put_four,
    rear_with,
    stage_machines,
)

PASSES_S, FORWARD_STAY_S, BACKWARD_STAY_S, OPTIMIZER_S, COLUMNS = range(5)
"""Columns of a rear: S, both bottlenecks of flow shops and the slowest optimizer; and how many there are."""
ALONE_S, LEAST_PASSES_S = FORWARD_STAY_S, BACKWARD_STAY_S
"""Without flow shops: V, and with rounds S'."""
SIZED_OPTIMIZER_S, SIZED_COLUMNS = 8, 9
"""With two sizes of micro-batches, after four numbers for each phase: the slowest optimizer; how many columns."""
NO_MACHINE = Machine(0.0, 0.0, 0.0, 0.0)
"""That of a stage where micro-batches have one size."""


class SearchObjective(NamedTuple):
    """What is the same for all rears, as numbers alone: a tuple of arrays takes longer to hand over than to read.

    Attributes:
        kind: FLOW_SHOPS, ROUNDS or WORK.
        two_sizes: see `Arcs`.
        steady: M - 1.
        steady_recomputes: see `Arcs`.
        more_large: see `Arcs`, and so the next two.
        more_small: see there.
        recompute_share: see there.
        largest_change: see `Arcs`, forward and backward.
        largest_stay: the same.
    """

    kind: int
    two_sizes: bool
    steady: int
    steady_recomputes: int
    more_large: float
    more_small: float
    recompute_share: float
    largest_change: tuple[float, float]
    largest_stay: tuple[float, float]


class FrontStage(NamedTuple):
    """A stage that is put in front of rears, and the link before it.

    Attributes:
        from_end: its number from the end of the model, 1 for the last.
        through_s: see `Arcs.terms`, and so the next six.
        through_least_s: see there.
        forward_s: see there.
        backward_s: see there.
        optimizer_s: see there.
        rest_s: see there.
        round_s: see there.
        recompute_s: e, at least.
        crossing_least_s: see `Arcs`, and so the next two.
        backward_link_s: see there.
        backward_head_s: see there.
        machines: with two sizes of micro-batches the stage forward, its link forward, both backward.
    """

    from_end: int
    through_s: float
    through_least_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float
    round_s: float
    recompute_s: float
    crossing_least_s: float
    backward_link_s: float
    backward_head_s: float
    machines: tuple[Machine, Machine, Machine, Machine]


@compiled
def objective_of(arcs: Arcs) -> SearchObjective:
    """The objective of a search."""
    change, stay = arcs.largest_change, arcs.largest_stay
    return SearchObjective(
        arcs.objective,
        arcs.two_sizes,
        arcs.steady,
        arcs.steady_recomputes,
        arcs.more_large,
        arcs.more_small,
        arcs.recompute_share,
        (change[0], change[1]),
        (stay[0], stay[1]),
    )


@compiled
def stage_in_front(arcs: Arcs, from_end: int, device: int, first: int, stop: int, arc: int) -> FrontStage:
    """A stage of layers [first, stop) on a class of devices, which lies at `arc`."""
    terms = arcs.terms[arc]
    there, back, link_there, link_back = NO_MACHINE, NO_MACHINE, NO_MACHINE, NO_MACHINE
    if arcs.two_sizes:
        there, back = stage_machines(arcs.sized, arcs.copies, device, first, stop, arcs.need[arc] == RECOMPUTES)
        link_there, link_back = link_machines(arcs.sized_links, first)
    return FrontStage(
        from_end,
        terms[THROUGH],
        terms[THROUGH_LEAST],
        terms[FORWARD],
        terms[BACKWARD],
        terms[OPTIMIZER],
        terms[REST],
        terms[ROUND],
        arcs.least_recompute_s[arc],
        arcs.crossing_least[first],
        arcs.backward_link[first],
        arcs.backward_head[first],
        (there, link_there, back, link_back),
    )


@compiled
def grow(
    objective: SearchObjective,
    stage: FrontStage,
    recompute_s: float,
    turnaround_s: float,
    rears: Floats,
    rear: int,
    front: Floats,
    new: Floats,
) -> float:
    """Fill `new` with the numbers of a rear with one more stage; what it takes at least when it is completed.

    Args:
        objective: of the search.
        stage: the one more.
        recompute_s: e of the stage.
        turnaround_s: x of the stage.
        rears: the numbers of all.
        rear: which one.
        front: of `before_bounds` what any stages in front of the new rear take.
        new: to be filled.
    """
    if objective.two_sizes:
        return _grow_two_sizes(objective, stage, rears, rear, front, new)
    through_s = stage.through_s + turnaround_s
    steady_recompute_s = objective.steady_recomputes * recompute_s
    passes_s = rears[rear, PASSES_S] + through_s
    optimizer_s = max(rears[rear, OPTIMIZER_S], stage.optimizer_s)
    end_s = max(optimizer_s, front[FRONT_OPTIMIZER_S])
    new[PASSES_S], new[OPTIMIZER_S] = passes_s, optimizer_s
    if objective.kind != FLOW_SHOPS:
        alone_s = max(through_s + rears[rear, ALONE_S], through_s + stage.forward_s + steady_recompute_s)
        least_passes_s = 0.0
        if objective.kind == ROUNDS:
            rounds = objective.steady // stage.from_end
            waits_once_s = passes_s + stage.backward_s + steady_recompute_s
            again = round_recomputes(objective.more_large, objective.recompute_share, stage.from_end)
            waits_twice_s = passes_s + stage.round_s + again * recompute_s
            least_passes_s = rears[rear, LEAST_PASSES_S] + stage.through_least_s + turnaround_s
            waits_often_s = passes_s + rounds * (least_passes_s - stage.crossing_least_s) + stage.rest_s
            alone_s = max(alone_s, waits_once_s, waits_twice_s, waits_often_s)
        new[ALONE_S], new[LEAST_PASSES_S] = alone_s, least_passes_s
        stays_s = passes_s + front[FRONT_PASSES_S] + front[FRONT_BOTH_S]
        return float(max(alone_s + front[FRONT_PASSES_S], stays_s) + end_s)
    own_s = max(stage.backward_s + steady_recompute_s, stage.backward_link_s) + stage.backward_head_s
    forward_s = max(rears[rear, FORWARD_STAY_S], stage.forward_s)
    backward_s = max(rears[rear, BACKWARD_STAY_S], own_s)
    new[FORWARD_STAY_S], new[BACKWARD_STAY_S] = forward_s, backward_s
    stays_s = max(forward_s, front[FRONT_FORWARD_S]) + max(backward_s, front[FRONT_BACKWARD_S])
    return float(passes_s + front[FRONT_PASSES_S] + max(stays_s, front[FRONT_BOTH_S]) + end_s)


@compiled
def _grow_two_sizes(
    objective: SearchObjective, stage: FrontStage, rears: Floats, rear: int, front: Floats, new: Floats
) -> float:
    """The same with two sizes of micro-batches, where no stage has segments to choose."""
    n, m = objective.more_large, objective.more_small
    there, link_there, back, link_back = stage.machines
    old = rears[rear]
    forward = rear_with(rear_with(four_of(old, FORWARD_PHASE), there, n, m), link_there, n, m)
    backward = rear_with(rear_with(four_of(old, BACKWARD_PHASE), back, n, m), link_back, n, m)
    optimizer_s = max(old[SIZED_OPTIMIZER_S], stage.optimizer_s)
    put_four(new, FORWARD_PHASE, forward)
    put_four(new, BACKWARD_PHASE, backward)
    new[SIZED_OPTIMIZER_S] = optimizer_s
    both = (
        forward[0] + backward[0],
        forward[1] + backward[1],
        forward[2] + backward[2],
        forward[3] + backward[3],
    )
    forward_s = longest(four_of(front, FORWARD_PHASE), forward)
    backward_s = longest(four_of(front, BACKWARD_PHASE), backward)
    both_s = longest(four_of(front, BOTH_PHASES), both)
    return float(max(forward_s + backward_s, both_s) + max(optimizer_s, front[SIZED_FRONT_OPTIMIZER_S]))


@compiled
def raise_to_front(objective: SearchObjective, new: Floats, front: Floats, raised: Floats) -> None:
    """Fill `raised` with numbers as large as makes no difference in any continuation: two rears compare better.

    With two sizes of micro-batches a path that changes size in front, where it takes the small job on from some stage,
    is no longer than one that goes on with the large job and changes in the first stage of the rear, but for that
    stage's small job; and the large ones stay in front for some stage at least.
    """
    if objective.two_sizes:
        for phase in range(2):
            small, stays, changes, whole = four_of(new, phase)
            stays = max(stays, changes - objective.largest_change[phase])
            small = max(small, stays - objective.more_small * objective.largest_stay[phase])
            whole = max(whole, changes + objective.more_large * front[LEAST_STAY_S + phase])
            put_four(raised, phase, (small, stays, changes, whole))
        raised[SIZED_OPTIMIZER_S] = max(new[SIZED_OPTIMIZER_S], front[SIZED_FRONT_OPTIMIZER_S])
        return
    raised[PASSES_S] = new[PASSES_S]
    raised[OPTIMIZER_S] = max(new[OPTIMIZER_S], front[FRONT_OPTIMIZER_S])
    if objective.kind == FLOW_SHOPS:
        raised[FORWARD_STAY_S] = max(new[FORWARD_STAY_S], front[FRONT_FORWARD_S])
        raised[BACKWARD_STAY_S] = max(new[BACKWARD_STAY_S], front[FRONT_BACKWARD_S])
    else:
        raised[ALONE_S] = max(new[ALONE_S], new[PASSES_S] + front[FRONT_BOTH_S])
        raised[LEAST_PASSES_S] = new[LEAST_PASSES_S]
