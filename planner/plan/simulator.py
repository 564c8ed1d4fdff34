"""Simulates a schedule: when every action starts and ends, from the same lists that the executor walks.

    timeline = simulate_plan(plan)
    timeline.makespan_s, timeline.bubble

Each rank is a machine that takes its actions in the order of its list, those of all its stages. Each has one more
machine for each direction that it sends in: its link, which takes messages first in, first out, those that skip stages
after the neighbour's. What one of its stages sends to the next one of its own is there at once. A SEND hands the
message over and costs the sender nothing, unless as many are under way as may be, however long they are
(`planner.plan.actions.room_between`): then it blocks its rank until the receiver takes one. A RECV blocks its rank
until the message has arrived. What the ends of a message copy of it themselves is part of the passes that make and read
it. With two ranks that have several chunks each, outputs and gradients go the same way, and share it.

    stage 0   |F0 |F1 |F2 |                 F, R, B, I, W: the stage computes
    link 0>1      |==0==|==1==|==2==|       from SEND_F (or the message before) on, for the transfer time
    stage 1             |F0 | |F1 | |F2 |   RECV_F holds the stage until the message is complete
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from planner.plan.actions import Action, ActionKind, Schedule, ring_of, room_between
from planner.plan.plan_fields import PlanFields
from planner.plan.schedules import Ring
from profiler.errors import PlanError

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
_Channel: TypeAlias = tuple[int, int, ActionKind]
"""The stages that send and receive, and what is sent."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of every action, indexed by stage and micro-batch: `forward_s[stage][micro_batch]`.

    Passes are with what they copy of messages, and transfers without.

    Attributes:
        forward_s: of F.
        recompute_s: of R.
        backward_s: of B, or of I and W together.
        send_forward_s: of the transfer that SEND_F starts.
        send_backward_s: of the transfer that SEND_B starts.
        skips: by sender and receiver of a message that skips stages: of its SEND_F and its SEND_B by micro-batch.
        weight_s: of W; may be left out where there is none.
    """

    forward_s: tuple[tuple[float, ...], ...]
    recompute_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    send_forward_s: tuple[tuple[float, ...], ...]
    send_backward_s: tuple[tuple[float, ...], ...]
    skips: Mapping[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict, kw_only=True
    )
    weight_s: tuple[tuple[float, ...], ...] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, plan: PlanFields) -> Durations:
        """The seconds that the plan predicts."""
        shares = {(stage, stage + 1): entry.copied for stage, entry in enumerate(plan.stages[:-1])}
        shares.update((skip.ends, skip.copied) for skip in plan.skips)
        return cls._without_copies(plan)._with_copies({ends: both for ends, both in shares.items() if any(both)})

    @classmethod
    def _without_copies(cls, plan: PlanFields) -> Durations:
        """Of passes without copies and of whole messages, as the plan has them."""
        times = [
            [by_size[size] for size in plan.micro_batch_sizes]
            for by_size in ({entry.micro_batch_size: entry for entry in stage.times} for stage in plan.stages)
        ]
        return cls(
            forward_s=tuple(tuple(entry.forward_s for entry in row) for row in times),
            recompute_s=tuple(tuple(entry.recompute_s for entry in row) for row in times),
            backward_s=tuple(tuple(entry.backward_s for entry in row) for row in times),
            send_forward_s=tuple(tuple(entry.send_forward_s for entry in row) for row in times),
            send_backward_s=tuple(tuple(entry.send_backward_s for entry in row) for row in times),
            skips={
                skip.ends: (
                    tuple(skip.times_at(size).send_forward_s for size in plan.micro_batch_sizes),
                    tuple(skip.times_at(size).send_backward_s for size in plan.micro_batch_sizes),
                )
                for skip in plan.skips
            },
            weight_s=tuple(tuple(entry.weight_s for entry in row) for row in times),
        )

    def _with_copies(self, shares: Mapping[tuple[int, int], tuple[float, float]]) -> Durations:
        """The copies as part of the passes.

        Args:
            shares: of messages by sender and receiver of outputs, see `planner.plan.stage.Stage.copied`.
        """
        if not shares:
            return self
        forward, backward, there, back = (
            [[*row] for row in table]
            for table in (self.forward_s, self.backward_s, self.send_forward_s, self.send_backward_s)
        )
        skips = {ends: ([*outputs], [*gradients]) for ends, (outputs, gradients) in self.skips.items()}
        for (sender, receiver), (leaving, coming) in shares.items():
            outputs, gradients = skips.get((sender, receiver)) or (there[sender], back[receiver])
            for micro_batch, (output_s, gradient_s) in enumerate(zip(outputs, gradients, strict=True)):
                forward[sender][micro_batch] += leaving * output_s
                forward[receiver][micro_batch] += coming * output_s
                backward[receiver][micro_batch] += leaving * gradient_s
                backward[sender][micro_batch] += coming * gradient_s
                outputs[micro_batch] -= (leaving + coming) * output_s
                gradients[micro_batch] -= (leaving + coming) * gradient_s
        return replace(
            self,
            forward_s=tuple(map(tuple, forward)),
            backward_s=tuple(map(tuple, backward)),
            send_forward_s=tuple(map(tuple, there)),
            send_backward_s=tuple(map(tuple, back)),
            skips={ends: (tuple(outputs), tuple(gradients)) for ends, (outputs, gradients) in skips.items()},
        )

    def seconds(self, action: Action) -> float:
        """Seconds of an action; of the transfer for a SEND."""
        if action.peer is not None:
            forward = action.kind is ActionKind.SEND_F
            ends = (action.stage, action.peer) if forward else (action.peer, action.stage)
            return self.skips[ends][0 if forward else 1][action.micro_batch]
        match action.kind:
            case ActionKind.F:
                table = self.forward_s
            case ActionKind.R:
                table = self.recompute_s
            case ActionKind.B:
                table = self.backward_s
            case ActionKind.I:
                whole_s = self.backward_s[action.stage][action.micro_batch]
                return whole_s - self.weight_s[action.stage][action.micro_batch]
            case ActionKind.W:
                table = self.weight_s
            case ActionKind.SEND_F:
                table = self.send_forward_s
            case ActionKind.SEND_B:
                table = self.send_backward_s
            case _:
                raise ValueError(f"{action} waits; how long follows from the other stages")
        return table[action.stage][action.micro_batch]


@dataclass(frozen=True, slots=True)
class Event:
    """An action at its place in time.

    Attributes:
        lane: who is busy: `"stage 0"`, or `"link 0>1"` for a transfer; where ranks have several stages `"rank 0"`, and
            links between ranks.
        action: F, R, B, I or W on a stage; the SEND on a link.
        start_s: seconds since the step began.
        end_s: seconds since the step began.
    """

    lane: str
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step, as simulated.

    Attributes:
        events: by lane (ranks in order, then links), in order of time within a lane.
        makespan_s: seconds until the last rank is done with its list.
        idle_s: for each rank the part of the makespan in which it neither computes nor recomputes, nor copies messages.
        optimizer_s: seconds of the slowest rank's all-reduce and optimizer step, which follow the makespan.
    """

    events: tuple[Event, ...]
    makespan_s: float
    idle_s: tuple[float, ...]
    optimizer_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, the optimizer included."""
        return self.makespan_s + self.optimizer_s

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time before the optimizer step: 1 - busy / (ranks * makespan)."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s) if self.makespan_s else 0.0

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes in the order of the events."""
        return tuple(dict.fromkeys(event.lane for event in self.events))


def simulate_plan(plan: PlanFields, *, events: bool = True) -> Timeline:
    """The timeline of a plan's step, with its predicted times; without events it is there sooner."""
    return simulate(
        plan.actions(),
        Durations.of(plan),
        optimizer_s=plan_optimizer_s(plan),
        events=events,
    )


def plan_optimizer_s(plan: PlanFields) -> float:
    """Seconds of the slowest rank's optimizer; where each stage has a list of its own, of the slowest stage's."""
    ends_s = [stage.all_reduce_s + stage.optimizer_s for stage in plan.stages]
    return max(sum(ends_s[stage] for stage in plan.ring.stages_of(rank)) for rank in range(plan.ring.ranks))


def simulate(schedule: Schedule, durations: Durations, *, optimizer_s: float = 0.0, events: bool = True) -> Timeline:
    """Run a schedule in simulated time.

    Args:
        schedule: one list of actions a rank.
        durations: seconds of each action.
        optimizer_s: seconds of the optimizer step at the end, carried into the timeline.
        events: whether the timeline has events.

    Raises:
        PlanError: the lists cannot finish, for a rank waits for a message that is never sent or that waits in turn;
            the message names every waiting stage and what it waits for.
    """
    run = _Run(schedule, durations, notes=events)
    while run.ready:
        run.advance(run.ready.popleft())
    if any(position < len(actions) for position, actions in zip(run.position, schedule, strict=True)):
        raise PlanError(_deadlock_text(schedule, run.position))
    makespan_s = max(run.clock_s)
    ranks = [run.lane(rank) for rank in range(len(schedule))]
    lanes = [*ranks, *sorted(lane for lane in run.events if lane not in ranks)]
    return Timeline(
        events=tuple(event for lane in lanes for event in run.events.get(lane, ())),
        makespan_s=makespan_s,
        idle_s=tuple(max(0.0, makespan_s - busy_s) for busy_s in run.busy_s),
        optimizer_s=optimizer_s,
    )


class _Run:
    """The state of one simulation: a clock and a position for each rank, and messages that arrived and were taken."""

    def __init__(self, schedule: Schedule, durations: Durations, *, notes: bool) -> None:
        ranks = len(schedule)
        self.notes = notes
        self.schedule = schedule
        self.durations = durations
        self.clock_s = [0.0] * ranks
        self.busy_s = [0.0] * ranks
        self.position = [0] * ranks
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.arrival_s: dict[Action, float] = {}
        self.sent: dict[_Channel, int] = defaultdict(int)
        self.taken_s: dict[_Channel, list[float]] = defaultdict(list)
        self.waiting: set[Action] = set()
        self.full: dict[_Channel, int] = {}  # with ranks that wait until there is room
        self.ready = deque(range(ranks))
        self.events: dict[str, list[Event]] = {}
        self.ring = ring_of(schedule)
        self._kind = "rank" if self.ring.chunks > 1 else "stage"

    def lane(self, rank: int) -> str:
        """Where a rank's passes are noted."""
        return f"{self._kind} {rank}"

    def advance(self, rank: int) -> None:
        """Walk the rank's list until it ends, or a message or room for one is missing."""
        actions = self.schedule[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind in _RECEIVES:
                if action not in self.arrival_s:
                    self.waiting.add(action)
                    return
                self._receive(rank, action)
            elif action.kind in _SENDS:
                if not self._has_room(rank, action):
                    return
                self._send(rank, action)
            else:
                self._compute(rank, action)
            self.position[rank] += 1

    def _receive(self, rank: int, action: Action) -> None:
        self.clock_s[rank] = max(self.clock_s[rank], self.arrival_s[action])
        channel = _channel_of(action.other_end)
        self.taken_s[channel].append(self.clock_s[rank])
        if channel in self.full:
            self.ready.append(self.full.pop(channel))

    def _has_room(self, rank: int, send: Action) -> bool:
        """Whether it is known when there is room for a message; the rank's clock is then there."""
        channel = _channel_of(send)
        first = self.sent[channel] - room_between(*channel[:2], self.ring)  # of those before it which has to be taken
        if first < 0 or self.ring.rank_of(channel[1]) == rank:
            return True
        if first >= len(self.taken_s[channel]):
            self.full[channel] = rank
            return False
        self.clock_s[rank] = max(self.clock_s[rank], self.taken_s[channel][first])
        return True

    def _compute(self, rank: int, action: Action) -> None:
        start_s = self.clock_s[rank]
        seconds = self.durations.seconds(action)
        self.clock_s[rank] = start_s + seconds
        self.busy_s[rank] += seconds
        if self.notes:
            self._note(self.lane(rank), action, start_s, start_s + seconds)

    def _send(self, rank: int, action: Action) -> None:
        receive = action.other_end
        receiver = self.ring.rank_of(receive.stage)
        if receiver == rank:
            self.arrival_s[receive] = self.clock_s[rank]
            return
        self.sent[_channel_of(action)] += 1
        link = rank, self.ring.direction(action.stage, forward=action.kind is ActionKind.SEND_F)
        start_s = max(self.clock_s[rank], self.link_free_s.get(link, 0.0))
        end_s = start_s + self.durations.seconds(action)
        self.link_free_s[link] = end_s
        self.arrival_s[receive] = end_s
        if self.notes:
            self._note(f"link {rank}>{receiver}", action, start_s, end_s)
        if receive in self.waiting:
            self.waiting.remove(receive)
            self.ready.append(receiver)

    def _note(self, lane: str, action: Action, start_s: float, end_s: float) -> None:
        self.events.setdefault(lane, []).append(Event(lane, action, start_s, end_s))


def _channel_of(send: Action) -> _Channel:
    return send.stage, send.other_end.stage, send.kind


def _deadlock_text(schedule: Schedule, position: list[int]) -> str:
    """Every waiting rank's stage, what it waits for, and why that does not come."""
    waits = []
    ring = ring_of(schedule)
    for rank, actions in enumerate(schedule):
        if position[rank] == len(actions):
            continue
        waiting = actions[position[rank]]
        awaited = waiting.other_end if waiting.kind in _RECEIVES else _taken_before(actions, position[rank], ring)
        other = ring.rank_of(awaited.stage)
        if awaited in schedule[other]:
            blocker = schedule[other][position[other]]
            reason = f"{awaited}, which stands after {blocker} in the list of stage {blocker.stage}"
        else:
            reason = f"{awaited}, which stands in no list"
        waits.append(f"stage {waiting.stage} waits in {waiting} for {reason}")
    return "the schedule cannot finish: " + "; ".join(waits)


def _taken_before(actions: Sequence[Action], place: int, ring: Ring) -> Action:
    """The RECV that makes room for what is sent there."""
    channel = _channel_of(actions[place])
    before = [action for action in actions[:place] if action.kind in _SENDS and _channel_of(action) == channel]
    return before[-room_between(*channel[:2], ring)].other_end
