"""A schedule is data: for each stage the ordered list of actions that its rank carries out.

GPipe with K = 3 stages and M = 4 micro-batches, every stage recomputing; time runs to the right, `F2` is the forward
pass of micro-batch 2, `R2` its recompute, `B2` its backward pass:

    stage 0  F0 F1 F2 F3 R3 ............ B3 R2 B2 R1 B1 R0 B0
    stage 1     F0 F1 F2 F3 R3 ...... B3 R2 B2 R1 B1 R0 B0
    stage 2        F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0
                               ^ the turn-around: nothing stands between the last forward pass of the last stage and
                                 its backward pass, so that one micro-batch is never recomputed

Forward flushes before backward, and the backward phase takes the micro-batches in reverse order. A recompute stands
before the wait for the gradient (`R3`, `RECV_B3`, `B3`), so that it fills the time in which the gradient travels. The
simulator and the executor walk exactly these lists: RECV waits for a message whose receive was posted ahead, SEND
starts a transfer and does not wait for it.

    >>> print(schedule_text(gpipe_schedule(stages=2, micro_batches=2, recompute=(True, False))))
    0F0 0SEND_F0 0F1 0SEND_F1 0R1 0RECV_B1 0B1 0R0 0RECV_B0 0B0
    1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from profiler.errors import ArgumentError

if TYPE_CHECKING:
    from planner.plan import Plan


class ActionKind(StrEnum):
    """What a rank does in one action.

    `F`, `R` and `B` compute; `SEND_F` and `RECV_F` move outputs to the next and from the previous stage, `SEND_B` and
    `RECV_B` move gradients to the previous and from the next stage.
    """

    F = "F"
    R = "R"
    B = "B"
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
_NUMBER = "(0|[1-9][0-9]*)"
_TOKEN = re.compile(f"{_NUMBER}({'|'.join(sorted(ActionKind, key=len, reverse=True))}){_NUMBER}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage with one micro-batch; its text form is one token.

        >>> str(Action(2, ActionKind.F, 0)), Action.parse("1RECV_B3").kind.name
        ('2F0', 'RECV_B')

    Attributes:
        stage: the stage whose rank acts.
        kind: what it does.
        micro_batch: position of the micro-batch in the mini-batch.
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action whose `str` is `text`.

        Raises:
            ArgumentError: `text` is not the token of an action.
        """
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"{text!r} is not an action; expected stage, kind and micro-batch such as 2F0 or 1RECV_B3, "
                f"with a kind of {', '.join(ActionKind)}"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    @property
    def other_end(self) -> Action:
        """The action at the other end of the transfer: the RECV of a SEND and the SEND of a RECV.

        Raises:
            ArgumentError: the action is no transfer.
        """
        if self.kind not in _OTHER_END:
            raise ArgumentError(f"{self} computes; only SEND and RECV have another end")
        kind, step = _OTHER_END[self.kind]
        return Action(self.stage + step, kind, self.micro_batch)


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]


def schedule_text(schedule: Schedule) -> str:
    """The schedule as text, one line a stage, one token an action."""
    return "\n".join(" ".join(str(action) for action in actions) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """The schedule that `schedule_text` wrote.

    Raises:
        ArgumentError: a token is no action, or stands in the line of another stage.
    """
    schedule = tuple(tuple(Action.parse(token) for token in line.split()) for line in text.splitlines())
    for stage, actions in enumerate(schedule):
        for action in actions:
            if action.stage != stage:
                raise ArgumentError(f"action {action} of stage {action.stage} stands in line {stage}, of stage {stage}")
    return schedule


def gpipe_schedule(*, stages: int, micro_batches: int, recompute: tuple[bool, ...]) -> Schedule:
    """The schedule of GPipe (Huang et al., arXiv 1811.06965, figure 2c) as the module's diagram shows it.

    Args:
        stages: K.
        micro_batches: M.
        recompute: for each stage whether it runs its forward pass again before each backward pass.

    Returns:
        One list of actions a stage.

    Raises:
        ArgumentError: there is no stage or no micro-batch, or `recompute` does not have one entry a stage.
    """
    if stages < 1 or micro_batches < 1:
        raise ArgumentError(f"{stages} stages and {micro_batches} micro-batches; a schedule needs at least 1 of both")
    if len(recompute) != stages:
        raise ArgumentError(f"recompute has {len(recompute)} entries for {stages} stages; give one a stage")
    return tuple(tuple(_gpipe_actions(stage, stages, micro_batches, recompute[stage])) for stage in range(stages))


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that the plan runs."""
    return gpipe_schedule(
        stages=plan.K, micro_batches=plan.M, recompute=tuple(bool(stage.recompute) for stage in plan.stages)
    )


def _gpipe_actions(stage: int, stages: int, micro_batches: int, recompute: bool) -> Iterator[Action]:
    first, last = stage == 0, stage == stages - 1
    for number in range(micro_batches):
        if not first:
            yield Action(stage, ActionKind.RECV_F, number)
        yield Action(stage, ActionKind.F, number)
        if not last:
            yield Action(stage, ActionKind.SEND_F, number)
    for number in reversed(range(micro_batches)):
        if recompute and not (last and number == micro_batches - 1):
            yield Action(stage, ActionKind.R, number)
        if not last:
            yield Action(stage, ActionKind.RECV_B, number)
        yield Action(stage, ActionKind.B, number)
        if not first:
            yield Action(stage, ActionKind.SEND_B, number)
