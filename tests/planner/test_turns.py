"""Where chunks go over the ranks and back, a rank hands what its one chunk makes to its own next one."""

import random
from collections.abc import Sequence
from operator import le

import numpy as np
import pytest

from planner.cost.layer_costs import CostModel
from planner.cost.parameter_ranges import ParameterRanges
from planner.cost.stage_memory import stage_memory
from planner.plan.held import Held, Moment, moments_in
from planner.plan.micro_batches import MicroBatches
from planner.plan.order_text import order_of_text
from planner.plan.orders import Order, PassKind, pass_of
from planner.plan.schedules import Ring
from planner.plan.stage import StageMemory
from tests.executor.random_orders import random_orders
from tests.planner.made_up import build_profile

COUNT = 8
SIZES = (64, 128, 256, 512, 1024, 0)  # of what crosses after each layer


def memory_of(device, ring: Ring, stage: int, flying: int) -> StageMemory:
    """Of a stage of one layer that keeps nothing itself, with so many micro-batches in flight."""
    sizes = [*SIZES[: ring.stages - 1], 0]
    profile = build_profile({("a", 1): [(1.0, 1.0, 2.0, 0, 0, size, size) for size in sizes]})
    costs = CostModel(profile)
    return stage_memory(
        costs,
        ParameterRanges(profile),
        device,
        "zb-v",
        MicroBatches(COUNT, COUNT),
        costs.optimizer("a", "AdamW"),
        number=ring.stages - stage,
        first=stage,
        stop=stage + 1,
        segments=(),
        ring=ring,
        held=(Held(flying),),
    )


@pytest.mark.parametrize("threads", [0, 1])
def test_nothing_is_under_way_at_a_turn(device, threads):
    """Of a rank with both sides of a turn no message counts there; with other ranks before it those to these do."""
    here = device(threads=threads)
    alone = Ring(1, 2, folds=True)
    assert [memory_of(here, alone, stage, 5).receive_buffers for stage in range(2)] == [0, 0]
    around, folded = Ring(3, 2), Ring(3, 2, folds=True)
    for stage in range(folded.stages):
        now, else_ = (memory_of(here, ring, stage, 5).receive_buffers for ring in (folded, around))
        assert (now < else_) == (stage in (2, 3)), stage
        assert now > 0


def test_before_a_turn_all_in_flight_count_with_what_crosses_it_and_after_it_none(device):
    folded = Ring(3, 2, folds=True)
    for flying in range(COUNT + 1):
        activations = [memory_of(device(), folded, stage, flying).activations for stage in range(folded.stages)]
        before = (0, *SIZES[:5])
        assert activations[:2] == [flying * size for size in before[:2]]
        assert activations[2:4] == [flying * (before[2] + before[3]), 0]
        assert activations[4:] == [flying * size for size in before[4:]]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_walk_finds_at_a_turn_is_what_is_in_flight_before_it(seed):
    """Outputs that wait, inputs of the chunk after it, and gradients, those in use among them."""
    chance = random.Random(seed)
    ring = Ring(chance.randint(1, 4), 2, folds=True)
    (*_, text) = random_orders(ring, COUNT, chance)
    order = order_of_text(text, COUNT, 2)
    outputs = inputs = gradients = flying = 0
    for kind, chunk, _ in (pass_of(number, COUNT, 2) for number in order):
        if kind is PassKind.WEIGHTS:
            continue
        forward = kind is PassKind.FORWARD
        if chunk == 0:
            outputs, flying = outputs + forward, flying + forward
        elif forward:
            outputs, inputs = outputs - 1, inputs + 1
        assert outputs + inputs + gradients == flying
        if not forward:
            inputs, gradients = (inputs, gradients - 1) if chunk == 0 else (inputs - 1, gradients + 1)
            flying -= chunk == 0
    assert {*moments_in(np.array(order), COUNT, 2)} == moments_seen(order, COUNT, 2)


def moments_seen(order: Order, micro_batches: int, chunks: int) -> set[Moment]:
    """By looking at each pass: those of which no other one of the same chunk has as much of everything."""
    flying, waiting = [0] * chunks, [0] * chunks
    seen: set[Moment] = set()
    for number in order:
        kind, chunk, _ = pass_of(number, micro_batches, chunks)
        flying[chunk] += kind is PassKind.FORWARD
        seen.add((chunk, tuple(Held(*both, kind) for both in zip(flying, waiting, strict=True))))
        flying[chunk] -= kind is PassKind.BACKWARD
        waiting[chunk] += (kind is PassKind.BACKWARD) - (kind is PassKind.WEIGHTS)
    return {one for one in seen if not any(one != two and one[0] == two[0] and covers(two[1], one[1]) for two in seen)}


def covers(held: Sequence[Held], others: Sequence[Held]) -> bool:
    """Whether a moment needs no less than another one of the same chunk."""
    kind, other = held[0].kind, others[0].kind
    same = kind is other or (kind is PassKind.BACKWARD and other is PassKind.FORWARD)
    return same and all(map(le, (n for one in others for n in one[:2]), (n for one in held for n in one[:2])))
