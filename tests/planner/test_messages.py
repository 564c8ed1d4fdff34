"""What messages under way take of memory, by hand and against the lists of actions."""

import itertools

import numpy as np
import pytest

from planner.cost.messages import Carrier, Message
from planner.plan.actions import (
    AHEAD_BYTES,
    RECEIVES_AHEAD,
    SENDS_AHEAD,
    ActionKind,
    make_schedule,
    most_in_flight,
    receives_ahead,
)
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring
from profiler.machine.ring import Outgoing

LONG = float(AHEAD_BYTES)  # so long that only as many are under way as must be


def message(large, small, gradient_large, gradient_small, **about):
    outputs, gradients = (
        (np.array([large]), np.array([small])),
        (np.array([gradient_large]), np.array([gradient_small])),
    )
    return Message(outputs, gradients, **about)


def under_gpipe(count):
    """All micro-batches are in flight."""
    return count, count


def at_receiver(of, schedule, split, number):
    """What the ledger asks for a stage."""
    record = SCHEDULES[schedule]
    most = record.most_under_way(number + of.distance, split.count)
    flying = sum(split.in_flight(schedule, number, ONE_CHUNK))
    return of.at_receiver(most, split, flying, keeps_all=record.keeps_all)


def test_a_sender_has_outputs_that_have_not_left_and_gradients_posted_and_read():
    """Of ten large messages two are on their way out, two posted for gradients, and one is read."""
    found = message(LONG, LONG, 3 * LONG, 3 * LONG).at_sender(*under_gpipe(10))
    assert found.tolist() == [SENDS_AHEAD * LONG + (RECEIVES_AHEAD + 1) * 3 * LONG]


def test_no_more_are_under_way_than_there_are():
    assert message(LONG, LONG, LONG, LONG).at_sender(*under_gpipe(1)).tolist() == [2 * LONG]


def test_of_short_messages_as_many_are_under_way_as_the_bytes_hold():
    """A quarter of the bytes ahead: four are sent ahead, and four gradients posted with one that is read."""
    short = LONG / 4
    assert message(short, short, short, short).at_sender(*under_gpipe(20)).tolist() == [(4 + 5) * short]
    none_ahead = message(short, short, short, short, ahead_bytes=0)
    assert none_ahead.at_sender(*under_gpipe(20)).tolist() == [(2 + 3) * short]


def test_the_smaller_ones_say_how_many_and_the_larger_ones_how_long():
    """Micro-batches of two sizes: as many as of the small ones fit ahead, each as long as a large one."""
    outputs, split = message(LONG, LONG / 4, 0.0, 0.0), MicroBatches(30, 20)
    assert outputs.at_sender(*under_gpipe(20)).tolist() == [4 * LONG]
    assert at_receiver(outputs, "1f1b", split, 4).tolist() == [4 * LONG]


def test_a_message_over_several_stages_is_posted_so_much_earlier():
    """Its sender leads by a micro-batch a stage."""
    near, far = (message(LONG, LONG, LONG, LONG, distance=distance) for distance in (1, 3))
    assert (far.at_sender(*under_gpipe(10)) - near.at_sender(*under_gpipe(10))).tolist() == [2 * LONG]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("distance", [1, 3])
@pytest.mark.parametrize("size", [0, 40, 2**12, 2**18, 2**20 + 64, 2**21, 2**21 + 64, 3 * 2**20, 2**23])
def test_slots_are_counted_to_the_byte(size: int, distance: int, most: int) -> None:
    """What a ring takes as the executor makes it: its sender has all of it, and the receiver what it reads."""
    outgoing = Outgoing(receives_ahead(distance) + SENDS_AHEAD, AHEAD_BYTES, looks=False)
    outgoing.room(size, most)
    taken = outgoing.size_bytes if size else 0
    outputs = message(float(size), float(size), 0.0, 0.0, distance=distance, carrier=Carrier.SLOTS)
    both = message(float(size), float(size), float(size), float(size), distance=distance, carrier=Carrier.SLOTS)
    assert outputs.at_sender(most, most).tolist() == [taken + size]
    assert both.at_sender(most, most).tolist() == [taken + 2 * size]
    assert outputs.at_receiver(most, MicroBatches(most, most), 1).tolist() == [0.0]
    assert both.at_receiver(most, MicroBatches(most, most), 1).tolist() == [taken + size]


def test_between_cores_of_several_hosts_the_larger_one_counts() -> None:
    ways = [message(LONG, LONG, 0.0, 0.0, carrier=carrier) for carrier in (Carrier.POSTED, Carrier.SLOTS)]
    either = message(LONG, LONG, 0.0, 0.0, carrier=Carrier.EITHER)
    split = MicroBatches(10, 10)
    assert either.at_sender(10, 10) == max(way.at_sender(10, 10) for way in ways) == 5 * LONG
    assert either.at_receiver(10, split, 1) == max(way.at_receiver(10, split, 1) for way in ways) == 2 * LONG


@pytest.mark.parametrize("number", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("schedule", [name for name, record in SCHEDULES.items() if record.fewest_chunks == 1])
def test_inputs_posted_ahead_come_on_top_of_those_in_flight(schedule, count, number):
    """Those in flight are counted in the lists of actions; where all are kept, what is posted is among them."""
    split = MicroBatches(2 * count + count // 2, count)  # half of them are larger
    actions = make_schedule(schedule, stages=number, micro_batches=count, recompute=(False,) * number)[0]
    change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
    passes = [change.get(action.kind, 0) for action in actions]
    flying = max(itertools.accumulate(passes))
    most = SCHEDULES[schedule].most_under_way(number + 1, count)
    soon = count if SCHEDULES[schedule].keeps_all else min(count, number + min(RECEIVES_AHEAD, most))
    posted = sum(size * LONG for size in split.sizes[flying:soon])
    sent_back = min(SENDS_AHEAD, most) * 7.0 * LONG
    found = at_receiver(
        message(split.largest * LONG, split.smallest * LONG, 7 * LONG, 7 * LONG), schedule, split, number
    )
    assert found.tolist() == [posted + sent_back]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_more_are_under_way_than_micro_batches_in_flight_at_the_earlier_stage(schedule, count, chunks, ranks):
    """Whatever passes take: the receiver may be as late as the order of passes lets it, and the sender as early."""
    record = SCHEDULES[schedule]
    if chunks > record.most_chunks or record.made_for_plan:
        return
    stages, ring = ranks * chunks, Ring(ranks, chunks)
    lists = make_schedule(schedule, stages=stages, micro_batches=count, recompute=(False,) * stages, chunks=chunks)
    counted = most_in_flight(lists)
    for stage in range(stages):
        most = record.most_under_way(stages - stage, count, ring)
        assert most == counted[stage]
        for late in range(stages):
            assert under_way_at_most(lists, stage, late) <= most


def under_way_at_most(lists, stage, late):
    """Messages between a stage and the next, where the rank of one stage waits whenever any other can go on."""
    position, there, most, under_way = [0] * len(lists), set(), 0, {ActionKind.SEND_F: 0, ActionKind.SEND_B: 0}
    ends = {(stage, ActionKind.SEND_F), (stage + 1, ActionKind.SEND_B)}
    while any(at < len(actions) for at, actions in zip(position, lists, strict=True)):
        for rank in sorted(range(len(lists)), key=lambda rank: rank == late % len(lists)):
            if position[rank] == len(lists[rank]):
                continue
            action = lists[rank][position[rank]]
            if action.kind in {ActionKind.RECV_F, ActionKind.RECV_B} and action not in there:
                continue
            position[rank] += 1
            if action.kind in under_way:
                there.add(action.other_end)
                under_way[action.kind] += (action.stage, action.kind) in ends
            elif action in there:
                sent = action.other_end
                under_way[sent.kind] -= (sent.stage, sent.kind) in ends
            most = max(most, *under_way.values())
            break
    return most


def test_what_goes_by_itself_is_no_part_of_it():
    whole = message(10.0, 5.0, 8.0, 4.0)
    left = whole.less([message(4.0, 2.0, 0.0, 0.0), message(2.0, 1.0, 9.0, 1.0)])
    assert [part.tolist() for part in (*left.outputs, *left.gradients)] == [[4.0], [2.0], [0.0], [3.0]]


def test_behind_one_layer():
    behind = Message((np.array([1.0, 2.0]), np.array([3.0, 4.0])), (np.array([5.0, 6.0]), np.array([7.0, 8.0])), 2, 9)
    one = behind.at(1)
    assert [float(part) for part in (*one.outputs, *one.gradients)] == [2.0, 4.0, 6.0, 8.0]
    assert (one.distance, one.ahead_bytes) == (2, 9)
