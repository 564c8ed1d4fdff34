"""Every order of split backward passes: whether any plan of a small problem takes less than some time.

Stages, devices, and which stages are recomputed are enumerated, and for each the orders are searched as a tree: of all
passes that could be next, the one that would be done first has a rank; whatever is done before that on this rank is a
branch (Giffler and Thompson, Operations Research 8, 1960). Because memory may forbid later what is done now, not to do
it yet is a branch, too. A branch ends where what the ranks still have to do takes too long. Waits for room for messages
count at the end of each; orders that are best for these waits alone may be missing. Bytes are those of the
report, which has tests of its own; order, time and which moments count are this file's.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.cost.stage_memory import stage_moments
from planner.kernel.compiled import compiled
from planner.kernel.list_scheduler import Room
from planner.plan.actions import room_between
from planner.plan.held import Held
from planner.plan.orders import PassKind
from planner.plan.schedules import SCHEDULES, Ring
from planner.plan.stage import Segment
from planner.solve.balance import StageChoice, end_seconds, stage_seconds
from planner.solve.problem import Candidate, Problem

F, R, B, SEND_F, SEND_B, W = range(6)
NONE, SOME, UNKNOWN = 0, 1, -1
NOT_YET, NOWHERE = -1.0, -1
UNDER_WAY = room_between(0, 1)  # of one chunk a rank, and of two in a V
ROUNDING = 1e-9


@dataclass
class Found:
    """What the search says: whether some plan takes less, and how often it gave up."""

    faster: bool = False
    undecided: int = 0


class Memory(NamedTuple):
    """What ranks have room for, and what stages have with so many micro-batches in flight and so many that wait.

    Attributes:
        limit: bytes of each rank's device, shape (ranks,).
        kept: of each stage whatever it does, shape (K, M + 1, M + 1).
        passing: in addition while it computes, by kind of pass, shape (3, K, M + 1, M + 1).
    """

    limit: Any
    kept: Any
    passing: Any


def memory_of(room: Room, ring: Ring) -> Memory:
    """Of each stage what it has beside what is free while it works."""
    free = np.minimum(room.free, 1e18)  # of unlimited ones the difference
    limit = np.array([max(free[:, stage].max() for stage in ring.stages_of(rank)) for rank in range(ring.ranks)])
    passing = np.array([limit[ring.rank_of(stage)] - free[:, stage] for stage in range(ring.stages)]).T
    kept = room.flying[:, :, None] + room.waiting[:, None, :]
    return Memory(limit, kept, np.zeros_like(kept) + passing[:, :, None, None])


class Ways(NamedTuple):
    """Of each stage its rank, its chunk there, and the links that it sends over, forward and back; `NOWHERE` if none.

    Attributes:
        own: the stages of each rank, shape (ranks, chunks).
    """

    rank: Any
    links: Any
    own: Any


def ways_of(ring: Ring) -> Ways:
    """A rank has a link to the one after it and one to the one before it; of two ranks each has one."""
    rank = [ring.rank_of(stage) for stage in range(ring.stages)]
    links = np.full((2, ring.stages), NOWHERE)
    for stage, (here, there) in enumerate(itertools.pairwise(rank)):
        if here != there:
            up = (there - here) % ring.ranks == 1
            links[0, stage] = 0 if up or ring.ranks == 2 else 1
            links[1, stage + 1] = 1 if up and ring.ranks > 2 else 0
    own = [[stage for stage in range(ring.stages) if rank[stage] == one] for one in range(ring.ranks)]
    return Ways(np.array(rank), links, np.array(own))


def any_below(problem: Problem, limit_s: float, *, most_nodes: int = 200_000) -> Found:
    """Whether any plan takes less than `limit_s`, of all ranks, cuts, devices, recompute and orders."""
    found = Found()
    (candidate,) = problem.candidates()
    record, chunks = SCHEDULES[candidate.schedule], problem.settings.chunks
    able = [index for index, group in enumerate(problem.classes) for _ in group.members]
    for ranks in range(1 if chunks == 1 else 2, problem.most_stages(1, candidate.split.count) // chunks + 1):
        ring = record.ring(ranks, chunks)
        memory = _Bytes(problem, candidate, ring)
        for cuts in itertools.combinations(range(1, problem.layers), ring.stages - 1):
            ranges = [*itertools.pairwise((0, *cuts, problem.layers))]
            for classes in sorted(set(itertools.permutations(able, ranks))):
                verdict = _any_order_below(memory, ranges, classes, limit_s, most_nodes)
                found.undecided += verdict == UNKNOWN
                if verdict == SOME:
                    return Found(True, found.undecided)
    return found


def _any_order_below(memory: "_Bytes", ranges: Any, classes: Any, limit_s: float, most_nodes: int) -> int:
    verdict = NONE
    problem, candidate, ring, split = memory.problem, memory.candidate, memory.ring, memory.candidate.split
    of_stage = [classes[ring.rank_of(stage)] for stage in range(ring.stages)]
    limit = np.array([float(problem.classes[group].device.memory_bytes) for group in classes])
    for again in memory.sets(ranges, classes):
        each = [memory.of(stage, ranges[stage], of_stage[stage], flag) for stage, flag in enumerate(again)]
        kept, passing = (np.array(part) for part in zip(*each, strict=True))
        room = Memory(limit, kept, np.ascontiguousarray(passing.swapaxes(0, 1)))
        stages = tuple(
            StageChoice(first, stop, group, (Segment(first=first, stop=stop),) if flag else ())
            for (first, stop), group, flag in zip(ranges, of_stage, again, strict=True)
        )
        by_size = [stage_seconds(problem, size, stages, ring, splits=True) for size in (split.largest, split.smallest)]
        many = split.number_largest
        seconds = np.repeat(np.stack(by_size, axis=2), [many, split.count - many], axis=2)
        seconds[B] -= seconds[W]
        _copy(seconds, problem)
        ends = [sum(end_seconds(problem, candidate, stage)) for stage in stages]
        end_s = max(sum(ends[stage] for stage in ring.stages_of(rank)) for rank in range(ring.ranks))
        one = order_below(np.ascontiguousarray(seconds), room, ring, limit_s - end_s, most_nodes)
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


class _Bytes:
    """What stages hold, by the report, and which of a rank's may be recomputed."""

    def __init__(self, problem: Problem, candidate: Candidate, ring: Ring) -> None:
        self.problem, self.candidate, self.ring = problem, candidate, ring
        self._known: dict[Any, Any] = {}

    def of(self, stage: int, layers: tuple[int, int], group: int, flag: bool) -> Any:
        """Kept and passing bytes, see `Memory`."""
        key = stage, layers, group, flag
        if key not in self._known:
            problem, count, device = self.problem, self.candidate.split.count, self.problem.classes[group].device
            many = range(count + 1)
            held = [Held(*each) for each in itertools.product(many, many, PassKind)]
            found = stage_moments(
                problem.costs,
                problem.parameters,
                device,
                self.candidate.schedule,
                self.candidate.split,
                problem.costs.optimizer(device.kind, problem.optimizer),
                number=self.ring.stages - stage,
                first=layers[0],
                stop=layers[1],
                segments=(Segment(first=layers[0], stop=layers[1]),) if flag else (),
                ring=self.ring,
                held=held,
            )
            each = (np.broadcast_to(part, len(held)) for part in (found.passing, found.totals))
            passing, totals = (part.reshape(count + 1, count + 1, 3).transpose(2, 0, 1) for part in each)
            self._known[key] = totals[1] - passing[1], passing.copy()
        return self._known[key]

    def sets(self, ranges: Any, classes: Any) -> Any:
        """Which stages to recompute: all sets that let one micro-batch through, and none where all have room."""
        every = []
        for rank, group in enumerate(classes):
            own, limit = self.ring.stages_of(rank), self.problem.classes[group].device.memory_bytes
            flags = {"always": (True,), "never": (False,), "auto": (False, True)}[self.problem.settings.recompute]
            able = []
            for again in itertools.product(flags, repeat=len(own)):
                each = [self.of(stage, ranges[stage], group, flag) for stage, flag in zip(own, again, strict=True)]
                least = max(
                    sum(kept[int(other <= chunk), 0] for other, (kept, _) in enumerate(each)) + passing[1, 1, 0]
                    for chunk, (_, passing) in enumerate(each)
                )
                if least <= limit:
                    able.append(again)
                most = sum(kept.max() for kept, _ in each) + max(passing.max() for _, passing in each)
                if most <= limit and not any(again):
                    break
            every.append(able)
        for chosen in itertools.product(*every):
            by_stage = {
                stage: flag
                for rank, again in enumerate(chosen)
                for stage, flag in zip(self.ring.stages_of(rank), again, strict=True)
            }
            yield tuple(by_stage[stage] for stage in range(self.ring.stages))


def order_below(seconds: Any, memory: Memory, ring: Ring, limit_s: float, most_nodes: int) -> int:
    """Whether some order of these passes is done before `limit_s`; `UNKNOWN` after so many nodes."""
    return int(_order_below(seconds, memory, ways_of(ring), limit_s, most_nodes))


@compiled
def _order_below(seconds: Any, memory: Memory, ways: Ways, limit_s: float, most_nodes: int) -> int:
    _, stages, count = seconds.shape
    ranks, chunks = ways.own.shape
    deep, width = (1 + 3 * chunks) * 3 * stages * count + 2, 3 * chunks + 1
    clock, last = np.zeros((deep, ranks)), np.full((deep, ranks), NOWHERE)
    done, blocked = np.zeros((deep, 3, stages), dtype=np.int64), np.zeros((deep, 3, stages), dtype=np.int64)
    inputs, gradients = np.full((deep, stages, count), NOT_YET), np.full((deep, stages, count), NOT_YET)
    links = np.zeros((deep, 2, ranks))
    inputs[0, 0], gradients[0, stages - 1] = 0.0, 0.0
    options, turn = np.full((deep, width), NOWHERE), np.full(deep, NOWHERE)
    depth, nodes = 0, 0
    while depth >= 0:
        if turn[depth] < 0:
            nodes += 1
            if nodes > most_nodes:
                return UNKNOWN
            if done[depth].sum() == 3 * stages * count:
                in_time = clock[depth].max() < limit_s * (1 - ROUNDING)
                if in_time and _with_waits_s(options[:depth], turn[:depth], seconds, ways) < limit_s * (1 - ROUNDING):
                    return SOME
                depth -= 1
                continue
            least_s = _least_s(seconds, ways, clock[depth], done[depth], inputs[depth], gradients[depth])
            if least_s >= limit_s * (1 - ROUNDING) or depth + 1 >= deep:
                depth -= 1
                continue
            _branches(
                seconds, memory, ways, clock[depth], done[depth], blocked[depth], last[depth], inputs[depth],
                gradients[depth], options[depth],
            )  # fmt: skip
        turn[depth] += 1
        if turn[depth] == width or options[depth, turn[depth]] == NOWHERE:
            turn[depth] = NOWHERE
            depth -= 1
            continue
        chosen, new = options[depth, turn[depth]], depth + 1
        clock[new], last[new], done[new], blocked[new] = clock[depth], last[depth], done[depth], blocked[depth]
        inputs[new], gradients[new], links[new] = inputs[depth], gradients[depth], links[depth]
        kind, stage = chosen // stages % 3, chosen % stages
        if chosen >= 3 * stages:
            blocked[new, kind, stage] = 1
        else:
            _do(
                seconds, ways, clock[new], last[new], done[new], inputs[new], gradients[new], links[new], stage,
                kind, 0.0,
            )  # fmt: skip
            for other in ways.own[ways.rank[stage]]:
                blocked[new, :, other] = 0
        turn[new] = NOWHERE
        depth = new
    return NONE


@compiled
def _with_waits_s(options: Any, turn: Any, seconds: Any, ways: Ways) -> float:
    """What the order takes if each rank waits, after a pass that sends, until there is room; infinite if for ever."""
    _, stages, count = seconds.shape
    ranks, chunks = ways.own.shape
    passes = np.full((ranks, 3 * chunks * count), NOWHERE)
    many = np.zeros(ranks, dtype=np.int64)
    for depth in range(len(turn)):
        chosen = options[depth, turn[depth]]
        if chosen < 3 * stages:
            rank = ways.rank[chosen % stages]
            passes[rank, many[rank]] = chosen
            many[rank] += 1
    at, begun = np.zeros(ranks, dtype=np.int64), np.zeros((3, stages), dtype=np.int64)
    clock, last, links = np.zeros(ranks), np.full(ranks, NOWHERE), np.zeros((2, ranks))
    inputs, gradients = np.zeros((stages, count)), np.zeros((stages, count))
    taken = np.zeros((2, stages, count))  # when a pass has its message
    went = True
    while went:
        went = False
        for rank in range(ranks):
            while at[rank] < many[rank]:
                kind, stage = passes[rank, at[rank]] // stages, passes[rank, at[rank]] % stages
                batch = begun[kind, stage]
                if kind == 0 and stage and begun[0, stage - 1] <= batch:
                    break
                if kind == 1 and stage < stages - 1 and begun[1, stage + 1] <= batch:
                    break
                room_s = 0.0
                if kind < 2:
                    target = stage + 1 - 2 * kind
                    if ways.links[kind, stage] != NOWHERE and batch >= UNDER_WAY:
                        if begun[kind, target] <= batch - UNDER_WAY:
                            break
                        room_s = taken[kind, target, batch - UNDER_WAY]
                    ready_s = clock[rank]
                    if kind == 1 and last[rank] != stage * count + batch:
                        ready_s += seconds[R, stage, batch]
                    taken[kind, stage, batch] = max(ready_s, (gradients if kind else inputs)[stage, batch])
                _do(seconds, ways, clock, last, begun, inputs, gradients, links, stage, kind, room_s)
                at[rank] += 1
                went = True
    return float(clock.max()) if (at == many).all() else np.inf


@compiled
def _least_s(seconds: Any, ways: Ways, clock: Any, done: Any, inputs: Any, gradients: Any) -> float:
    """What is left: each rank has all its own, and then what goes back from it; and the last micro-batch its way."""
    _, stages, count = seconds.shape
    ranks, last = len(ways.own), count - 1
    begin_s = clock.copy()
    there_s = 0.0  # when the next micro-batch of a stage can be there
    for stage in range(len(ways.own)):
        rank = ways.rank[stage]
        if done[0, stage] == 0:
            there_s = there_s if inputs[stage, 0] == NOT_YET else inputs[stage, 0]
            begin_s[rank] = there_s = max(there_s, clock[rank])
            there_s += seconds[F, stage, 0] + seconds[SEND_F, stage, 0]
        else:
            there_s = clock[rank]
    least_s = 0.0
    for rank in range(ranks):
        own_s, later_s = begin_s[rank], 0.0
        for stage in ways.own[rank]:
            own_s += seconds[F, stage, done[0, stage] :].sum() + seconds[B, stage, done[1, stage] :].sum()
            later_s += seconds[W, stage, done[2, stage] :].sum()
            if stage != ways.own[rank, -1]:  # later chunks of it come between a micro-batch's passes
                own_s += seconds[R, stage, done[1, stage] :].sum()
        first, after_s = ways.own[rank, 0], 0.0
        if done[1, first] < count and first:
            after_s = seconds[SEND_B, 1 : first + 1, -1].sum() + seconds[B, :first, -1].sum() + seconds[W, 0, -1]
        least_s = max(least_s, own_s + max(after_s, later_s))
    end_s = 0.0  # of the last micro-batch's pass, stage by stage, and before it all others of that stage
    for stage in range(stages):
        if done[0, stage] < count:
            own_s = clock[ways.rank[stage]] + seconds[F, stage, done[0, stage] :].sum()
            end_s = max(max(end_s, inputs[stage, last]) + seconds[F, stage, last], own_s)
        end_s += seconds[SEND_F, stage, last] if stage < stages - 1 and done[0, stage] < count else 0.0
    for stage in range(stages - 1, -1, -1):
        if done[1, stage] < count:
            own_s = clock[ways.rank[stage]] + seconds[B, stage, done[1, stage] :].sum()
            end_s = max(max(end_s, gradients[stage, last]) + seconds[B, stage, last], own_s)
            end_s += seconds[SEND_B, stage, last] if stage else seconds[W, 0, last]
    return max(least_s, end_s)


@compiled
def _held(memory: Memory, own: Any, done: Any, kind: int, stage: int) -> float:
    """Bytes of a rank while it does that pass."""
    held = 0.0
    for each in own:
        flying, waiting = done[0, each] - done[1, each], done[1, each] - done[2, each]
        flying += kind == 0 and each == stage
        held += memory.kept[each, flying, waiting]
        if each == stage:
            held += memory.passing[kind, each, flying, waiting]
    return held


@compiled
def _branches(
    seconds: Any,
    memory: Memory,
    ways: Ways,
    clock: Any,
    done: Any,
    blocked: Any,
    last: Any,
    inputs: Any,
    gradients: Any,
    options: Any,
) -> None:
    """Fill in the branches: passes, by kind and stage, and then one that is not to be done yet."""
    _, stages, count = seconds.shape
    starts, ends = np.full((3, stages), np.inf), np.full((3, stages), np.inf)
    recomputes = np.zeros(len(ways.own), dtype=np.bool_)  # whether a gradient is waited for that nobody has made
    for stage in range(stages):
        rank = ways.rank[stage]
        own, free = ways.own[rank], memory.limit[rank]
        forward, backward, weights = done[0, stage], done[1, stage], done[2, stage]
        if forward < count and inputs[stage, forward] != NOT_YET:
            fits = _held(memory, own, done, 0, stage) <= free
            if fits and not blocked[0, stage]:
                starts[0, stage] = max(clock[rank], inputs[stage, forward])
                ends[0, stage] = starts[0, stage] + seconds[F, stage, forward]
        if backward < forward:
            there_s = gradients[stage, backward]
            again_s = 0.0 if last[rank] == stage * count + backward else seconds[R, stage, backward]
            recomputes[rank] |= again_s > 0.0 and there_s == NOT_YET
            fits = _held(memory, own, done, 1, stage) <= free
            if fits and there_s != NOT_YET and not blocked[1, stage]:
                starts[1, stage] = clock[rank] if again_s else max(clock[rank], there_s)
                ends[1, stage] = max(clock[rank] + again_s, there_s) + seconds[B, stage, backward]
        fits = weights < backward and _held(memory, own, done, 2, stage) <= free
        if fits and not blocked[2, stage]:
            starts[2, stage] = clock[rank]
            ends[2, stage] = clock[rank] + seconds[W, stage, weights]
    options[:] = NOWHERE
    place = int(np.argmin(ends))
    kind, stage = place // stages, place % stages
    if ends[kind, stage] == np.inf:
        return
    rank, number = ways.rank[stage], 0
    most, passing = 0.0, 0.0
    for each in ways.own[rank]:
        most += memory.kept[each].max()
        passing = max(passing, memory.passing[1:, each].max())
    for other in ways.own[rank]:
        for which in range(3):
            if (which == kind and other == stage) or starts[which, other] < ends[kind, stage]:
                options[number] = which * stages + other
                number += 1
    later = recomputes[rank] or (kind < 2 and (most + passing > memory.limit[rank] or seconds[R, ways.own[rank]].any()))
    if later:
        options[number] = 3 * stages + place


@compiled
def _do(
    seconds: Any,
    ways: Ways,
    clock: Any,
    last: Any,
    done: Any,
    inputs: Any,
    gradients: Any,
    links: Any,
    stage: int,
    kind: int,
    room_s: float,
) -> None:
    """Carry a pass out; what it sends, and what its rank does next, wait until there is room."""
    stages, count = seconds.shape[1:]
    rank, batch = ways.rank[stage], done[kind, stage]
    done[kind, stage] += 1
    turns = kind == 1 and last[rank] == stage * count + batch
    last[rank] = stage * count + batch if kind == 0 else NOWHERE
    if kind == 2:
        clock[rank] += seconds[W, stage, batch]
        return
    if kind == 0:
        clock[rank] = max(clock[rank], inputs[stage, batch]) + seconds[F, stage, batch]
    else:
        again_s = 0.0 if turns else seconds[R, stage, batch]
        clock[rank] = max(clock[rank] + again_s, gradients[stage, batch]) + seconds[B, stage, batch]
    clock[rank] = max(clock[rank], room_s)
    there_s, link = clock[rank], ways.links[kind, stage]
    if link != NOWHERE:
        there_s = links[link, rank] = (
            max(links[link, rank], there_s) + seconds[SEND_B if kind else SEND_F, stage, batch]
        )
    if kind == 0 and stage < stages - 1:
        inputs[stage + 1, batch] = there_s
    if kind == 1 and stage:
        gradients[stage - 1, batch] = there_s
