"""Orders of ranks whose two chunks lie in a V: all finish, fit, take what the simulator says, and none is too fast."""

import random

import numpy as np
import pytest

from planner.kernel.any_order import any_order_s
from planner.kernel.list_scheduler import NOTHING, Room, exchanged, listed
from planner.kernel.makespan import SEND_B, SEND_F, R, walked_s
from planner.kernel.turns import BACKWARD, ways
from planner.plan.actions import make_schedule, room_between
from planner.plan.held import moments_in
from planner.plan.order_text import order_of_text, order_text
from planner.plan.orders import PassKind, one_by_one_order, pass_of
from planner.plan.schedules import Ring
from planner.plan.simulator import Durations, simulate
from planner.solve.order_arrays import orders_of, texts_of
from planner.solve.own_orders import best_orders
from tests.benchmarks.exhaustive_orders import memory_of, order_below
from tests.benchmarks.test_exhaustive_schedules import against_all_orders, drawn
from tests.planner.made_up import room_for

ROUGH = 1e-9
CHUNKS = 2


def seconds_of(chance: random.Random, ring: Ring, count: int) -> np.ndarray:
    """Of unlike passes; at the turn no message takes any time."""
    shape = 6, ring.stages, count
    seconds = np.array([chance.random() for _ in range(np.prod(shape))]).reshape(shape)
    seconds[R] *= np.array([chance.random() < 0.4 for _ in range(ring.stages)])[:, None]
    seconds[SEND_F : SEND_B + 1] *= chance.choice([0.0, 0.1, 1.0, 5.0])
    seconds[SEND_F, ring.ranks - 1] = seconds[SEND_B, ring.ranks] = 0.0
    return seconds


def room_of(chance: random.Random, ring: Ring, count: int) -> Room:
    """Room for one micro-batch at least, which may need more in one chunk or the other."""
    flying, waiting = (np.array([float(chance.randint(0, 9)) for _ in range(ring.stages)]) for _ in range(2))
    free = np.zeros(ring.stages)
    for rank in range(ring.ranks):
        own = [*ring.stages_of(rank)]
        free[own] = flying[own].cumsum() + [chance.choice([0, 3, 30, 100]) + chance.randint(0, 9) for _ in own]
    forward = free + [chance.choice([0, 0, 5, 50]) for _ in free]
    weights = free - flying + waiting + [chance.choice([0, 0, 5, 50]) for _ in free]
    return room_for(np.stack((forward, free, weights)), flying, waiting, count)


def most_of(room: Room, ring: Ring) -> np.ndarray:
    """Micro-batches in flight at most in each stage: they are so in the rank's earlier stage, too."""
    most = np.zeros(ring.stages, dtype=np.int64)
    for rank in range(ring.ranks):
        own = [*ring.stages_of(rank)]
        most[own] = (room.flying[own].cumsum(axis=0) <= room.free[BACKWARD, own][:, None]).sum(axis=1) - 1
    return most


def finishes(orders: np.ndarray, ring: Ring, count: int) -> bool:
    """Whether all ranks come to the end if one that sent waits until no more than so many messages are under way."""
    begun, room = np.zeros((3, ring.stages), dtype=np.int64), room_between(0, 1, ring)
    at = [0] * ring.ranks
    waits_for: list[tuple[int, int, int] | None] = [None] * ring.ranks
    went = True
    while went:
        went = False
        for rank, order in enumerate(orders.tolist()):
            full = waits_for[rank]
            if at[rank] == len(order) or (full and begun[full[0], full[1]] - begun[full[0], full[2]] > room):
                continue
            kind, chunk, batch = pass_of(order[at[rank]], count, CHUNKS)
            stage = ring.stages_of(rank)[chunk]
            source = stage - 1 if kind is PassKind.FORWARD else stage + 1
            if kind is not PassKind.WEIGHTS and 0 <= source < ring.stages and begun[kind, source] <= batch:
                continue
            begun[kind, stage] += 1
            at[rank] += 1
            to = stage + 1 if kind is PassKind.FORWARD else stage - 1
            sends = kind is not PassKind.WEIGHTS and 0 <= to < ring.stages and ring.rank_of(to) != rank
            waits_for[rank] = (kind, stage, to) if sends else None
            went = True
    return at == [len(order) for order in orders]


def check(orders: np.ndarray, room: Room, ring: Ring, count: int) -> None:
    """The orders finish, have all passes, say the same as text, and fit at each moment."""
    assert finishes(orders, ring, count)
    texts = texts_of(orders, count)
    assert np.array_equal(orders_of(texts, count, CHUNKS), orders)
    for rank, order in enumerate(orders.tolist()):
        assert sorted(order) == [*range(3 * CHUNKS * count)]
        assert texts[rank] == order_text(tuple(order), count, CHUNKS)
        assert order_of_text(texts[rank], count, CHUNKS) == tuple(order)
        own = ring.stages_of(rank)
        for chunk, held in moments_in(orders[rank], count, CHUNKS):
            each = zip(own, held, strict=True)
            needed = sum(room.flying[stage, one.flying] + room.waiting[stage, one.waiting] for stage, one in each)
            assert needed <= room.free[held[0].kind, own[chunk]]


@pytest.mark.parametrize("seed", range(60))
def test_orders_that_are_made_finish_fit_and_are_not_below_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    ring, count = Ring(chance.randint(2, 5), CHUNKS, folds=True), chance.randint(1, 9)
    seconds, room = seconds_of(chance, ring, count), room_of(chance, ring, count)
    where = ways(ring)
    lead = np.array([chance.randint(1, 2 * count) for _ in range(ring.ranks)])
    most = np.array([chance.randint(1, count) for _ in range(ring.stages)])
    orders = listed(seconds, room, where, lead, most, chance.choice([0.0, 0.5, 1.0]), np.inf)
    assert (orders != NOTHING).all()
    found = best_orders(seconds, room, ring=ring)
    assert found is not None
    least_s = any_order_s(seconds, most_of(room, ring), ways(ring))
    other = exchanged(orders, seconds, room, where, 300, 0.1, 0.0)
    for made in (orders, found[1], other):
        check(made, room, ring, count)
        assert least_s <= walked_s(made, seconds, ring) * (1 + ROUGH)
    assert found[0] == pytest.approx(walked_s(found[1], seconds, ring))
    assert walked_s(other, seconds, ring) <= walked_s(orders, seconds, ring)


@pytest.mark.parametrize("seed", range(40))
def test_the_step_of_any_order_is_the_simulators(seed: int) -> None:
    chance = random.Random(seed)
    ring, count = Ring(chance.randint(2, 5), CHUNKS, folds=True), chance.randint(1, 8)
    seconds, room = seconds_of(chance, ring, count), room_of(chance, ring, count)
    most = np.full(ring.stages, chance.randint(1, count))
    made = listed(seconds, room, ways(ring), np.full(ring.ranks, chance.randint(1, 9)), most, 0.5, np.inf)
    one_by_one = np.array([one_by_one_order(rank, ring.ranks, count, CHUNKS) for rank in range(ring.ranks)])
    again = [bool(row.any()) for row in seconds[R]]
    forward, recompute, inputs, outputs, gradients, weights = (tuple(map(tuple, row.tolist())) for row in seconds)
    whole = tuple(tuple(map(sum, zip(*pair, strict=True))) for pair in zip(inputs, weights, strict=True))
    durations = Durations(forward, recompute, whole, outputs, gradients, weight_s=weights)
    for orders in (made, one_by_one):
        schedule = make_schedule(
            "zb-v",
            stages=ring.stages,
            micro_batches=count,
            recompute=again,
            chunks=CHUNKS,
            orders=[tuple(order) for order in orders.tolist()],
        )
        said_s = simulate(schedule, durations).makespan_s
        assert walked_s(orders, seconds, ring) == pytest.approx(said_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_no_order_at_all_is_below_the_bound(seed: int) -> None:
    """Of two ranks with two micro-batches, and of three with one."""
    chance = random.Random(seed)
    ranks, count = chance.choice([(2, 1), (2, 2), (3, 1)])
    ring = Ring(ranks, CHUNKS, folds=True)
    seconds, room = seconds_of(chance, ring, count), room_of(chance, ring, count)
    memory = memory_of(room, ring)
    assert order_below(seconds, memory, ring, any_order_s(seconds, most_of(room, ring), ways(ring)), 10**6) == 0
    found = best_orders(seconds, room, ring=ring)
    assert found is not None
    assert order_below(seconds, memory, ring, found[0] * (1 + 1e-6), 10**6) == 1
    assert order_below(seconds, memory, ring, found[0] * (1 - 0.03), 10**6) == 0


def test_a_rank_holds_a_micro_batch_in_each_chunk_on_its_way() -> None:
    """What passes counts in the chunk that computes: the first one's need not fit on top of what the second holds."""
    ring, seconds = Ring(2, CHUNKS, folds=True), np.ones((6, 4, 3))
    seconds[SEND_F, 1] = seconds[SEND_B, 2] = 0.0
    flying = np.full(4, 10.0)
    tight = room_for(np.array([10.0, 10.0, 20.0, 20.0]), flying, flying, 3)
    found = best_orders(seconds, tight, ring=ring)
    assert found is not None
    check(found[1], tight, ring, 3)
    assert best_orders(seconds, room_for(np.array([10.0, 10.0, 20.0, 19.0]), flying, flying, 3), ring=ring) is None


@pytest.mark.parametrize(
    "seed", [1, 3, 6, 10, 14, 17, 19, 22, 23, 24, 28, 31, 34, 37, 39, 43, 45, 47, 52, 53, 67, 108, 144]
)
def test_no_plan_is_faster_by_more_than_a_hundredth_and_none_fits_where_none_is_found(seed: int) -> None:
    """Of small problems whose plans and orders are soon searched, all of them.

    Plans of 34, 108 and 144 were 2 to 4 % over the best; 22 had none although one fits, and then one 1.3 % over.
    """
    assert against_all_orders(seed, drawn("zb-v", seed, small=True))["ended"] != "undecided"
