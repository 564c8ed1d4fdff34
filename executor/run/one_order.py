"""Sends and receives at such places that ranks go on whose device must be idle now and then.

NCCL's sends and receives are kernels: one spins on its device until the process at the other end has made its call,
too. And a device must be idle for the first call of a kernel, whose code is loaded then, or to free memory. So a rank
may have to wait at any pass for all messages that it has begun. A receive that was posted far ahead of what it depends
on holds it up for ever, as it did with three ranks on an H200 [measured]; so does a send whose receive is not posted.

No rank waits for ever if all begin passes and messages in one order: whatever comes first in it can be done. It is the
order in time, where a message leaves as soon as its pass has ended, or, of more than may be under way, as soon as there
is room:

    rank 0   0F0 0SEND_F0                0F1 0SEND_F1       0RECV_B0 0B0
    rank 1                (post) RECV_F0 1F0        (post)  1B0 1SEND_B0 1RECV_F1 1F1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executor.run.rank_order import RECEIVES
from planner.plan.actions import COMPUTING, Action, ActionKind


@dataclass(frozen=True, slots=True)
class InOneOrder:
    """What a rank does in the order that all ranks follow.

    Attributes:
        actions: in order.
        posts: by index of an action, the receives from other ranks that are posted before it.
    """

    actions: tuple[Action, ...]
    posts: Mapping[int, Sequence[Action]]


@dataclass(slots=True)
class _Channel:
    """Messages from one stage to another one, forward or backward, in their order.

    Attributes:
        most: that may be under way; None for any number.
        sent: the receive at the other end, and since when the message could leave.
        taken: when each was received.
        left: how many have left.
    """

    most: int | None
    sent: list[tuple[Action, int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    left: int = 0

    def leaving(self) -> Iterator[tuple[Action, int]]:
        """Receives whose messages are now known to leave, and when."""
        while self.left < len(self.sent):
            receive, since = self.sent[self.left]
            if self.most is not None and self.left >= self.most:
                if len(self.taken) <= self.left - self.most:
                    return
                since = max(since, self.taken[self.left - self.most])
            self.left += 1
            yield receive, since


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
    leaves, starts = _times(lists, own, ticks, lambda receive: None if _is_local(receive, rank_of) else most(receive))
    after_pass = [0, *(index + 1 for index, action in enumerate(lists[own]) if action.kind in COMPUTING)]
    posts: dict[int, list[Action]] = defaultdict(list)  # by index in the rank's list
    later: dict[int, list[Action]] = defaultdict(list)
    for index, action in enumerate(lists[own]):
        if action.kind in COMPUTING or _is_local(action, rank_of):
            continue
        receives = action.kind in RECEIVES
        place = after_pass[bisect_left(starts, leaves[action if receives else action.other_end])]
        if receives:
            posts[min(place, index)].append(action)
        elif place > index:
            later[place].append(action)
    moved = {action for actions in later.values() for action in actions}
    found: list[Action] = []
    places: dict[int, Sequence[Action]] = {}
    for index in range(len(lists[own]) + 1):
        if index in posts:
            places[len(found)] = posts[index]
        found += later[index]
        found += [action for action in lists[own][index : index + 1] if action not in moved]
    return InOneOrder(tuple(found), places)


def _is_local(action: Action, rank_of: Mapping[int, int]) -> bool:
    return rank_of[action.other_end.stage] == rank_of[action.stage]


def _times(
    lists: Sequence[Sequence[Action]],
    own: int,
    ticks: Callable[[Action], int],
    most: Callable[[Action], int | None],
) -> tuple[dict[Action, int], list[int]]:
    """When each message leaves, by its RECV, and when the passes of one rank start."""
    channels: dict[tuple[int, ActionKind, int | None], _Channel] = {}
    leaves: dict[Action, int] = {}
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
            if receives and action not in leaves:
                waiting[action] = rank
                break
            key = receive.stage, receive.kind, receive.peer
            channel = channels.get(key) or channels.setdefault(key, _Channel(most(receive)))
            if receives:
                clock[rank] = max(clock[rank], leaves[action])
                channel.taken.append(clock[rank])
            else:
                channel.sent.append((receive, clock[rank]))
            for one, when in channel.leaving():
                leaves[one] = when
                if one in waiting:
                    going.append(waiting.pop(one))
            position[rank] += 1
    return leaves, starts
