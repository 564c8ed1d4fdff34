import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.kernel.makespan import makespan_s
from planner.plan.actions import make_schedule, parse_schedule
from planner.plan.simulator import Durations, simulate
from profiler.errors import PlanError

SECONDS = st.floats(0, 10).map(lambda value: round(value, 3))


def constant(rows, micro_batches):
    """Durations of equal micro-batches; a row is (forward, recompute, backward, send forward, send backward)."""
    return Durations(*(tuple((value,) * micro_batches for value in column) for column in zip(*rows, strict=True)))


def closed_form_s(rows, micro_batches):
    """T of `planner.kernel.makespan`."""
    forward, recompute, backward, send, send_back = (list(column) for column in zip(*rows, strict=True))
    links = [*zip(send[:-1], send_back[1:], strict=True)]
    through = sum(forward) + sum(backward) + sum(map(sum, links))
    steady = max([*forward, *(there for there, _ in links)]) + max(
        [*map(sum, zip(backward, recompute, strict=True)), *(back for _, back in links)]
    )
    return through + (micro_batches - 1) * steady


def test_a_small_pipeline_by_hand():
    #  time      0   1   2   3   4   5   6   7   8   9
    #  stage 0   F0  F1  .   .   .   .   B1  R0  B0         (B1 can start at 6, after B1 and 1 s on the link)
    #  stage 1   .   .   F0  F1  B1  B0
    schedule = make_schedule("gpipe", stages=2, micro_batches=2, recompute=(True, False))
    timeline = simulate(schedule, constant([(1, 1, 1, 1, 0), (1, 0, 1, 0, 1)], 2), optimizer_s=0.5)
    starts = {str(event.action): event.start_s for event in timeline.events}
    assert starts == {
        "0F0": 0, "0F1": 1, "0B1": 6, "0R0": 7, "0B0": 8,
        "1F0": 2, "1F1": 3, "1B1": 4, "1B0": 5,
        "0SEND_F0": 1, "0SEND_F1": 2, "1SEND_B1": 5, "1SEND_B0": 6,
    }  # fmt: skip
    assert (timeline.makespan_s, timeline.step_s, timeline.idle_s) == (9, 9.5, (4, 5))
    assert timeline.bubble == pytest.approx(9 / 18)
    assert timeline.lanes == ("stage 0", "stage 1", "link 0>1", "link 1>0")


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5), st.data())
def test_closed_form_equals_the_simulator_for_equal_micro_batches(rows, data):
    recompute = tuple(data.draw(st.booleans()) for _ in rows)
    rows = [(f, r if again else 0.0, b, c, d) for (f, r, b, c, d), again in zip(rows, recompute, strict=True)]
    micro_batches = data.draw(st.integers(1, 9))
    schedule = make_schedule("gpipe", stages=len(rows), micro_batches=micro_batches, recompute=recompute)
    expected_s = simulate(schedule, constant(rows, micro_batches)).makespan_s
    assert closed_form_s(rows, micro_batches) == pytest.approx(expected_s, rel=1e-9, abs=1e-9)


def test_the_last_micro_batch_forward_is_not_recomputed_anywhere():
    rows = [(1.0, 50.0, 1.0, 0.0, 0.0), (1.0, 0.0, 1.0, 0.0, 0.0)]
    assert closed_form_s(rows, 1) == 4.0


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_fast_makespan_equals_the_simulator_for_any_durations(name, stages, micro_batches, random):
    recompute = tuple(random.random() < 0.5 for _ in range(stages))
    tables = np.array([[[random.random() for _ in range(micro_batches)] for _ in range(stages)] for _ in range(5)])
    tables[1] *= np.array(recompute)[:, None]
    durations = Durations(*(tuple(map(tuple, table.tolist())) for table in tables))
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, recompute=recompute)
    assert makespan_s(name, tables) == pytest.approx(simulate(schedule, durations).makespan_s, rel=1e-12)


def test_a_deadlock_names_who_waits_for_what():
    schedule = parse_schedule("0F0 0RECV_B0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(PlanError) as caught:
        simulate(schedule, constant([(1, 0, 1, 1, 1)] * 2, 1))
    assert str(caught.value) == (
        "the schedule cannot finish: "
        "stage 0 waits in 0RECV_B0 for 1SEND_B0, which stands after 1RECV_F0 in the list of stage 1; "
        "stage 1 waits in 1RECV_F0 for 0SEND_F0, which stands after 0RECV_B0 in the list of stage 0"
    )


def test_a_message_that_nobody_sends_is_named():
    with pytest.raises(PlanError, match=r"stage 1 waits in 1RECV_F0 for 0SEND_F0, which stands in no list$"):
        simulate(parse_schedule("0F0\n1RECV_F0 1F0"), constant([(1, 0, 1, 1, 1)] * 2, 1))


def test_transfers_queue_on_their_link_and_do_not_hold_the_sender():
    schedule = make_schedule("gpipe", stages=2, micro_batches=3, recompute=(False, False))
    timeline = simulate(schedule, constant([(1, 0, 1, 10, 0), (1, 0, 1, 0, 0)], 3))
    spans = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert [spans[f"0F{m}"] for m in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [spans[f"0SEND_F{m}"] for m in range(3)] == [(1, 11), (11, 21), (21, 31)]


def test_messages_that_skip_stages_wait_for_the_neighbours():
    """A stage sends to all others over one link."""
    schedule = make_schedule("gpipe", stages=3, micro_batches=1, recompute=(False,) * 3, skips=[(0, 2)])
    ones, none = ((1.0,),) * 3, ((0.0,),) * 3
    skips = {(0, 2): ((4.0,), (8.0,))}
    timeline = simulate(schedule, Durations(ones, none, ones, ((2.0,),) * 3, ((2.0,),) * 3, skips=skips))
    spans = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert spans["0SEND_F0"] == (1.0, 3.0)
    assert spans["0SEND_F0@2"] == (3.0, 7.0)
    assert spans["2F0"] == (7.0, 8.0)
    assert spans["2SEND_B0@0"] == (11.0, 19.0)
    assert timeline.makespan_s == 20.0
    assert {"link 0>2", "link 2>0"} <= set(timeline.lanes)


def test_a_rank_waits_for_room_for_what_it_sends():
    """With four messages under way, however long they are: the fifth leaves when the first is taken."""
    count = 7
    schedule = make_schedule("gpipe", stages=2, micro_batches=count, recompute=(False, False))
    timeline = simulate(schedule, constant([(1, 0, 1, 0, 0), (10, 0, 1, 0, 0)], count))
    ends = {str(event.action): event.end_s for event in timeline.events}
    assert [ends[f"0F{batch}"] for batch in range(count)] == [1, 2, 3, 4, 5, 6, 12]
    assert [ends[f"0SEND_F{batch}"] for batch in range(count)] == [1, 2, 3, 4, 5, 11, 21]


def test_who_waits_for_room_for_ever_is_named():
    sends = " ".join(f"0F{batch} 0SEND_F{batch}" for batch in range(5))
    schedule = parse_schedule(f"{sends} 0SEND_B0\n1RECV_B0 " + " ".join(f"1RECV_F{batch}" for batch in range(5)))
    with pytest.raises(PlanError) as caught:
        simulate(schedule, constant([(1, 0, 1, 1, 1)] * 2, 5))
    assert "stage 0 waits in 0SEND_F4 for 1RECV_F0, which stands after 1RECV_B0 in the list of stage 1" in str(
        caught.value
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_makespan_has_waits_for_room(seed):
    """One stage in seven is slow, and of 8 ranks with two chunks the lean order waits anyway."""
    chance = random.Random(seed)
    name, chunks = chance.choice([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved-lean", 2), ("zb-h1", 1)])
    ranks, count = chance.randint(2, 8), chance.randint(6, 24)
    stages = ranks * chunks
    slow = np.array([chance.choice([1.0] * 6 + [20.0]) for _ in range(stages)])[:, None]
    tables = np.array([[[chance.random() for _ in range(count)] for _ in range(stages)] for _ in range(6)])
    tables[[0, 2, 5]] *= slow
    tables[1] = 0.0
    tables[2] += tables[5]  # of the whole backward pass
    *rest, weights = (tuple(map(tuple, table.tolist())) for table in tables)
    schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=[False] * stages, chunks=chunks)
    said_s = simulate(schedule, Durations(*rest, weight_s=weights)).makespan_s
    if name == "zb-h1":
        tables[2] -= tables[5]
    assert makespan_s(name, tables, chunks) == pytest.approx(said_s, rel=1e-12)
    with mock.patch("planner.plan.simulator.room_between", lambda *_: count):
        assert simulate(schedule, Durations(*rest, weight_s=weights)).makespan_s <= said_s * (1 + 1e-12)
