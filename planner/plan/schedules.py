"""The schedules that there are: each is one record, and nothing else knows its name.

A record says in which order each stage takes its forward and backward passes, how many micro-batches are then under
way at a stage, and by which form the balancer's search bounds the time of a step. All else follows: the lists of
actions (`planner.plan.actions`), what the simulator and the executor do, the memory of a stage, and the choices of the
command. A schedule of another order is one more record, with `Objective.WORK` if nobody has a tighter form for it: its
plans are listed and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

from profiler.errors import ArgumentError

ScheduleName: TypeAlias = str
"""A key of `SCHEDULES`."""

Order: TypeAlias = tuple[int, ...]
"""The passes of a stage in order: `m` is the forward pass of micro-batch m, `~m` its backward pass."""


class Objective(IntEnum):
    """What the balancer's search minimizes for a schedule, see `planner.kernel.rear`.

    `FLOW_SHOPS` is exact where all forward passes come first and backward passes in reverse order; `ROUNDS` is a lower
    bound for 1F1B; `WORK` is one for any order, from what stages do and how a micro-batch comes to them and back.
    """

    FLOW_SHOPS = 0
    ROUNDS = 1
    WORK = 2


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """One schedule.

    Attributes:
        order: the passes of a stage, for its position, K and M; each micro-batch once forward and, later, once
            backward.
        in_flight: most micro-batches under way at a stage, for its number from the end (1 for the last) and M; None
            if all are, on every stage.
        objective: its closed form, or its bound.
        source: where it was published.
    """

    order: Callable[[int, int, int], Order]
    in_flight: Callable[[int, int], int] | None
    objective: Objective
    source: str

    @property
    def keeps_all(self) -> bool:
        """Whether the inputs of all micro-batches are there when the last one goes forward."""
        return self.in_flight is None

    def most_in_flight(self, number: int, micro_batches: int) -> int:
        """Most micro-batches under way at a stage; `number` is the stage's from the end, 1 for the last."""
        return micro_batches if self.in_flight is None else self.in_flight(number, micro_batches)

    @property
    def last_turns_around(self) -> bool:
        """Whether on the last stage each backward pass follows its forward pass, and nothing is recomputed."""
        return not self.keeps_all and self.order(0, 1, 2) == (0, ~0, 1, ~1)


def _gpipe_order(stage: int, stages: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes in reverse order; alike on all stages."""
    return (*range(micro_batches), *(~number for number in reversed(range(micro_batches))))


def _one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> Order:
    """As many forward passes as there are stages after it, then one forward and one backward pass in turns."""
    ahead = min(stages - 1 - stage, micro_batches)
    turns = 2 * (micro_batches - ahead)
    order = [0] * (2 * micro_batches)
    order[:ahead] = range(ahead)
    order[ahead : ahead + turns : 2] = range(ahead, micro_batches)
    backward = range(-1, -1 - micro_batches, -1)  # ~0, ~1, ...
    order[ahead + 1 : ahead + turns : 2] = backward[: micro_batches - ahead]
    order[ahead + turns :] = backward[micro_batches - ahead :]
    return tuple(order)


SCHEDULES: Mapping[ScheduleName, ScheduleRecord] = {
    "gpipe": ScheduleRecord(_gpipe_order, None, Objective.FLOW_SHOPS, "Huang et al., arXiv 1811.06965, figure 2c"),
    "1f1b": ScheduleRecord(
        _one_f_one_b_order,
        min,
        Objective.ROUNDS,
        "Narayanan et al., arXiv 1806.03377, with the flush of arXiv 2104.04473, figure 3",
    ),
}
DEFAULT_SCHEDULE: ScheduleName = "gpipe"


def known(name: ScheduleName) -> ScheduleName:
    """The name.

    Raises:
        ArgumentError: no schedule has it.
    """
    if name not in SCHEDULES:
        raise ArgumentError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    return name


@lru_cache(maxsize=256)
def stage_orders(name: ScheduleName, stages: int, micro_batches: int) -> tuple[Order, ...]:
    """The passes of every stage in order."""
    order = SCHEDULES[name].order
    return tuple(order(stage, stages, micro_batches) for stage in range(stages))
