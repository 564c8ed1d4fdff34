"""One list of actions for a rank that runs several stages.

Each stage has its own list, but for the chunks of a schedule that has several a rank: they share one, whose order says
when each has its turn. A rank carries out one action at a time. In which order it takes the lists is decided
beforehand, in simulated time, so that every rank knows what the others will do: carried out in the order in which a
simulation went through, no list can wait for ever.

    stage 0   F0 SEND_F0 F1 SEND_F1 ...          rank 0   0F0 0SEND_F0 0F1 ... 2RECV_F0 2F0 2SEND_F0 ...
    stage 2   RECV_F0 F0 SEND_F0 ...     ---->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.plan.actions import Action, ActionKind, Schedule, ring_of, room_between
from profiler.errors import ExecutionError

RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})


def rank_lists(
    schedule: Schedule, rank_of: Sequence[int], seconds: Callable[[Action], float]
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in the order in which it carries them out.

    Of several stages that can go on a rank takes the last one, which leads to the backward pass and frees memory. A
    message waits for its turn if as many before it as may be under way have not been received, as it will between
    processes.

    Args:
        schedule: one list a stage, or one for the chunks of a rank.
        rank_of: the rank of each list.
        seconds: of the actions that compute.

    Raises:
        ExecutionError: the lists cannot be carried out.
    """
    ranks = 1 + max(rank_of)
    stages_of = [[stage for stage in reversed(range(len(schedule))) if rank_of[stage] == rank] for rank in range(ranks)]
    position = [0] * len(schedule)
    clock = [0.0] * ranks
    available: dict[Action, float] = {}  # receives whose message was sent -> since when
    received: dict[Action, float] = {}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    blockers = _blockers(schedule)

    def start_of(action: Action) -> float | None:
        """When the message is there, or there is room for one more."""
        if action.kind in RECEIVES:
            return available.get(action)
        blocker = blockers.get(action)
        return 0.0 if blocker is None else received.get(blocker)

    left = sum(len(actions) for actions in schedule)
    while left:
        best: tuple[float, int, int] | None = None
        for rank in range(ranks):
            for preference, stage in enumerate(stages_of[rank]):
                if position[stage] < len(schedule[stage]):
                    since = start_of(schedule[stage][position[stage]])
                    if since is not None:
                        candidate = (max(since, clock[rank]), preference, stage)
                        best = candidate if best is None or candidate < best else best
        if best is None:
            heads = [actions[at] for actions, at in zip(schedule, position, strict=True) if at < len(actions)]
            raise ExecutionError(f"the schedule cannot go on: waiting for {', '.join(map(str, heads))}")
        start, _, stage = best
        rank = rank_of[stage]
        action = schedule[stage][position[stage]]
        if action.kind in SENDS:
            available[action.other_end] = start
        elif action.kind in RECEIVES:
            received[action] = start
        clock[rank] = start + (0.0 if action.kind in SENDS or action.kind in RECEIVES else seconds(action))
        lists[rank].append(action)
        position[stage] += 1
        left -= 1
    return tuple(tuple(actions) for actions in lists)


def _blockers(schedule: Schedule) -> dict[Action, Action]:
    """For each SEND the receive that must have been carried out before, if any; none of one from a list to itself."""
    found: dict[Action, Action] = {}
    ring = ring_of(schedule)
    for actions in schedule:
        own = {action.stage for action in actions}
        by_channel: dict[tuple[int, ActionKind, int | None], list[Action]] = {}
        for action in actions:
            if action.kind in SENDS and action.other_end.stage not in own:
                by_channel.setdefault((action.stage, action.kind, action.peer), []).append(action)
        for sends in by_channel.values():
            room = room_between(sends[0].stage, sends[0].other_end.stage, ring)
            for earlier, later in zip(sends, sends[room:], strict=False):
                found[later] = earlier.other_end
    return found
