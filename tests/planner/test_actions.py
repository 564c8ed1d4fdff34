import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.actions import Action, ActionKind, make_schedule, parse_schedule, schedule_text
from planner.plan.schedules import SCHEDULES
from profiler.errors import ArgumentError

GOLDEN = """\
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B2 0B2 0R1 0RECV_B1 0B1 0R0 0RECV_B0 0B0
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 \
1RECV_B2 1B2 1SEND_B2 1RECV_B1 1B1 1SEND_B1 1RECV_B0 1B0 1SEND_B0
2RECV_F0 2F0 2RECV_F1 2F1 2RECV_F2 2F2 2B2 2SEND_B2 2R1 2B1 2SEND_B1 2R0 2B0 2SEND_B0"""


def test_gpipe_schedule_of_three_stages():
    schedule = make_schedule("gpipe", stages=3, micro_batches=3, recompute=(True, False, True))
    assert schedule_text(schedule) == GOLDEN


def compute_text(schedule):
    return [" ".join(str(a)[1:] for a in actions if a.kind in ("F", "R", "B")) for actions in schedule]


def test_1f1b_schedule_of_three_stages():
    schedule = make_schedule("1f1b", stages=3, micro_batches=4, recompute=(True, True, True))
    assert compute_text(schedule) == [
        "F0 F1 F2 R0 B0 F3 R1 B1 R2 B2 R3 B3",
        "F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def pairs_that_skip(stages):
    pairs = [(sender, receiver) for sender in range(stages) for receiver in range(sender + 2, stages)]
    return st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([])


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]), st.data())
def test_every_micro_batch_goes_forward_and_back_once_and_in_time(stages, micro_batches, name, data):
    recompute = data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    skips = data.draw(pairs_that_skip(stages))
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, recompute=recompute, skips=skips)
    ways = {(min(a.stage, a.peer), max(a.stage, a.peer)) for actions in schedule for a in actions if a.peer is not None}
    assert ways == set(skips)
    for stage, actions in enumerate(schedule):
        assert len(set(actions)) == len(actions)
        flying, most = 0, 0
        for action in actions:
            flying += (action.kind == "F") - (action.kind == "B")
            most = max(most, flying)
        assert flying == 0
        assert most == SCHEDULES[name].most_in_flight(stages - stage, micro_batches)
        sends = [a for a in actions if a.kind in ("SEND_F", "SEND_B")]
        for other in range(stages):  # in the order in which the other receives
            sent = [a.other_end for a in sends if a.other_end.stage == other]
            receives = [a for a in schedule[other] if a.kind in ("RECV_F", "RECV_B") and a.other_end.stage == stage]
            assert sent == receives
            linked = abs(other - stage) == 1 or tuple(sorted((stage, other))) in skips
            assert len(sent) == (micro_batches if linked else 0)


def test_one_stage_recomputes_all_but_the_last_micro_batch():
    assert schedule_text(make_schedule("gpipe", stages=1, micro_batches=2, recompute=(True,))) == "0F0 0F1 0B1 0R0 0B0"


def test_what_skips_a_stage_comes_after_what_the_neighbours_send():
    schedule = make_schedule("gpipe", stages=3, micro_batches=1, recompute=(False,) * 3, skips=[(0, 2)])
    assert schedule_text(schedule).splitlines() == [
        "0F0 0SEND_F0 0SEND_F0@2 0RECV_B0 0RECV_B0@2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2RECV_F0@0 2F0 2B0 2SEND_B0 2SEND_B0@0",
    ]


@given(st.integers(0, 999), st.sampled_from(ActionKind), st.integers(0, 9999), st.none() | st.integers(0, 999))
def test_action_text_round_trip(stage, kind, micro_batch, peer):
    action = Action(stage, kind, micro_batch, peer if "_" in kind else None)
    assert Action.parse(str(action)) == action


@given(st.data())
def test_schedule_text_round_trip(data):
    stages = data.draw(st.integers(1, 4))
    recompute = tuple(data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages)))
    schedule = make_schedule("gpipe", stages=stages, micro_batches=data.draw(st.integers(1, 6)), recompute=recompute)
    assert parse_schedule(schedule_text(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X0", "00F0", "0F01", "0F0 ", "-1F0", "0recv_b0", "٣F0", "0F0@2", "0SEND_F0@"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ArgumentError, match="is not an action"):
        Action.parse(text)


def test_an_action_in_the_line_of_another_stage_is_refused():
    with pytest.raises(ArgumentError, match="action 0F1 of stage 0 stands in line 1"):
        parse_schedule("0F0\n0F1")


def test_a_transfer_has_two_ends():
    send = Action.parse("1SEND_B3")
    assert str(send.other_end) == "0RECV_B3"
    assert send.other_end.other_end == send
    with pytest.raises(ArgumentError, match="1F0 computes"):
        _ = Action.parse("1F0").other_end


@pytest.mark.parametrize(
    ("stages", "micro_batches", "recompute", "message"),
    [
        (0, 4, (), "0 stages and 4 micro-batches"),
        (1, 0, (True,), "1 stage and 0 micro-batches"),
        (2, 4, (True,), "recompute has 1 entry for 2 stages"),
    ],
)
def test_impossible_schedules_are_refused(stages, micro_batches, recompute, message):
    with pytest.raises(ArgumentError, match=message):
        make_schedule("gpipe", stages=stages, micro_batches=micro_batches, recompute=recompute)


@pytest.mark.parametrize("ends", [(0, 1), (2, 0), (0, 3), (-1, 2)])
def test_skips_over_no_stage_are_refused(ends):
    with pytest.raises(ArgumentError, match=f"stage {ends[0]} cannot skip to stage {ends[1]} of 3"):
        make_schedule("gpipe", stages=3, micro_batches=1, recompute=(False,) * 3, skips=[ends])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ArgumentError, match="schedule 'zero' is none of gpipe, 1f1b"):
        make_schedule("zero", stages=1, micro_batches=1, recompute=[False])
