"""What the fields of a plan may not say together, wherever it comes from; and of a file, what its figures may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from math import isclose, ulp

from planner.plan.order_text import check_order_texts
from planner.plan.plan_fields import PlanFields
from planner.plan.prediction import ROUNDING
from planner.plan.schedules import SCHEDULES, check_chunks
from planner.plan.simulator import plan_optimizer_s
from planner.plan.stage import has_times_for, sizes_listed
from profiler.errors import ArgumentError
from profiler.quantities import shown
from profiler.text import counted


def check_plan(plan: PlanFields) -> None:
    """Refuse a plan that contradicts itself.

    Raises:
        ValueError: the first thing that is wrong, with both numbers.
        ArgumentError: of its schedule, chunks or orders.
    """
    for check in (_check_batch, _check_ranks, _check_chunks, _check_tokens, _check_stages, _check_skips, _check_orders):
        check(plan)


def _check_batch(plan: PlanFields) -> None:
    samples = sum(plan.micro_batch_sizes)
    if samples * plan.replicas != plan.batch_size:
        raise ValueError(
            f"{plan.replicas} times {counted(plan.M, 'micro-batch')} of together "
            f"{counted(samples, 'sample')} do not make up a batch of {plan.batch_size}"
        )
    only = plan.sample.only_micro_batch_size
    if only is not None and {*plan.micro_batch_sizes} != {only}:
        raise ValueError(
            f"the model was traced for micro-batches of {counted(only, 'sample')} alone, and these hold "
            f"{min(plan.micro_batch_sizes)} to {max(plan.micro_batch_sizes)}"
        )


def _check_ranks(plan: PlanFields) -> None:
    given = {stage.rank for stage in plan.stages}
    if plan.ranks != len(given):
        raise ValueError(
            f"the stages name {counted(len(given), 'rank')}, the highest of them {plan.ranks - 1}; one is left out"
        )
    if plan.shard_optimizer and plan.replicas == 1:
        raise ValueError("shard_optimizer is true and there is 1 replica, with which none shares the optimizer")
    if plan.positions or plan.devices_per_host is not None:
        _check_positions(plan)


def _check_positions(plan: PlanFields) -> None:
    if {plan.replicas} != {len(row) for row in plan.positions} or len(plan.positions) != plan.ranks:
        raise ValueError(
            f"positions has {counted(len(plan.positions), 'rank')} of {shown([len(row) for row in plan.positions])} "
            f"replicas, and the plan {counted(plan.ranks, 'rank')} of {plan.replicas}"
        )
    for rank, row in enumerate(plan.positions):
        if list(row) != sorted(row):
            raise ValueError(f"positions of rank {rank} are {shown(list(row))}; they ascend from replica to replica")
    position, times = Counter(chain.from_iterable(plan.positions)).most_common(1)[0]
    if times > 1:
        raise ValueError(f"positions names device {position} {times} times; each rank of each replica has its own")


def _check_stages(plan: PlanFields) -> None:
    expected = 0
    for position, stage in enumerate(plan.stages):
        if stage.first_layer != expected or stage.stop_layer <= stage.first_layer:
            raise ValueError(
                f"stage {position} holds layers [{stage.first_layer}, {stage.stop_layer}), expected to start at "
                f"{expected} and hold at least one"
            )
        expected = stage.stop_layer
        if not has_times_for(stage.times, plan.micro_batch_sizes):
            raise ValueError(f"stage {position} has times for micro-batches of {sizes_listed(stage.times)} samples")
        if len(stage.devices) != plan.replicas:
            raise ValueError(
                f"stage {position} has {counted(len(stage.devices), 'device')} for {counted(plan.replicas, 'replica')}"
            )
        reached = stage.first_layer
        for segment in stage.recompute:
            if segment.first < reached or segment.stop > stage.stop_layer:
                raise ValueError(
                    f"stage {position} recomputes layers [{segment.first}, {segment.stop}), which lie outside "
                    f"[{reached}, {stage.stop_layer})"
                )
            reached = segment.stop


def _check_chunks(plan: PlanFields) -> None:
    check_chunks(plan.schedule, plan.K, plan.chunks)
    if plan.chunks == 1:
        _check_rank_memories(plan)
        return
    ring = plan.ring
    if plan.skips:
        raise ValueError(
            f"{counted(len(plan.skips), 'skip')} with {plan.chunks} chunks a rank; values are relayed from "
            "chunk to chunk"
        )
    for position, stage in enumerate(plan.stages):
        rank = ring.rank_of(position)
        if stage.rank != rank:
            raise ValueError(
                f"stage {position} is on rank {stage.rank}; with {plan.chunks} chunks on each of "
                f"{counted(ring.ranks, 'rank')} it belongs on rank {rank}"
            )
        if stage.devices != plan.stages[rank].devices:
            raise ValueError(f"stages {rank} and {position} are of one rank and on unlike devices")
    _check_rank_memories(plan)
    try:
        _ = plan.device_memories
    except ArgumentError as problem:
        raise ValueError(f"the memory of a rank's {plan.chunks} chunks together: {problem}") from problem


def _check_rank_memories(plan: PlanFields) -> None:
    ranks = plan.K // plan.chunks
    if len(plan.rank_memories) not in ({0} if plan.chunks == 1 else {0, ranks}):
        raise ValueError(
            f"rank_memories has {len(plan.rank_memories)} entries for {ranks} ranks with {plan.chunks} chunks on "
            "each; give one a rank where these have several chunks, or none"
        )


def _check_tokens(plan: PlanFields) -> None:
    given, tokens = plan.prediction.tokens_per_s, plan.sample.tokens
    if given is not None and not isclose(given, plan.prediction.samples_per_s * (tokens or 0), rel_tol=ROUNDING):
        raise ValueError(
            f"tokens_per_s is {given}, with {plan.prediction.samples_per_s} samples_per_s of {tokens} tokens"
        )


def _check_orders(plan: PlanFields) -> None:
    if not SCHEDULES[plan.schedule].made_for_plan:
        if plan.orders:
            raise ValueError(
                f"orders has {counted(len(plan.orders), 'entry')}, and schedule {plan.schedule!r} has its own"
            )
        return
    check_order_texts(plan.orders, plan.ring, plan.M)


def _check_skips(plan: PlanFields) -> None:
    if len({skip.ends for skip in plan.skips}) != len(plan.skips):
        raise ValueError(f"{len(plan.skips)} skips name a pair of stages twice")
    for skip in plan.skips:
        if not skip.sender + 1 < skip.receiver < plan.K:
            raise ValueError(
                f"a skip leads from stage {skip.sender} to stage {skip.receiver} of {plan.K}, and none lies between"
            )
        if not has_times_for(skip.times, plan.micro_batch_sizes):
            raise ValueError(f"the skip {skip.ends} has times for micro-batches of {sizes_listed(skip.times)} samples")


def contradicting_figures(plan: PlanFields) -> str | None:
    """The first thing that a file says and the rest of it denies; plans that are made up for a test may say it."""
    return next(chain(_passes_that_are_not(plan), _devices(plan), _totals(plan)), None)


def _passes_that_are_not(plan: PlanFields) -> Iterator[str]:
    """What takes time, and the plan has none of."""
    splits = SCHEDULES[plan.schedule].splits_backward
    last = plan.K - 1
    for position, stage in enumerate(plan.stages):
        if stage.all_reduce_s and plan.replicas == 1:
            yield f"there is 1 replica, and all_reduce_s of stage {position} is {stage.all_reduce_s}"
        if stage.memory.deferred and not splits:
            yield (
                f"schedule {plan.schedule!r} does not split the backward pass, and stage {position} keeps "
                f"{stage.memory.deferred} bytes for later"
            )
        for entry in stage.times:
            if entry.recompute_s and not stage.recompute:
                yield f"stage {position} recomputes nothing, and its recompute_s is {entry.recompute_s}"
            if entry.weight_s and not splits:
                yield (
                    f"schedule {plan.schedule!r} does not split the backward pass, and weight_s of stage "
                    f"{position} is {entry.weight_s}"
                )
            if entry.send_forward_s and position == last:
                yield f"stage {position} is the last one, and its send_forward_s is {entry.send_forward_s}"
            if entry.send_backward_s and position == 0:
                yield f"stage 0 is the first one, and its send_backward_s is {entry.send_backward_s}"


def _devices(plan: PlanFields) -> Iterator[str]:
    """What a device cannot hold, and replicas that are not alike."""
    for position, memory in enumerate(plan.device_memories):
        device = plan.stages[position].devices[0]
        if memory.total > device.memory_bytes:
            yield (
                f"{counted(memory.total, 'byte')} of memory on {device.name}, number {position}, which has "
                f"{device.memory_bytes}"
            )
    for position, stage in enumerate(plan.stages):
        first, *others = stage.devices
        for other in others:
            if other.model_copy(update={"name": first.name}) != first:
                yield (
                    f"the replicas' devices of stage {position} are equal but for their names, and {other.name} is "
                    f"{other.kind} of {other.memory_bytes} bytes, {first.name} {first.kind} of {first.memory_bytes}"
                )


def _totals(plan: PlanFields) -> Iterator[str]:
    """Sums of what is said of stages, and what the prediction says."""
    said, counts = plan.prediction, Counter(plan.micro_batch_sizes)
    least_s, most_s = [0.0] * plan.ranks, [0.0] * plan.ranks
    for stage in plan.stages:
        for entry in stage.times:
            passes_s = counts[entry.micro_batch_size] * (entry.forward_s + entry.backward_s)
            least_s[stage.rank] += passes_s
            most_s[stage.rank] += passes_s + counts[entry.micro_batch_size] * entry.recompute_s
    busiest = least_s.index(max(least_s))
    if least_s[busiest] > said.step_s * (1 + ROUNDING):
        yield (f"the passes of rank {busiest} take {least_s[busiest]:.6g} s of a step, and step_s is {said.step_s:.6g}")
    for position, stage in enumerate(plan.stages):
        send_s = max(max(entry.send_forward_s, entry.send_backward_s) for entry in stage.times)
        if send_s > said.step_s * (1 + ROUNDING):
            yield f"a message of stage {position} takes {send_s:.6g} s, and step_s is {said.step_s:.6g}"
    if not isclose(said.samples_per_s * said.step_s, plan.batch_size, rel_tol=ROUNDING):
        yield f"samples_per_s is {said.samples_per_s}, with {plan.batch_size} samples in {said.step_s} s"
    optimizer_s = plan_optimizer_s(plan)
    if not isclose(said.optimizer_s, optimizer_s, rel_tol=ROUNDING, abs_tol=ROUNDING * said.step_s):
        yield f"optimizer_s is {said.optimizer_s}, and by the stages it is {optimizer_s}"
    pipelined_s = plan.ranks * (said.step_s - said.optimizer_s)
    if pipelined_s > 0:
        copies = any(sum(one.copied) for one in (*plan.stages, *plan.skips))
        least = 0.0 if copies else 1 - sum(most_s) / pipelined_s
        most = 1 - sum(least_s) / pipelined_s
        # The passes' time is a difference, in which a long step of the optimizer leaves few digits.
        rounding = ROUNDING + plan.ranks * 4 * ulp(said.step_s) / pipelined_s
        if not least - rounding <= said.bubble <= most + rounding:
            yield f"bubble is {said.bubble}, and by the passes of all stages it is {max(0.0, least)} to {most}"
