"""Ranks go on whose devices spin on messages and must be idle now and then; over gloo they train the same so."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import launch
from executor.run.one_order import InOneOrder, in_one_order
from executor.run.rank_order import RECEIVES, SENDS, rank_lists
from planner import Plan
from planner.plan.actions import COMPUTING, Action, ActionKind, Schedule, make_schedule, receives_ahead
from planner.plan.order_text import order_of_text
from profiler import LayerSequence
from profiler.machine.cpu import Cpu
from tests.executor.random_orders import random_orders
from tests.executor.test_rank_order import rank_problems, seconds
from tests.executor.trained_cases import BATCH_SIZE, M, Trained, assert_same, case, traced, train
from tests.fork_server import TRANSPORT


@st.composite
def ranks_with_queues(draw: st.DrawFn) -> tuple[Schedule, dict[Any, int]]:
    """The lists of ranks, and the whole numbers that their passes take."""
    chance = Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        lists: Schedule = rank_lists(*draw(rank_problems()), seconds)
    else:
        chunks, ranks = draw(st.sampled_from([(1, 2), (1, 5), (2, 2), (2, 3), (3, 2)]))
        name = draw(st.sampled_from(["1f1b", "zb-h1", "zb"] if chunks == 1 else ["interleaved", "interleaved-lean"]))
        recompute = draw(st.lists(st.booleans(), min_size=ranks * chunks, max_size=ranks * chunks))
        count = ranks * draw(st.integers(1, 4))
        orders = [order_of_text(text, count) for text in random_orders(ranks, count, chance)] if name == "zb" else None
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


def stuck_at(ranks: Sequence[InOneOrder]) -> list[Action]:
    """Where ranks end whose device must be idle before each pass.

    A send is through when the other end has posted its receive, a receive when the other end has begun to send.
    """
    rank_of = {action.stage: rank for rank, found in enumerate(ranks) for action in found.actions}
    position = [0] * len(ranks)
    begun: list[set[Action]] = [set() for _ in ranks]  # of each rank, by the receives of the messages
    posted: set[Action] = set()
    sent: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, found in enumerate(ranks):
            while position[rank] < len(found.actions):
                action = found.actions[position[rank]]
                now = set(found.posts.get(position[rank], ()))
                posted |= now
                begun[rank] |= now
                if action.kind in COMPUTING:
                    if not begun[rank] <= posted & sent:
                        break
                elif rank_of[action.other_end.stage] != rank:
                    if action.kind in SENDS:
                        sent.add(action.other_end)
                        begun[rank].add(action.other_end)
                    else:
                        assert action in posted
                position[rank] += 1
                moved = True
    return [found.actions[at] for found, at in zip(ranks, position, strict=True) if at < len(found.actions)]


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
        under_way: Counter[tuple[Any, ...]] = Counter()
        most_of_all = max(map(most, remote), default=0)
        for index, action in enumerate(found.actions):
            for one in found.posts.get(index, ()):
                under_way[one.stage, one.kind, one.peer] += 1
            assert action.kind not in COMPUTING or max(under_way.values(), default=0) <= most_of_all
            if action in set(remote):
                under_way[action.stage, action.kind, action.peer] -= 1
        places = {action: index for index, action in enumerate(found.actions)}
        assert all(place <= places[one] for place, ones in found.posts.items() for one in ones)


def test_a_receive_posted_before_what_it_depends_on_holds_up_all() -> None:
    """The first gradient of the middle rank, before its first forward pass has led to any."""
    lists = make_schedule("1f1b", stages=3, micro_batches=4, recompute=[False] * 3)
    ranks = in_order(lists, defaultdict(lambda: 1))
    early = next(action for action in lists[1] if action.kind is ActionKind.RECV_B)
    ranks[1] = InOneOrder(ranks[1].actions, {**ranks[1].posts, 0: [*ranks[1].posts.get(0, ()), early]})
    assert [str(action) for action in stuck_at(ranks)] == ["0F2", "1F0", "2F0"]


def train_in_order(plan: Plan, current: Any) -> Trained:
    Cpu.keeps_order = True  # in a process of its own, before it knows of others
    return train(plan, current, evaluates=True)


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("gpipe", {}), ("1f1b", {"skips": True}), ("interleaved", {"chunks": 2}), ("zb-h1", {"recompute": True})],
)
def test_ranks_train_as_one_process(
    schedule: str,
    settings: dict[str, Any],
    plan_for: Callable[..., Plan],
    inherited: Callable[..., LayerSequence],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with NCCL, each direction on a channel of its own."""
    monkeypatch.setenv(TRANSPORT, "gloo")
    current, sequence = case("gpt"), inherited(traced, "gpt")
    ranks = 2 if "chunks" in settings else 3
    stages = ranks * settings.get("chunks", 1)
    cuts = [len(sequence) * part // stages for part in range(1, stages)]
    given = {"batch_size": BATCH_SIZE, "micro_batches": M}
    alike = "gpipe" if schedule == "gpipe" else "1f1b"
    whole = train(plan_for(sequence, **given, schedule=alike), current, evaluates=True)
    for part in launch(train_in_order, plan_for(sequence, cuts, schedule=schedule, **given, **settings), (current,)):
        assert_same(part, whole)
