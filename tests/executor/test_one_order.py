"""Ranks go on whose devices do one thing at a time and spin on messages; over gloo they train the same so."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import launch
from executor.run.distributed import Distributed
from executor.run.one_order import InOneOrder, in_one_order
from executor.run.rank_order import RECEIVES, SENDS, rank_lists
from planner import Plan
from planner.plan.actions import COMPUTING, Action, ActionKind, Schedule, make_schedule, receives_ahead
from planner.plan.order_text import order_of_text
from planner.plan.schedules import SCHEDULES
from profiler import LayerSequence
from profiler.machine.cpu import Cpu
from tests.executor.random_orders import orders_for
from tests.executor.test_rank_order import rank_problems, seconds
from tests.executor.trained_cases import BATCH_SIZE, M, Trained, assert_same, case, traced, train


@st.composite
def ranks_with_queues(draw: st.DrawFn) -> tuple[Schedule, dict[Any, int]]:
    """The lists of ranks, and the whole numbers that their passes take."""
    chance = Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        lists: Schedule = rank_lists(*draw(rank_problems()), seconds)
    else:
        chunks, ranks = draw(st.sampled_from([(1, 2), (1, 5), (2, 2), (2, 3), (3, 2)]))
        able = [key for key, one in SCHEDULES.items() if one.fewest_chunks <= chunks <= one.most_chunks]
        name = draw(st.sampled_from(able))
        recompute = draw(st.lists(st.booleans(), min_size=ranks * chunks, max_size=ranks * chunks))
        count = ranks * draw(st.integers(1, 4))
        texts = orders_for(name, ranks * chunks, count, chance, chunks)
        orders = [order_of_text(text, count, chunks) for text in texts] or None
        lists = make_schedule(
            name, stages=ranks * chunks, micro_batches=count, recompute=recompute, chunks=chunks, orders=orders
        )
    return lists, defaultdict(lambda: chance.randint(1, 9))


def most(receive: Action) -> int:
    return receives_ahead(abs(receive.other_end.stage - receive.stage))


def in_order(lists: Schedule, ticks: dict[Any, int]) -> list[InOneOrder]:
    for action in (action for actions in lists for action in actions if action.kind in COMPUTING):
        _ = ticks[action.stage, action.kind]  # the same for all ranks
    return [in_one_order(lists, rank, lambda one: ticks[one.stage, one.kind], most) for rank in range(len(lists))]


def calls_of(found: InOneOrder, own: Sequence[int]) -> list[tuple[Action, bool]]:
    """Messages, by their receives, as a rank of these stages begins (False) or waits for (True) them."""
    calls = []
    for index, action in enumerate(found.actions):
        calls += [(one, False) for one in found.posts.get(index, ())]
        if action.kind not in COMPUTING and action.other_end.stage not in own:
            calls.append((action.other_end, False) if action.kind in SENDS else (action, True))
    return calls


def stuck_at(ranks: Sequence[InOneOrder]) -> list[Action]:
    """What is begun and never ends where devices do all that they are given in that order, and hosts wait for receives.

    A message is through when it is the turn of both ends.
    """
    rank_of = {action.stage: rank for rank, found in enumerate(ranks) for action in found.actions}
    left = [
        deque(calls_of(found, [stage for stage, own in rank_of.items() if own == rank]))
        for rank, found in enumerate(ranks)
    ]
    queues: list[deque[Action]] = [deque() for _ in ranks]
    through: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for calls, queue in zip(left, queues, strict=True):
            while calls and (not calls[0][1] or calls[0][0] in through):
                message, waits = calls.popleft()
                queue.extend([] if waits else [message])
                moved = True
        for message in [queue[0] for queue in queues if queue]:
            ends = [queues[rank_of[stage]] for stage in (message.stage, message.other_end.stage)]
            if all(end and end[0] == message for end in ends):
                for end in ends:
                    end.popleft()
                through.add(message)
                moved = True
    return [message for queue in queues for message in queue]


@given(ranks_with_queues())
def test_nobody_waits_for_ever(problem: tuple[Schedule, dict[Any, int]]) -> None:
    lists, ticks = problem
    ranks = in_order(lists, ticks)
    assert stuck_at(ranks) == []
    rank_of = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    for rank, (actions, found) in enumerate(zip(lists, ranks, strict=True)):
        assert Counter(found.actions) == Counter(actions)
        for kinds in (COMPUTING, SENDS, RECEIVES):  # none overtakes another of its channel
            by_channel: dict[Any, list[Action]] = defaultdict(list)
            for action in actions:
                by_channel[None if kinds is COMPUTING else (action.stage, action.kind, action.peer)].append(action)
            for key, own in by_channel.items():
                kept = [action for action in found.actions if action in set(own) and action.kind in kinds]
                assert kept == [action for action in own if action.kind in kinds], key
        posted = [action for place in sorted(found.posts) for action in found.posts[place]]
        remote = [one for one in actions if one.kind in RECEIVES and rank_of[one.other_end.stage] != rank]
        assert Counter(posted) == Counter(remote)
        under_way: Counter[tuple[Any, ...]] = Counter()  # whose memory is taken
        prepared: set[Action] = set()
        most_of_all = max(map(most, remote), default=0)
        for index, action in enumerate(found.actions):
            for one in [*found.posts.get(index, ()), *found.during.get(index, ())]:
                under_way[one.stage, one.kind, one.peer] += one not in prepared
                prepared.add(one)
            assert action.kind not in COMPUTING or max(under_way.values(), default=0) <= most_of_all
            if action in set(remote):
                under_way[action.stage, action.kind, action.peer] -= 1
        places = {action: index for index, action in enumerate(found.actions)}
        assert all(place <= places[one] for place, ones in found.posts.items() for one in ones)
        for place, ones in found.during.items():  # posted between that pass and the next
            assert found.actions[place].kind in COMPUTING
            after = [index for one in ones for index, posted in found.posts.items() if one in posted]
            assert all(action.kind not in COMPUTING for index in after for action in found.actions[place + 1 : index])


def test_a_receive_posted_before_what_it_depends_on_holds_up_all() -> None:
    """The first gradient of the middle rank, before its first forward pass has led to any."""
    lists = make_schedule("1f1b", stages=3, micro_batches=4, recompute=[False] * 3)
    ranks = in_order(lists, defaultdict(lambda: 1))
    early = next(action for action in lists[1] if action.kind is ActionKind.RECV_B)
    ranks[1] = replace(ranks[1], posts={**ranks[1].posts, 0: [*ranks[1].posts.get(0, ()), early]})
    assert early in stuck_at(ranks)


def train_in_order(plan: Plan, current: Any) -> Trained:
    Cpu.keeps_order = True  # in a process of its own, before it knows of others
    with (
        mock.patch.object(Distributed, "prepare", autospec=True, side_effect=Distributed.prepare) as prepared,
        mock.patch.object(Distributed, "post", autospec=True, side_effect=Distributed.post) as posted,
    ):
        found = train(plan, current, evaluates=True, transport="gloo")
    assert prepared.called
    assert posted.called
    return found


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("gpipe", {}), ("1f1b", {"skips": True}), ("interleaved", {"chunks": 2}), ("zb-h1", {"recompute": True})],
)
def test_ranks_train_as_one_process(
    schedule: str,
    settings: dict[str, Any],
    plan_for: Callable[..., Plan],
    inherited: Callable[..., LayerSequence],
) -> None:
    """As with NCCL, each direction on a channel of its own."""
    current, sequence = case("gpt"), inherited(traced, "gpt")
    ranks = 2 if "chunks" in settings else 3
    stages = ranks * settings.get("chunks", 1)
    cuts = [len(sequence) * part // stages for part in range(1, stages)]
    given = {"batch_size": BATCH_SIZE, "micro_batches": M}
    alike = "gpipe" if schedule == "gpipe" else "1f1b"
    whole = train(plan_for(sequence, **given, schedule=alike), current, evaluates=True)
    for part in launch(train_in_order, plan_for(sequence, cuts, schedule=schedule, **given, **settings), (current,)):
        assert_same(part, whole)
