"""The order of a rank with several stages, and what may be under way between ranks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.run.rank_order import RECEIVES, SENDS, rank_lists
from planner import ExecutionError
from planner.plan.actions import Action, ActionKind, Schedule, make_schedule, parse_schedule, room_between

SECONDS = {ActionKind.F: 1.0, ActionKind.R: 1.0, ActionKind.B: 2.0}


def seconds(action: Action) -> float:
    return SECONDS[action.kind]


@st.composite
def rank_problems(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    stages, micro_batches = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    name = draw(st.sampled_from(["gpipe", "1f1b"]))
    recompute = draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    drawn = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(drawn))}
    pairs = [(sender, receiver) for sender in range(stages) for receiver in range(sender + 2, stages)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, recompute=recompute, skips=skips)
    return schedule, [numbers[rank] for rank in drawn]


@given(rank_problems())
def test_ranks_that_wait_for_each_other_finish(problem: tuple[Schedule, list[int]]) -> None:
    """Each rank holds its stages' lists in their order, and blind walking ends whoever is fast.

    The oracle is a world in which a send waits while as many messages before it on its way as may be under way are not
    received, and a receive waits for its message; ranks are walked in any order, so none waits for ever.
    """
    schedule, rank_of = problem
    lists = rank_lists(schedule, rank_of, seconds)
    for stage, actions in enumerate(schedule):
        assert tuple(action for action in lists[rank_of[stage]] if action.stage == stage) == actions
    assert sum(map(len, lists)) == sum(map(len, schedule))
    position = [0] * len(lists)
    sent: set[Action] = set()
    under_way: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in RECEIVES:
                    if action not in sent:
                        break
                    under_way[action.other_end.stage, action.stage] -= 1
                elif action.kind in SENDS:
                    receive = action.other_end
                    way = action.stage, receive.stage
                    if under_way[way] >= room_between(*way):
                        break
                    under_way[way] += 1
                    sent.add(receive)
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in lists]


def test_a_rank_prefers_the_stage_that_leads_back() -> None:
    schedule = make_schedule("1f1b", stages=2, micro_batches=2, recompute=[False, False])
    (alone,) = rank_lists(schedule, [0, 0], seconds)
    computed = " ".join(str(action) for action in alone if action.kind in SECONDS)
    assert computed == "0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1"


def test_lists_that_cannot_finish_are_refused() -> None:
    with pytest.raises(ExecutionError, match="waiting for 0RECV_B0, 1RECV_F0"):
        rank_lists(parse_schedule("0RECV_B0 0F0 0SEND_F0\n1RECV_F0 1B0 1SEND_B0"), [0, 1], seconds)
