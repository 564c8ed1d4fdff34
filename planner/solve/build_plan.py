"""From what the balancer found to a plan: every stage's times and memory, and what the simulator predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.cost.messages import Carrier
from planner.cost.skips import Route, neighbour_s, plan_skips, stage_skips
from planner.cost.stage_memory import StageMoments, stage_moments, together
from planner.cost.time_ledger import end_s, layer_seconds
from planner.cost.transfers import Shares
from planner.kernel.makespan import SEND_B, SEND_F
from planner.plan.held import Held, Moment, moments_in
from planner.plan.plan import Plan
from planner.plan.prediction import Prediction
from planner.plan.schedules import SCHEDULES, Ring
from planner.plan.simulator import simulate_plan
from planner.plan.stage import Stage, StageMemory, StageTimes
from planner.solve.balance import Balance, StageChoice, end_seconds, placement_of, shares_of, stage_seconds
from planner.solve.counts import left_out_s
from planner.solve.order_arrays import orders_of
from planner.solve.problem import Problem
from profiler.device import Device, Link
from profiler.record import Profile

ROUNDING = 1e-9
"""Relative difference between two ways to compute a step time that is taken for rounding."""


def make_plan(problem: Problem, found: Balance, routes: Sequence[Route] = ()) -> Plan:
    """The plan that a balance means.

    Args:
        problem: that it solves.
        found: what the balancer found.
        routes: of the values that skip stages; all others are relayed.
    """
    profile = problem.costs.profile
    candidate = found.candidate
    draft = Plan(
        model_fingerprint=profile.fingerprint,
        profile_fingerprint=problem.costs.fingerprint,
        sample=profile.sample,
        batch_size=problem.settings.batch_size,
        micro_batch_sizes=candidate.split.sizes,
        schedule=candidate.schedule,
        chunks=candidate.ring.chunks,
        orders=found.orders,
        replicas=candidate.replicas,
        positions=placement_of(problem, candidate, found.stages).members if problem.devices_per_host else (),
        devices_per_host=problem.devices_per_host,
        shard_optimizer=problem.shares(candidate.replicas) > 1,
        optimizer=problem.optimizer,
        stages=stages_of(problem, found, routes),
        skips=plan_skips(routes, _links(problem, found), sorted({*candidate.split.sizes}, reverse=True)),
        rank_memories=rank_memories(problem, found, routes),
        prediction=Prediction(
            step_s=found.step_s,
            optimizer_s=0.0,
            bubble=0.0,
            samples_per_s=problem.settings.batch_size / found.step_s,
            lower_bound_s=found.step_s,
            gap=0.0,
            one_device_s=_one_device_s(problem, found),
        ),
    )
    return draft.model_copy(update={"prediction": _prediction(problem, found, draft)})


def _prediction(problem: Problem, found: Balance, draft: Plan) -> Prediction:
    """The simulator has the last word on the step time."""
    timeline = simulate_plan(draft, events=False)
    lower_bound_s = min(found.lower_bound_s, left_out_s(problem), timeline.step_s)
    if timeline.step_s <= lower_bound_s * (1 + ROUNDING):
        lower_bound_s = timeline.step_s
    return Prediction(
        step_s=timeline.step_s,
        optimizer_s=timeline.optimizer_s,
        bubble=min(1.0, timeline.bubble),
        samples_per_s=problem.settings.batch_size / timeline.step_s,
        lower_bound_s=lower_bound_s,
        gap=timeline.step_s / lower_bound_s - 1,
        one_device_s=_one_device_s(problem, found),
    )


def stages_of(problem: Problem, found: Balance, routes: Sequence[Route]) -> tuple[Stage, ...]:
    """The plan's stages; equal devices are taken in the order in which they were given."""
    sizes = sorted({*found.candidate.split.sizes}, reverse=True)
    splits = SCHEDULES[found.candidate.schedule].splits_backward
    placement = placement_of(problem, found.candidate, found.stages)
    ring = found.candidate.ring.over(len(found.stages))
    seconds = {
        size: stage_seconds(problem, size, found.stages, ring, splits=splits, placement=placement) for size in sizes
    }
    if routes:
        stops = [stage.stop for stage in found.stages]
        for size, table in seconds.items():
            table[SEND_F : SEND_B + 1] = neighbour_s(
                _links(problem, found), problem.at_boundaries(size), size, stops, routes
            )
    names = ["forward_s", "recompute_s", "backward_s", "send_forward_s", "send_backward_s"]
    if splits:
        names.append("weight_s")
    copied = [*shares_of(problem, placement, ring), (0.0, 0.0)]
    stages = []
    for index, choice in enumerate(found.stages):
        rank = ring.rank_of(index)
        times = tuple(
            StageTimes(
                micro_batch_size=size,
                **dict(zip(names, (float(value) for value in seconds[size][:, index]), strict=False)),
            )
            for size in sizes
        )
        stages.append(
            _stage(
                problem,
                found,
                index,
                choice,
                rank,
                tuple(problem.devices[member] for member in placement.members[rank]),
                times,
                routes,
                averaging=placement.averaging(rank),
                copied=copied[index],
            )
        )
    return tuple(stages)


def _links(problem: Problem, found: Balance) -> Callable[[int, int], Link | None]:
    """What lies between two stages, which have one a rank."""
    placement = placement_of(problem, found.candidate, found.stages)

    def link(sender: int, receiver: int) -> Link | None:
        hosts = placement.hosts
        return problem.link if hosts is None or not placement.is_far(sender, receiver) else hosts.between

    return link


def _stage(
    problem: Problem,
    found: Balance,
    index: int,
    choice: StageChoice,
    rank: int,
    devices: tuple[Device, ...],
    times: tuple[StageTimes, ...],
    routes: Sequence[Route],
    *,
    averaging: Link | None,
    copied: Shares,
) -> Stage:
    profile = problem.costs.profile
    first, stop = choice.first, choice.stop
    names = dict.fromkeys(name for layer in profile.layers[first:stop] for name in layer.parameters)
    elements = {parameter.name: parameter.elements for parameter in profile.parameters}
    held = [held[index // _ring(found).ranks] for _, held in _own_moments(found, rank)] if found.orders else ()
    all_reduce_s, optimizer_s = end_seconds(problem, found.candidate, choice, averaging)
    return Stage(
        first_layer=first,
        stop_layer=stop,
        module_paths=_end_paths(profile, first, stop),
        devices=devices,
        rank=rank,
        parameters=tuple(names),
        parameter_count=sum(elements[name] for name in names),
        recompute=choice.segments,
        times=times,
        all_reduce_s=all_reduce_s,
        optimizer_s=optimizer_s,
        memory=_moments(problem, found, index, held, routes).largest,
        copied=copied,
    )


def _moments(
    problem: Problem, found: Balance, index: int, held: Sequence[Held], routes: Sequence[Route]
) -> StageMoments:
    """Bytes of a stage where it holds so many micro-batches."""
    choice, candidate = found.stages[index], found.candidate
    device = problem.classes[choice.device_class].device
    carrier = problem.carrier(device)
    return stage_moments(
        problem.costs,
        problem.parameters,
        device,
        candidate.schedule,
        candidate.split,
        problem.costs.optimizer(device.kind, problem.optimizer),
        number=len(found.stages) - index,
        first=choice.first,
        stop=choice.stop,
        segments=choice.segments,
        skips=stage_skips(routes, index, candidate.split),
        ring=_ring(found),
        replicas=problem.as_replicas(candidate.replicas),
        carrier=carrier,
        under_way=_under_way(found) if carrier is Carrier.SLOTS else (),
        held=held,
    )


def _ring(found: Balance) -> Ring:
    return found.candidate.ring.over(len(found.stages))


def _own_moments(found: Balance, rank: int) -> tuple[Moment, ...]:
    """What a rank holds in the order that the plan has for it."""
    count, chunks = found.candidate.split.count, found.candidate.ring.chunks
    return moments_in(orders_of(found.orders[rank : rank + 1], count, chunks)[0], count, chunks)


def _under_way(found: Balance) -> tuple[int, ...]:
    """Micro-batches in flight at most at each stage, from the last one on, where the plan has orders of its own.

    Rings have no more slots; the search, which makes the orders, counts as if all micro-batches might be in flight.
    """
    ring = _ring(found)
    moments = [_own_moments(found, rank) for rank in range(ring.ranks if found.orders else 0)]
    return tuple(
        max(held[stage // ring.ranks][0] for _, held in moments[ring.rank_of(stage)])
        for stage in reversed(range(ring.stages if found.orders else 0))
    )


def rank_memories(problem: Problem, found: Balance, routes: Sequence[Route]) -> tuple[StageMemory, ...]:
    """Bytes of each rank, where ranks have several chunks, at the moment at which these need most together."""
    ring = found.candidate.ring
    memories = []
    for rank in range(ring.ranks if ring.chunks > 1 else 0):
        fixed = SCHEDULES[found.candidate.schedule].moments(rank, found.candidate.split.count, ring)
        moments = _own_moments(found, rank) if found.orders else fixed
        chunks = [
            _moments(problem, found, stage, [held[chunk] for _, held in moments], routes)
            for chunk, stage in enumerate(ring.stages_of(rank))
        ]
        memories.append(together(chunks, [computing for computing, _ in moments]).largest)
    return tuple(memories)


def _end_paths(profile: Profile, first: int, stop: int) -> tuple[str, str]:
    """Module path of the first and the last operation of a stage."""
    paths = [path for layer in profile.layers[first:stop] for path in layer.module_paths or (layer.name,)]
    return paths[0], paths[-1]


def _one_device_s(problem: Problem, found: Balance) -> float:
    """Seconds of the same batch on the first device alone, memory disregarded."""
    kind = problem.devices[0].kind
    sizes = found.candidate.split.sizes
    seconds = {size: layer_seconds(problem.costs, kind, size) for size in {*sizes}}
    work = {size: float(costs.forward_s.sum() + costs.backward_s.sum()) for size, costs in seconds.items()}
    fixed_s, byte_s = end_s(problem.end_figures(kind, 1))["optimizer_s"]
    trainable = float(problem.parameters.trainable[0, -1])
    optimizer_s = fixed_s + byte_s * trainable if trainable else 0.0
    return found.candidate.replicas * sum(work[size] for size in sizes) + optimizer_s
