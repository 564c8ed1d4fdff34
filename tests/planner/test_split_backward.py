"""Schedules that split the backward pass: their lists, by hand and by their source's formulas."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.kernel.makespan import makespan_s
from planner.plan.actions import ActionKind, make_schedule, parse_schedule, schedule_text
from planner.plan.schedules import SCHEDULES
from planner.plan.simulator import Durations, simulate
from planner.plan.stage import StageTimes

SPLIT = [name for name, record in SCHEDULES.items() if record.splits_backward]

ZB_H1 = """\
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0I0 0W0 0F3 0SEND_F3 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0W2 0RECV_B3 0I3 0W3
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1R0 1RECV_B0 1I0 1SEND_B0 1RECV_F2 1F2 1SEND_F2 1R1 1RECV_B1 1I1 1SEND_B1 \
1W0 1RECV_F3 1F3 1SEND_F3 1R2 1RECV_B2 1I2 1SEND_B2 1W1 1R3 1RECV_B3 1I3 1SEND_B3 1W2 1W3
2RECV_F0 2F0 2I0 2SEND_B0 2RECV_F1 2F1 2I1 2SEND_B1 2RECV_F2 2F2 2I2 2SEND_B2 2W0 \
2RECV_F3 2F3 2I3 2SEND_B3 2W1 2W2 2W3"""


def test_zb_h1_of_three_stages():
    schedule = make_schedule("zb-h1", stages=3, micro_batches=4, recompute=(False, True, True))
    assert schedule_text(schedule) == ZB_H1
    assert parse_schedule(ZB_H1) == schedule


@pytest.mark.parametrize("name", SPLIT)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_every_micro_batch_has_f_then_i_then_w_and_no_b(name, stages, count, data):
    chunks = SCHEDULES[name].fewest_chunks
    ring = SCHEDULES[name].ring(stages, chunks)
    recompute = data.draw(st.lists(st.booleans(), min_size=ring.stages, max_size=ring.stages))
    schedule = make_schedule(name, stages=ring.stages, micro_batches=count, recompute=recompute, chunks=chunks)
    assert parse_schedule(schedule_text(schedule)) == schedule
    assert [{a.stage for a in actions} for actions in schedule] == [{*ring.stages_of(rank)} for rank in range(stages)]
    for stage in range(ring.stages):
        actions = [action for action in schedule[ring.rank_of(stage)] if action.stage == stage]
        assert len(set(actions)) == len(actions)
        for kind in (ActionKind.F, ActionKind.I, ActionKind.W):
            assert [a.micro_batch for a in actions if a.kind is kind] == [*range(count)]
        assert not [a for a in actions if a.kind is ActionKind.B]
        place = {(a.kind, a.micro_batch): number for number, a in enumerate(actions)}
        for batch in range(count):
            assert place[ActionKind.F, batch] < place[ActionKind.I, batch] < place[ActionKind.W, batch]
            if stage:
                assert place[ActionKind.SEND_B, batch] == place[ActionKind.I, batch] + 1


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 2), (3, 8), (4, 4), (8, 32)])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 1.0, 0.5)])
def test_equal_stages_leave_the_bubble_of_the_paper(stages, count, seconds):
    """Table 2: (p - 1) (T_F + T_B - T_W), for T_W of at most T_F and T_B."""
    forward, inputs, weights = seconds
    rows = np.zeros((6, stages, count))
    rows[0], rows[2], rows[5] = forward, inputs, weights
    bubble = (stages - 1) * (forward + inputs - weights)
    assert makespan_s("zb-h1", rows) == pytest.approx(count * sum(seconds) + bubble)


def test_zb_h1_keeps_what_the_paper_says():
    """Table 2: on worker i of p, from 1, (p - i + 1) M_B + (i - 1) M_W when a forward pass ends."""
    stages, count = 5, 12
    schedule = make_schedule("zb-h1", stages=stages, micro_batches=count, recompute=(False,) * stages)
    for stage, actions in enumerate(schedule):
        flying, waiting, seen = 0, 0, []
        for action in actions:
            flying += (action.kind is ActionKind.F) - (action.kind is ActionKind.I)
            waiting += (action.kind is ActionKind.I) - (action.kind is ActionKind.W)
            if action.kind is ActionKind.F:
                seen.append((flying, waiting))
        assert max(seen) == (stages - stage, stage)


@pytest.mark.parametrize("name", SPLIT)
@given(st.integers(1, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_fast_makespan_equals_the_simulator(name, ranks, count, random):
    chunks = SCHEDULES[name].fewest_chunks
    stages = ranks * chunks
    recompute = [random.random() < 0.5 for _ in range(stages)]
    rows = np.array([[[random.random() for _ in range(count)] for _ in range(stages)] for _ in range(6)])
    rows[1] *= np.array(recompute)[:, None]
    forward, again, inputs, outputs, gradients, weights = (tuple(map(tuple, row.tolist())) for row in rows)
    whole = tuple(tuple(map(sum, zip(*pair, strict=True))) for pair in zip(inputs, weights, strict=True))
    durations = Durations(forward, again, whole, outputs, gradients, weight_s=weights)
    schedule = make_schedule(name, stages=stages, micro_batches=count, recompute=recompute, chunks=chunks)
    assert makespan_s(name, rows, chunks) == pytest.approx(simulate(schedule, durations).makespan_s, rel=1e-12)


@pytest.mark.parametrize("name", SPLIT)
def test_the_makespan_asks_for_seconds_of_w(name):
    with pytest.raises(ValueError, match="of 5 rows none"):
        makespan_s(name, np.ones((5, 2, 2)))


def test_weights_are_a_part_of_the_backward_pass():
    names = ("forward_s", "recompute_s", "backward_s", "send_forward_s", "send_backward_s")
    seconds = dict(zip(names, itertools.repeat(1.0)))
    assert StageTimes(micro_batch_size=1, **seconds).weight_s == 0
    with pytest.raises(ValueError, match=r"weight_s is 1\.5"):
        StageTimes(micro_batch_size=1, weight_s=1.5, **seconds)
