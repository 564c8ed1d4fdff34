"""What messages under way take of memory, by hand and against the lists of actions."""

import itertools

import numpy as np
import pytest

from planner.cost.messages import Message
from planner.plan.actions import (
    AHEAD_BYTES,
    RECEIVES_AHEAD,
    SENDS_AHEAD,
    ActionKind,
    make_schedule,
    receives_ahead,
)
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import SCHEDULES
from profiler.machine.ring import Outgoing

LONG = float(AHEAD_BYTES)  # so long that only as many are under way as must be


def message(large, small, gradient_large, gradient_small, **about):
    outputs, gradients = (
        (np.array([large]), np.array([small])),
        (np.array([gradient_large]), np.array([gradient_small])),
    )
    return Message(outputs, gradients, **about)


def test_a_sender_has_outputs_that_have_not_left_and_gradients_posted_and_read():
    """Of ten large messages two are on their way out, two posted for gradients, and one is read."""
    found = message(LONG, LONG, 3 * LONG, 3 * LONG).at_sender(MicroBatches(20, 10))
    assert found.tolist() == [SENDS_AHEAD * LONG + (RECEIVES_AHEAD + 1) * 3 * LONG]


def test_no_more_are_under_way_than_there_are():
    assert message(LONG, LONG, LONG, LONG).at_sender(MicroBatches(2, 1)).tolist() == [2 * LONG]


def test_of_short_messages_as_many_are_under_way_as_the_bytes_hold():
    """A quarter of the bytes ahead: four are sent ahead, and four gradients posted with one that is read."""
    short = LONG / 4
    assert message(short, short, short, short).at_sender(MicroBatches(40, 20)).tolist() == [(4 + 5) * short]
    assert message(short, short, short, short, ahead_bytes=0).at_sender(MicroBatches(40, 20)).tolist() == [
        (2 + 3) * short
    ]


def test_the_smaller_ones_say_how_many_and_the_larger_ones_how_long():
    """Micro-batches of two sizes: as many as of the small ones fit ahead, each as long as a large one."""
    outputs, split = message(LONG, LONG / 4, 0.0, 0.0), MicroBatches(30, 20)
    assert outputs.at_sender(split).tolist() == [4 * LONG]
    assert outputs.at_receiver("1f1b", split, 1).tolist() == [4 * LONG]


def test_a_message_over_several_stages_is_posted_so_much_earlier():
    """Its sender leads by a micro-batch a stage."""
    near, far = (message(LONG, LONG, LONG, LONG, distance=distance) for distance in (1, 3))
    assert (far.at_sender(MicroBatches(20, 10)) - near.at_sender(MicroBatches(20, 10))).tolist() == [2 * LONG]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [2**20 + 64, 2**21, 2**21 + 64, 3 * 2**20, 2**23])
def test_slots_of_long_messages_are_counted_to_the_byte(size: int, count: int) -> None:
    """What a ring takes as the executor makes it; with GPipe two messages were in no count."""
    outgoing = Outgoing(receives_ahead(1) + SENDS_AHEAD, AHEAD_BYTES, looks=False)
    outgoing.room(size)
    taken = sum(slot.memory.nbytes for slot in outgoing._slots)
    outputs, split = message(float(size), float(size), 0.0, 0.0), MicroBatches(count, count)
    assert float((outputs.at_sender(split) + outputs.in_slots(split))[0]) == taken


def test_slots_of_short_messages_are_among_those_that_are_sent_ahead() -> None:
    assert message(2.0**20, 2.0**20, 0.0, 0.0).in_slots(MicroBatches(40, 20)).tolist() == [0.0]


@pytest.mark.parametrize("number", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_posted_ahead_come_on_top_of_those_in_flight(schedule, count, number):
    """Those in flight are counted in the lists of actions; where all are kept, what is posted is among them."""
    split = MicroBatches(2 * count + count // 2, count)  # half of them are larger
    actions = make_schedule(schedule, stages=number, micro_batches=count, recompute=(False,) * number)[0]
    change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
    passes = [change.get(action.kind, 0) for action in actions]
    flying = max(itertools.accumulate(passes))
    soon = count if SCHEDULES[schedule].keeps_all else min(count, number + RECEIVES_AHEAD)
    posted = sum(size * LONG for size in split.sizes[flying:soon])
    sent_back = min(SENDS_AHEAD, count) * 7.0 * LONG
    found = message(split.largest * LONG, split.smallest * LONG, 7 * LONG, 7 * LONG).at_receiver(
        schedule, split, number
    )
    assert found.tolist() == [posted + sent_back]


def test_what_goes_by_itself_is_no_part_of_it():
    whole = message(10.0, 5.0, 8.0, 4.0)
    left = whole.less([message(4.0, 2.0, 0.0, 0.0), message(2.0, 1.0, 9.0, 1.0)])
    assert [part.tolist() for part in (*left.outputs, *left.gradients)] == [[4.0], [2.0], [0.0], [3.0]]


def test_behind_one_layer():
    behind = Message((np.array([1.0, 2.0]), np.array([3.0, 4.0])), (np.array([5.0, 6.0]), np.array([7.0, 8.0])), 2, 9)
    one = behind.at(1)
    assert [float(part) for part in (*one.outputs, *one.gradients)] == [2.0, 4.0, 6.0, 8.0]
    assert (one.distance, one.ahead_bytes) == (2, 9)
