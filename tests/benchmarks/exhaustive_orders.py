"""Every order of split backward passes: whether any plan of a small problem takes less than some time.

Stages, devices, and which stages are recomputed are enumerated, and for each the orders are searched as a tree: of all
passes that could be next, the one that would be done first has a stage; whatever is done before that on this stage is a
branch (Giffler and Thompson, Operations Research 8, 1960). Because memory may forbid later what is done now, not to do
it yet is a branch, too. A branch ends where what the stages still have to do takes too long. Bytes are those of the
report, which has tests of its own; order, time and which moments count are this file's.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cost.stage_memory import stage_memory
from planner.kernel.compiled import compiled
from planner.plan.schedules import Ring
from planner.plan.stage import Segment
from planner.solve.balance import StageChoice, end_seconds, stage_seconds
from planner.solve.problem import Candidate, Problem

F, R, B, SEND_F, SEND_B, W = range(6)
NONE, SOME, UNKNOWN = 0, 1, -1
NOT_YET, WAIT = -1.0, 3
ROUNDING = 1e-9


@dataclass
class Found:
    """What the search says: whether some plan takes less, and how often it gave up."""

    faster: bool = False
    undecided: int = 0


def any_below(problem: Problem, limit_s: float, *, most_nodes: int = 200_000) -> Found:
    """Whether any plan takes less than `limit_s`, of all K, cuts, devices, recompute and orders."""
    found = Found()
    (candidate,) = problem.candidates()
    able = [index for index, group in enumerate(problem.classes) for _ in group.members]
    for stages in range(1, problem.most_stages(1, candidate.split.count) + 1):
        for cuts in itertools.combinations(range(1, problem.layers), stages - 1):
            ranges = [*itertools.pairwise((0, *cuts, problem.layers))]
            for classes in sorted(set(itertools.permutations(able, stages))):
                verdict = _any_order_below(problem, candidate, ranges, classes, limit_s, most_nodes)
                found.undecided += verdict == UNKNOWN
                if verdict == SOME:
                    return Found(True, found.undecided)
    return found


def _any_order_below(
    problem: Problem, candidate: Candidate, ranges: Any, classes: Any, limit_s: float, most_nodes: int
) -> int:
    verdict = NONE
    flags = {"always": (True,), "never": (False,), "auto": (False, True)}[problem.settings.recompute]
    ring = Ring(len(ranges), 1)
    rooms = {
        (stage, flag): _room(problem, candidate, ring, stage, ranges[stage], classes[stage], flag)
        for stage in range(len(ranges))
        for flag in flags
    }
    for again in itertools.product(flags, repeat=len(ranges)):
        room = np.array([rooms[stage, flag] for stage, flag in enumerate(again)])
        if (room[:, 1] > room[:, 0]).any():
            continue
        stages = tuple(
            StageChoice(first, stop, group, (Segment(first=first, stop=stop),) if flag else ())
            for (first, stop), group, flag in zip(ranges, classes, again, strict=True)
        )
        split = candidate.split
        by_size = [stage_seconds(problem, size, stages, splits=True) for size in (split.largest, split.smallest)]
        many = split.number_largest
        seconds = np.repeat(np.stack(by_size, axis=2), [many, split.count - many], axis=2)
        seconds[B] -= seconds[W]
        _copy(seconds, problem)
        end_s = max(sum(end_seconds(problem, candidate, stage)) for stage in stages)
        one = order_below(np.ascontiguousarray(seconds), room, limit_s - end_s, most_nodes)
        if one == SOME:
            return SOME
        verdict = one if one == UNKNOWN else verdict
    return verdict


def _copy(seconds: Any, problem: Problem) -> None:
    """What the ends of a message copy is theirs, and the link's no more."""
    link = problem.link
    if link is None:
        return
    for stage in range(seconds.shape[1] - 1):
        output_s, gradient_s = seconds[SEND_F, stage].copy(), seconds[SEND_B, stage + 1].copy()
        seconds[F, stage] += link.sender_share * output_s
        seconds[F, stage + 1] += link.receiver_share * output_s
        seconds[B, stage + 1] += link.sender_share * gradient_s
        seconds[B, stage] += link.receiver_share * gradient_s
        seconds[SEND_F, stage] -= (link.sender_share + link.receiver_share) * output_s
        seconds[SEND_B, stage + 1] -= (link.sender_share + link.receiver_share) * gradient_s


def _room(problem: Problem, candidate: Candidate, ring: Ring, stage: int, layers: Any, group: int, flag: bool) -> Any:
    """Bytes free in addition to what is there in any case, of one micro-batch in flight, and of one that waits."""
    device = problem.classes[group].device
    first, stop = layers

    def at(held: tuple[int, int]) -> Any:
        return stage_memory(
            problem.costs,
            problem.parameters,
            device,
            candidate.schedule,
            candidate.split,
            problem.costs.optimizer(device.kind, problem.optimizer),
            number=ring.ranks - stage,
            first=first,
            stop=stop,
            segments=(Segment(first=first, stop=stop),) if flag else (),
            ring=ring,
            held=(held,),
        )

    one = at((1, 1))
    flying, waiting = at((2, 1)).activations - one.activations, at((1, 2)).deferred - one.deferred
    return device.memory_bytes - one.total + flying + waiting, flying, waiting


@compiled
def order_below(seconds: Any, room: Any, limit_s: float, most_nodes: int) -> int:
    """Whether some order of these passes is done before `limit_s`; `UNKNOWN` after so many nodes."""
    _, stages, count = seconds.shape
    deep = 9 * stages * count + 2
    clock, last = np.zeros((deep, stages)), np.full((deep, stages), -1)
    done, blocked = np.zeros((deep, 3, stages), dtype=np.int64), np.zeros((deep, 3, stages), dtype=np.int64)
    inputs, gradients = np.full((deep, stages, count), NOT_YET), np.full((deep, stages, count), NOT_YET)
    links = np.zeros((deep, 2, stages))
    inputs[0, 0], gradients[0, stages - 1] = 0.0, 0.0
    options, stage_of = np.full((deep, 4), -1), np.zeros(deep, dtype=np.int64)
    turn = np.full(deep, -1)
    depth, nodes = 0, 0
    while depth >= 0:
        if turn[depth] < 0:
            nodes += 1
            if nodes > most_nodes:
                return UNKNOWN
            if done[depth].sum() == 3 * stages * count:
                if clock[depth].max() < limit_s * (1 - ROUNDING):
                    return SOME
                depth -= 1
                continue
            late = _least_s(seconds, clock[depth], done[depth], inputs[depth]) >= limit_s * (1 - ROUNDING)
            if late or depth + 1 >= deep:
                depth -= 1
                continue
            stage_of[depth] = _branches(
                seconds, room, clock[depth], done[depth], blocked[depth], last[depth], inputs[depth], gradients[depth],
                options[depth],
            )  # fmt: skip
        turn[depth] += 1
        if turn[depth] == 4 or options[depth, turn[depth]] < 0:
            turn[depth] = -1
            depth -= 1
            continue
        kind, stage, new = options[depth, turn[depth]], stage_of[depth], depth + 1
        clock[new], last[new], done[new], blocked[new] = clock[depth], last[depth], done[depth], blocked[depth]
        inputs[new], gradients[new], links[new] = inputs[depth], gradients[depth], links[depth]
        if kind >= WAIT:
            blocked[new, kind - WAIT, stage] = 1
        else:
            _do(seconds, clock[new], last[new], done[new], inputs[new], gradients[new], links[new], stage, kind)
            blocked[new, :, stage] = 0
        turn[new] = -1
        depth = new
    return NONE


@compiled
def _least_s(seconds: Any, clock: Any, done: Any, inputs: Any) -> float:
    """What the stages still have to do: each all its own, and what goes back from it."""
    _, stages, count = seconds.shape
    least_s, input_s = 0.0, 0.0
    for stage in range(stages):
        begin_s = clock[stage]
        if done[0, stage] == 0:
            begin_s = input_s = input_s if inputs[stage, 0] == NOT_YET else inputs[stage, 0]
        own_s = seconds[F, stage, done[0, stage] :].sum() + seconds[B, stage, done[1, stage] :].sum()
        after_s = 0.0
        if done[1, stage] < count and stage:
            after_s = seconds[SEND_B, 1 : stage + 1, -1].sum() + seconds[B, :stage, -1].sum() + seconds[W, 0, -1]
        least_s = max(least_s, begin_s + own_s + max(after_s, seconds[W, stage, done[2, stage] :].sum()))
        input_s = max(begin_s, input_s) + seconds[F, stage, 0] + seconds[SEND_F, stage, 0]
    return least_s


@compiled
def _branches(
    seconds: Any,
    room: Any,
    clock: Any,
    done: Any,
    blocked: Any,
    last: Any,
    inputs: Any,
    gradients: Any,
    options: Any,
) -> int:
    """Fill in the branches; the stage that they are of."""
    _, stages, count = seconds.shape
    starts, ends = np.full((3, stages), np.inf), np.full((3, stages), np.inf)
    for stage in range(stages):
        flying, waiting = done[0, stage] - done[1, stage], done[1, stage] - done[2, stage]
        free, one, other = room[stage]
        if done[0, stage] < count and (flying + 1) * one + waiting * other <= free and not blocked[0, stage]:
            there_s = inputs[stage, done[0, stage]]
            if there_s != NOT_YET:
                starts[0, stage] = max(clock[stage], there_s)
                ends[0, stage] = starts[0, stage] + seconds[F, stage, done[0, stage]]
        if flying and flying * one + waiting * other <= free and not blocked[1, stage]:
            there_s = gradients[stage, done[1, stage]]
            if there_s != NOT_YET:
                again_s = 0.0 if last[stage] == done[1, stage] else seconds[R, stage, done[1, stage]]
                starts[1, stage] = clock[stage]
                ends[1, stage] = max(clock[stage] + again_s, there_s) + seconds[B, stage, done[1, stage]]
                if again_s == 0.0:
                    starts[1, stage] = max(clock[stage], there_s)
        if waiting:
            starts[2, stage] = clock[stage]
            ends[2, stage] = clock[stage] + seconds[W, stage, done[2, stage]]
    options[:] = -1
    place = int(np.argmin(ends))
    kind, stage = place // stages, place % stages
    if ends[kind, stage] == np.inf:
        return 0
    number = 0
    for other in range(3):
        if other == kind or starts[other, stage] < ends[kind, stage]:
            options[number] = other
            number += 1
    binds = room[stage, 1] + (count - 1) * max(room[stage, 1], room[stage, 2]) > room[stage, 0]
    if kind < 2 and (binds or seconds[R, stage].any()) and number < 4:
        options[number] = WAIT + kind
    return stage


@compiled
def _do(
    seconds: Any,
    clock: Any,
    last: Any,
    done: Any,
    inputs: Any,
    gradients: Any,
    links: Any,
    stage: int,
    kind: int,
) -> None:
    """Carry a pass out."""
    stages = seconds.shape[1]
    batch = done[kind, stage]
    done[kind, stage] += 1
    turns = kind == 1 and last[stage] == batch
    last[stage] = batch if kind == 0 else -1
    if kind == 0:
        clock[stage] = max(clock[stage], inputs[stage, batch]) + seconds[F, stage, batch]
        if stage < stages - 1:
            links[0, stage] = max(links[0, stage], clock[stage]) + seconds[SEND_F, stage, batch]
            inputs[stage + 1, batch] = links[0, stage]
    elif kind == 1:
        again_s = 0.0 if turns else seconds[R, stage, batch]
        clock[stage] = max(clock[stage] + again_s, gradients[stage, batch]) + seconds[B, stage, batch]
        if stage:
            links[1, stage] = max(links[1, stage], clock[stage]) + seconds[SEND_B, stage, batch]
            gradients[stage - 1, batch] = links[1, stage]
    else:
        clock[stage] += seconds[W, stage, batch]
