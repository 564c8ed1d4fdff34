"""A schedule is data: for each rank the ordered list of actions that it carries out.

GPipe with K = 3 stages and M = 4 micro-batches, every stage recomputing; time runs to the right, `F2` is the forward
pass of micro-batch 2, `R2` its recompute, `B2` its backward pass:

    stage 0  F0 F1 F2 F3 .............. B3 R2 B2 R1 B1 R0 B0
    stage 1     F0 F1 F2 F3 ........ B3 R2 B2 R1 B1 R0 B0
    stage 2        F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0

Forward flushes before backward, and the backward phase takes the micro-batches in reverse order. 1F1B with the same K
and M: stage k has at most K - k micro-batches under way, so it keeps less, and the backward passes come in the order
of the forward passes:

    stage 0  F0 F1 F2 R0 ......... B0 F3 R1 ... B1 R2 ... B2 R3 ... B3
    stage 1     F0 F1 R0 ... B0 F2 R1 ... B1 F3 R2 ... B2 R3 ... B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3

ZB-H1 splits the backward pass: `I` makes the gradients of the inputs, which the stage before waits for, and `W` those
of the parameters, which fill what 1F1B leaves idle at the end of the step:

    stage 0  F0 F1 F2 ...... I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3
    stage 1     F0 F1 ... I0 F2 I1 W0 F3 I2 W1 .. I3 W2 W3
    stage 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

A recompute stands before the wait for the gradient (`R2`, `RECV_B2`, `B2`), so that it fills the time in which the
gradient travels. Where no other pass stands between the forward and the backward pass of a micro-batch, its activations
are kept and there is nothing to recompute. The simulator and the executor walk exactly these lists: RECV waits for a
message whose receive was posted ahead, SEND starts a transfer and does not wait for it, but for room for one more.

A rank has one stage, or several chunks: stages that it runs in the order of one list (`planner.plan.schedules`). Then
there is one list a rank, and its actions are of several stages.

Messages go to the neighbour. One that skips stages names the other end: `0SEND_F1@2` sends what stage 2 reads of stage
0, past stage 1, and `2RECV_F1@0` waits for it.

    >>> print(schedule_text(make_schedule("gpipe", stages=2, micro_batches=2, recompute=(True, False))))
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0R0 0RECV_B0 0B0
    1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from planner.plan.orders import Order, PassKind, pass_of
from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring, ScheduleName, check_chunks, known, rank_orders
from profiler.errors import ArgumentError
from profiler.text import counted

# Messages of one boundary and direction that are under way at once: at least this many receives are posted ahead, and
# at least as many sends may be incomplete before a sender waits; of short messages as many more as these bytes hold.
RECEIVES_AHEAD = 2
SENDS_AHEAD = 2
AHEAD_BYTES = 4 * 2**20
# Of a ring in shared memory, as `profiler.machine.ring` makes it, which needs torch: slots at most, and bytes that the
# size of each is a multiple of.
MOST_SLOTS, SLOT_ALIGNMENT = 64, 64


def receives_ahead(distance: int, ring: Ring = ONE_CHUNK) -> int:
    """How many receives are posted ahead at least, of messages that go over so many stages.

    Their sender leads by one micro-batch a stage. With fewer it would wait for the receiver, and with 1F1B and many
    stages between the two could wait for each other.

    Where chunks go round and round the ranks, a rank sends all that one of its chunks makes of a group of micro-batches
    while the next rank is at another chunk. With 4 messages 8 ranks stood still for ever with M = 23, 16 of them with
    many M, and those that went on took 3 to 6 % longer in the lean order. With half as many as ranks and one more all
    finish, and with 3 for each 4 ranks none takes longer [found for 2 to 16 ranks, 2 to 4 chunks, M from 1 to 49, and
    backward passes of 1 to 3 times the forward passes].
    """
    round_and_round = ring.chunks > 1 and not ring.folds
    least = -(-3 * ring.ranks // 4) - SENDS_AHEAD if round_and_round else 0
    return max(RECEIVES_AHEAD, least) + distance - 1


def room_between(stage: int, other: int, ring: Ring = ONE_CHUNK) -> int:
    """Messages from one stage to another that may be under way, however long they are.

    With so many a rank that sends one more waits until the first of them is taken.
    """
    return SENDS_AHEAD + receives_ahead(abs(other - stage), ring)


class ActionKind(StrEnum):
    """What a rank does in one action.

    `F`, `R` and `B` compute. In a schedule that splits the backward pass, `I` (gradients of the inputs) and `W` (of the
    parameters) stand in the place of `B`. `SEND_F` and `RECV_F` move outputs to the next and from the previous stage,
    `SEND_B` and `RECV_B` move gradients to the previous and from the next stage.
    """

    F = "F"
    R = "R"
    B = "B"
    I = "I"  # noqa: E741 - the letter of the papers
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


_OTHER_END = {
    ActionKind.SEND_F: (ActionKind.RECV_F, +1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, +1),
}
COMPUTING = frozenset(ActionKind) - _OTHER_END.keys()
"""What a rank does itself; the others move messages."""
_NUMBER = "(0|[1-9][0-9]*)"
_TOKEN = re.compile(
    f"{_NUMBER}({'|'.join(sorted(ActionKind, key=len, reverse=True))}){_NUMBER}(?:@{_NUMBER})?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage with one micro-batch; its text form is one token.

        >>> str(Action(2, ActionKind.F, 0)), Action.parse("1RECV_B3").kind.name
        ('2F0', 'RECV_B')

    Attributes:
        stage: the stage whose rank acts.
        kind: what it does.
        micro_batch: position of the micro-batch in the mini-batch.
        peer: of a transfer that skips stages, the stage at its other end; None for a neighbour.
    """

    stage: int
    kind: ActionKind
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}" + ("" if self.peer is None else f"@{self.peer}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action whose `str` is `text`.

        Raises:
            ArgumentError: `text` is not the token of an action.
        """
        match = _TOKEN.fullmatch(text)
        kind = ActionKind(match[2]) if match else None
        if match is None or kind is None or (match[4] and kind not in _OTHER_END):
            raise ArgumentError(
                f"{text!r} is not an action; expected stage, kind and micro-batch such as 2F0, 1RECV_B3 or, of a "
                f"transfer that skips stages, 0SEND_F1@2, with a kind of {', '.join(ActionKind)}"
            )
        return cls(int(match[1]), kind, int(match[3]), int(match[4]) if match[4] else None)

    @property
    def other_end(self) -> Action:
        """The action at the other end of the transfer: the RECV of a SEND and the SEND of a RECV.

        Raises:
            ArgumentError: the action is no transfer.
        """
        if self.kind not in _OTHER_END:
            raise ArgumentError(f"{self} computes; only SEND and RECV have another end")
        kind, step = _OTHER_END[self.kind]
        if self.peer is not None:
            return Action(self.peer, kind, self.micro_batch, self.stage)
        return Action(self.stage + step, kind, self.micro_batch)


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""One list of actions a rank; which stages these are of says `planner.plan.schedules.Ring`."""


def ring_of(schedule: Schedule) -> Ring:
    """Which rank runs which stages."""
    ranks, stages = len(schedule), 1 + max((action.stage for actions in schedule for action in actions), default=0)
    folds = ranks > 1 and any(action.stage == ranks for action in schedule[-1])
    return Ring(ranks, -(-stages // ranks), folds)


def schedule_text(schedule: Schedule) -> str:
    """The schedule as text, one line a rank, one token an action."""
    return "\n".join(" ".join(str(action) for action in actions) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """The schedule that `schedule_text` wrote.

    Raises:
        ArgumentError: a token is no action, or stands in the line of another rank.
    """
    schedule = tuple(tuple(Action.parse(token) for token in line.split()) for line in text.splitlines())
    ring = ring_of(schedule)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if ring.rank_of(action.stage) != rank:
                raise ArgumentError(
                    f"action {action} of stage {action.stage} stands in line {rank} of {len(schedule)}, which is for "
                    f"rank {rank}, and belongs in line {ring.rank_of(action.stage)}"
                )
    return schedule


def make_schedule(
    name: ScheduleName,
    *,
    stages: int,
    micro_batches: int,
    recompute: Sequence[bool],
    skips: Sequence[tuple[int, int]] = (),
    chunks: int = 1,
    orders: Sequence[Order] | None = None,
) -> Schedule:
    """The lists of actions of a schedule.

    Args:
        name: one of `planner.plan.schedules.SCHEDULES`; the module's diagrams show two.
        stages: K.
        micro_batches: M.
        recompute: for each stage whether it recomputes a segment before each backward pass.
        skips: pairs of stages, not neighbours, of which the first sends to the second past those between.
        chunks: stages a rank.
        orders: the passes of each rank, of a schedule that each plan has its own of.

    Returns:
        One list of actions a rank.

    Raises:
        ArgumentError: there is no such schedule, no stage or no micro-batch, `recompute` does not have one entry a
            stage, or the schedule is not for so many chunks.
    """
    check_chunks(known(name), stages, chunks)
    if stages < 1 or micro_batches < 1:
        raise ArgumentError(
            f"{counted(stages, 'stage')} and {counted(micro_batches, 'micro-batch')}; a schedule needs at least "
            "1 of both"
        )
    if len(recompute) != stages:
        raise ArgumentError(
            f"recompute has {counted(len(recompute), 'entry')} for {counted(stages, 'stage')}; give one a stage"
        )
    for sender, receiver in skips:
        if not 0 <= sender < receiver - 1 < stages - 1:
            raise ArgumentError(f"stage {sender} cannot skip to stage {receiver} of {stages}: none lies between them")
    record, ranks = SCHEDULES[name], stages // chunks
    ring = record.ring(ranks, chunks)
    peers = [_Peers.of(stage, stages, skips) for stage in range(stages)]
    back = ActionKind.I if record.splits_backward else ActionKind.B
    return tuple(
        tuple(
            _with_transfers(
                order,
                micro_batches,
                back,
                [recompute[stage] for stage in ring.stages_of(rank)],
                [peers[stage] for stage in ring.stages_of(rank)],
            )
        )
        for rank, order in enumerate(orders or rank_orders(name, ranks, micro_batches, chunks))
    )


def most_in_flight(schedule: Schedule) -> dict[int, int]:
    """Of each stage, how many micro-batches have gone forward and not yet back, at most.

    No more messages of one kind can be under way between it and a later stage: their order forbids it.
    """
    change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in (action for actions in schedule for action in actions):
        now[action.stage] = now.get(action.stage, 0) + change.get(action.kind, 0)
        most[action.stage] = max(most.get(action.stage, 1), now[action.stage])
    return most


@dataclass(frozen=True, slots=True)
class _Peers:
    """Which stages a stage receives outputs from, and which it sends them to; None stands for the neighbour."""

    stage: int
    before: tuple[int | None, ...]
    after: tuple[int | None, ...]

    @classmethod
    def of(cls, stage: int, stages: int, skips: Sequence[tuple[int, int]]) -> _Peers:
        before = [None] if stage else []
        after = [None] if stage < stages - 1 else []
        return cls(
            stage,
            (*before, *sorted(sender for sender, receiver in skips if receiver == stage)),
            (*after, *sorted(receiver for sender, receiver in skips if sender == stage)),
        )


def _with_transfers(
    order: Order, micro_batches: int, back: ActionKind, recompute: Sequence[bool], peers: Sequence[_Peers]
) -> Iterator[Action]:
    """The passes with recompute before the wait for a gradient, unless the micro-batch has just gone forward.

    Args:
        order: of a rank.
        micro_batches: M.
        back: what a backward pass is: B, or I where W is a pass of its own.
        recompute: for each chunk of the rank.
        peers: of each chunk.
    """
    before: tuple[PassKind, int, int] | None = None
    for number in order:
        one_pass = kind, chunk, batch = pass_of(number, micro_batches, len(peers))
        own = peers[chunk]
        if kind is PassKind.WEIGHTS:
            yield Action(own.stage, ActionKind.W, batch)
            before = one_pass
            continue
        forward = kind is PassKind.FORWARD
        if not forward and recompute[chunk] and before != (PassKind.FORWARD, chunk, batch):
            yield Action(own.stage, ActionKind.R, batch)
        for peer in own.before if forward else own.after:
            yield Action(own.stage, ActionKind.RECV_F if forward else ActionKind.RECV_B, batch, peer)
        yield Action(own.stage, ActionKind.F if forward else back, batch)
        for peer in own.after if forward else own.before:
            yield Action(own.stage, ActionKind.SEND_F if forward else ActionKind.SEND_B, batch, peer)
        before = one_pass
