"""Sends and receives at such places that ranks go on whose device does all that it is given in that order.

NCCL's sends and receives are kernels: one spins on its device until the process at the other end has made its call,
too. And a kernel may have to wait for all that the device was given before it, whatever their streams: at its first
call, when its code is loaded, or because a device has only so many queues, and streams share them. So a receive that
was posted far ahead of what it depends on holds up its rank for ever, as it did with three ranks on an H200 [measured];
so does a send whose receive is not posted, and a receive that is posted just before a send, where the other rank does
likewise.

No rank waits for ever if all begin passes and messages in one order: whatever comes first in it can be done. It is the
order in time, where a message leaves as soon as its pass has ended, or, of more than may be under way, as soon as there
is room; of what begins at one time, messages come first, in an order that all ranks know:

    rank 0   0F0 0SEND_F0                0F1 0SEND_F1       0RECV_B0 0B0
    rank 1                (post) RECV_F0 1F0        (post)  1B0 1SEND_B0 1RECV_F1 1F1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from executor.run.rank_order import RECEIVES, SENDS
from planner.plan.actions import COMPUTING, Action


@dataclass(frozen=True, slots=True)
class InOneOrder:
    """What a rank does in the order that all ranks follow.

    Attributes:
        actions: in order.
        posts: by index of an action, the receives from other ranks that are posted before it.
        during: by index of a pass, those of the receives that are posted between it and the next one for which there is
            room while it runs: their messages may leave then.
    """

    actions: tuple[Action, ...]
    posts: Mapping[int, Sequence[Action]]
    during: Mapping[int, Sequence[Action]]


_ChannelKey: TypeAlias = tuple[int, str, int]
_Turn: TypeAlias = tuple[int, _ChannelKey, int]


@dataclass(slots=True)
class _Channel:
    """Messages from one stage to another one, forward or backward, in their order.

    Attributes:
        key: tells channels apart, in an order.
        most: that may be under way; None for any number.
        sent: the receive at the other end, and since when the message could leave.
        taken: when each was received.
        left: how many have left.
    """

    key: _ChannelKey
    most: int | None
    sent: list[tuple[Action, int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    left: int = 0

    def leaving(self) -> Iterator[tuple[Action, _Turn]]:
        """Receives whose messages are now known to leave, and their turns: when, and which comes first of several."""
        while self.left < len(self.sent):
            receive, since = self.sent[self.left]
            if self.most is not None and self.left >= self.most:
                if len(self.taken) <= self.left - self.most:
                    return
                since = max(since, self.taken[self.left - self.most])
            yield receive, (since, self.key, self.left)
            self.left += 1


def in_one_order(
    lists: Sequence[Sequence[Action]],
    own: int,
    ticks: Callable[[Action], int],
    most: Callable[[Action], int | None],
) -> InOneOrder:
    """The actions of one rank.

    Args:
        lists: of all ranks, each in the order in which it computes; they can be carried out.
        own: which of them.
        ticks: how long a pass takes, at least 1; whole numbers, which are the same in all ranks.
        most: of a RECV: how many messages of its channel may be under way; None for any number.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    turns, starts = _times(lists, own, ticks, lambda receive: None if _is_local(receive, rank_of) else most(receive))
    messages: list[list[tuple[_Turn, Action]]] = [[] for _ in range(len(starts) + 1)]  # by the passes before them
    others: list[list[Action]] = [[]]  # likewise, and the pass that ends them
    for action in lists[own]:
        if action.kind in COMPUTING:
            others[-1].append(action)
            others.append([])
            continue
        if _is_local(action, rank_of):
            others[-1].append(action)
            continue
        receives = action.kind in RECEIVES
        turn = turns[action if receives else action.other_end]
        messages[bisect_left(starts, turn[0])].append((turn, action))
        if receives:
            others[-1].append(action)
    found: list[Action] = []
    posts: dict[int, list[Action]] = {}
    during: dict[int, list[Action]] = {}
    taken: Counter[_ChannelKey] = Counter()
    for begun, rest in zip(messages, others, strict=True):
        before = len(found) - 1  # the pass before
        for (_, channel, number), action in sorted(begun):
            if action.kind in SENDS:
                found.append(action)
                continue
            posts.setdefault(len(found), []).append(action)
            room = most(action)
            if before >= 0 and (room is None or number < taken[channel] + room):
                during.setdefault(before, []).append(action)
        taken.update(_channel_of(action) for action in rest if action.kind in RECEIVES)
        found += rest
    return InOneOrder(tuple(found), posts, during)


def _channel_of(receive: Action) -> _ChannelKey:
    return receive.stage, receive.kind.value, -1 if receive.peer is None else receive.peer


def _is_local(action: Action, rank_of: Mapping[int, int]) -> bool:
    return rank_of[action.other_end.stage] == rank_of[action.stage]


def _times(
    lists: Sequence[Sequence[Action]],
    own: int,
    ticks: Callable[[Action], int],
    most: Callable[[Action], int | None],
) -> tuple[dict[Action, _Turn], list[int]]:
    """The turn of each message, by its RECV, and when the passes of one rank start."""
    channels: dict[_ChannelKey, _Channel] = {}
    turns: dict[Action, _Turn] = {}
    waiting: dict[Action, int] = {}  # receives -> their rank
    starts: list[int] = []
    position, clock = [0] * len(lists), [0] * len(lists)
    going = [*range(len(lists))]
    while going:
        rank = going.pop()
        while position[rank] < len(lists[rank]):
            action = lists[rank][position[rank]]
            if action.kind in COMPUTING:
                if rank == own:
                    starts.append(clock[rank])
                clock[rank] += ticks(action)
                position[rank] += 1
                continue
            receives = action.kind in RECEIVES
            receive = action if receives else action.other_end
            if receives and action not in turns:
                waiting[action] = rank
                break
            key = _channel_of(receive)
            channel = channels.get(key) or channels.setdefault(key, _Channel(key, most(receive)))
            if receives:
                clock[rank] = max(clock[rank], turns[action][0])
                channel.taken.append(clock[rank])
            else:
                channel.sent.append((receive, clock[rank]))
            for one, turn in channel.leaving():
                turns[one] = turn
                if one in waiting:
                    going.append(waiting.pop(one))
            position[rank] += 1
    return turns, starts
