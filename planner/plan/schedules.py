"""The schedules that there are: each is one record, and nothing else knows its name.

A record says in which order each rank takes its forward and backward passes, how many micro-batches are then under
way at a stage, and by which form the balancer's search bounds the time of a step. All else follows: the lists of
actions (`planner.plan.actions`), what the simulator and the executor do, the memory of a stage, and the choices of the
command. A schedule of another order is one more record, with `Objective.WORK` if nobody has a tighter form for it: its
plans are listed and simulated.

A rank runs one stage, or with v chunks a rank v of them, and a micro-batch passes all ranks v times forward and v times
back (`Ring`). Two ranks with two chunks each, M = 2; `F0` is the forward pass of micro-batch 0:

    rank 0   stages 0, 2    0F0 0F1 2F0 2F1 ... 2B0 2B1 ... 0B0 ... 0B1
    rank 1   stages 1, 3        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from planner.plan.held import Held, Moment, moments_of, most_under_way
from planner.plan.orders import (
    Order,
    gpipe_order,
    interleaved_order,
    one_by_one_order,
    one_f_one_b_order,
    zb_h1_order,
)
from profiler.errors import ArgumentError

ScheduleName: TypeAlias = str
"""A key of `SCHEDULES`."""


class Ring(NamedTuple):
    """Which rank runs which stages: chunk c of a rank is one of the stages from c * ranks on.

        round and round     rank 0   stages 0, 3      folded     rank 0   stages 0, 5
                            rank 1   stages 1, 4                 rank 1   stages 1, 4
                            rank 2   stages 2, 5                 rank 2   stages 2, 3

    Where there is one chunk a rank and no backward pass is split, the number of ranks makes no difference to what a
    stage holds and may be left out.

    >>> Ring(3, 2).stages_of(0), Ring(3, 2, folds=True).stages_of(0), Ring(3, 2, folds=True).rank_of(3)
    ((0, 3), (0, 5), 2)

    Attributes:
        ranks: over how many the stages go.
        chunks: of each rank.
        folds: whether every second chunk goes back over the ranks, in a V, and not round them. Then the stage after
            such a turn is on the rank of the one before it, which sends it no message.
    """

    ranks: int = 1
    chunks: int = 1
    folds: bool = False

    @property
    def stages(self) -> int:
        """K."""
        return self.ranks * self.chunks

    def over(self, stages: int) -> Ring:
        """The same over as many ranks as so many stages need."""
        return self._replace(ranks=stages // self.chunks)

    def rank_of(self, stage: int) -> int:
        """Where a stage runs."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self._goes_back(chunk) else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """What a rank runs, in pipeline order."""
        return tuple(
            chunk * self.ranks + (self.ranks - 1 - rank if self._goes_back(chunk) else rank)
            for chunk in range(self.chunks)
        )

    def is_turn(self, stage: int) -> bool:
        """Whether the next stage is on the same rank."""
        return self.rank_of(stage) == self.rank_of(stage + 1)

    def direction(self, stage: int, *, forward: bool) -> int:
        """Over which link a stage sends: 0 to the rank after its own, or 1; of two ranks there is one for all."""
        return 0 if self.ranks == TWO else int(not self._goes_up(stage, forward=forward))

    def lower_end(self, stage: int, *, forward: bool) -> int:
        """Of what a stage sends, and comes to one rank up or down, the lower rank; the last is below the first."""
        rank = self.rank_of(stage)
        return rank if self._goes_up(stage, forward=forward) else (rank - 1) % self.ranks

    def _goes_up(self, stage: int, *, forward: bool) -> bool:
        return forward != self._goes_back(stage // self.ranks)

    def _goes_back(self, chunk: int) -> bool:
        return self.folds and chunk % 2 == 1


TWO = 2
"""Ranks of which each is before and after the other."""


ONE_CHUNK = Ring()


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
        order: the passes of a rank, for its position, the number of ranks, M and the chunks a rank; each micro-batch
            once forward and, later, once backward in every chunk. Where the backward pass is split, micro-batches go
            backward in order, and so do the passes of their weights, each later than its backward pass.
        in_flight: most micro-batches under way at a stage if it is its rank's only one, for its number from the end (1
            for the last) and M; None if all are, on every stage.
        objective: its closed form, or its bound.
        source: where it was published.
        most_chunks: chunks that a rank may have, at most.
        fewest_chunks: and at least.
        splits_backward: whether the gradients of the parameters have passes of their own.
        folds: whether its chunks go over the ranks and back, see `Ring`.
        made_for_plan: whether each plan has orders of its own, found from what its stages take and may hold; `order` is
            then one that any plan could have.
        elsewhere: by other engines that have it, what it is called there; the keys are names of `planner.export`.
    """

    order: Callable[[int, int, int, int], Order]
    in_flight: Callable[[int, int], int] | None
    objective: Objective
    source: str
    most_chunks: int = 1
    fewest_chunks: int = 1
    splits_backward: bool = False
    folds: bool = False
    made_for_plan: bool = False
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def ring(self, ranks: int, chunks: int) -> Ring:
        """Which rank runs which stages."""
        return Ring(ranks, chunks, self.folds and chunks > 1)

    @property
    def keeps_all(self) -> bool:
        """Whether the inputs of all micro-batches are there when the last one goes forward."""
        return self.in_flight is None

    def most_in_flight(self, number: int, micro_batches: int, ring: Ring = ONE_CHUNK) -> int:
        """Most micro-batches under way at a stage.

        Args:
            number: of the stage from the end, 1 for the last.
            micro_batches: M.
            ring: ranks, and chunks of each; where there are several, the passes are counted.
        """
        if ring.chunks > 1:
            stage = ring.stages - number
            by_chunk = most_under_way(self.order, ring.rank_of(stage), ring.ranks, micro_batches, ring.chunks)
            return by_chunk[stage // ring.ranks]
        return micro_batches if self.in_flight is None else self.in_flight(number, micro_batches)

    def most_under_way(self, number: int, micro_batches: int, ring: Ring = ONE_CHUNK) -> int:
        """Most messages of one kind between a stage and a later one: what is under way is in flight at the first.

        Its outputs are of micro-batches that have left it, and gradients of such as have not come back to it.

        Args:
            number: of the first one from the end; of none that there is, as of the first stage.
            micro_batches: M.
            ring: ranks, and chunks of each.
        """
        if self.made_for_plan:
            return micro_batches
        return self.most_in_flight(min(number, ring.stages) if ring.chunks > 1 else number, micro_batches, ring)

    def held(self, number: int, micro_batches: int, ring: Ring = ONE_CHUNK) -> tuple[Held, ...]:
        """What a stage holds at the moments at which it may need most memory; see `most_in_flight` and `moments_of`."""
        if not self.splits_backward:
            return (Held(self.most_in_flight(number, micro_batches, ring)),)
        if ring.chunks > 1:
            stage = ring.stages - number
            chunk, moments = stage // ring.ranks, self.moments(ring.rank_of(stage), micro_batches, ring)
            return tuple(held[chunk] for computing, held in moments if computing == chunk)
        ranks = max(ring.ranks, number)  # where the ring is not said, the stage is the first one
        return tuple(held for _, (held,) in moments_of(self.order, ranks - number, ranks, micro_batches, 1))

    def moments(self, rank: int, micro_batches: int, ring: Ring) -> tuple[Moment, ...]:
        """What the chunks of a rank hold at the moments at which they may need most memory together.

        >>> moments = SCHEDULES["interleaved"].moments(1, 8, Ring(2, 2))
        >>> [(chunk, [one.flying for one in held]) for chunk, held in moments if held[0].kind.name == "BACKWARD"]
        [(0, [3, 0]), (1, [2, 1])]
        """
        if ring.chunks == 1:
            return tuple((0, (held,)) for held in self.held(ring.ranks - rank, micro_batches, ring))
        return moments_of(self.order, rank, ring.ranks, micro_batches, ring.chunks)

    @property
    def last_turns_around(self) -> bool:
        """Whether on the last stage each backward pass follows its forward pass, and nothing is recomputed."""
        return not self.keeps_all and self.order(0, 1, 2, 1) == (0, 2, 1, 3)


MOST_CHUNKS = 64
"""Chunks a rank at most [chosen]: far more than pay, as each sends its messages."""
SCHEDULES: Mapping[ScheduleName, ScheduleRecord] = {
    "gpipe": ScheduleRecord(
        gpipe_order,
        None,
        Objective.FLOW_SHOPS,
        "Huang et al., arXiv 1811.06965, figure 2c",
        elsewhere={"torchgpipe": "GPipe", "torchtitan": "GPipe"},
    ),
    "1f1b": ScheduleRecord(
        one_f_one_b_order,
        min,
        Objective.ROUNDS,
        "Narayanan et al., arXiv 1806.03377, with the flush of arXiv 2104.04473, figure 3",
        elsewhere={
            "torchtitan": "1F1B",
            "deepspeed": "TrainSchedule",
            "megatron-lm": "forward_backward_pipelining_without_interleaving",
        },
    ),
    "interleaved": ScheduleRecord(
        interleaved_order(lead=2),
        min,
        Objective.ROUNDS,
        "Narayanan et al., arXiv 2104.04473, section 2.2; with one chunk it is 1f1b",
        MOST_CHUNKS,
        elsewhere={"megatron-lm": "forward_backward_pipelining_with_interleaving"},
    ),
    "interleaved-lean": ScheduleRecord(
        interleaved_order(lead=1),
        min,
        Objective.ROUNDS,
        "the same with the lead of 1F1B, and so with its memory, if the ranks divide M (or M is smaller); ours",
        MOST_CHUNKS,
    ),
    "zb-h1": ScheduleRecord(
        zb_h1_order,
        min,
        Objective.WORK,
        "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1, figure 2",
        splits_backward=True,
    ),
    "zb": ScheduleRecord(
        zb_h1_order,
        min,
        Objective.WORK,
        "after Qi et al., arXiv 2401.10241, sections 3 and 4: as far ahead as memory allows (ZB-H2 at its upper end)",
        splits_backward=True,
        made_for_plan=True,
    ),
    "zb-v": ScheduleRecord(
        one_by_one_order,
        min,
        Objective.WORK,
        "after Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: two chunks a rank, in a V, "
        "as far ahead as memory allows (V-ZB with that of 1F1B, V-half with half of it)",
        most_chunks=TWO,
        fewest_chunks=TWO,
        splits_backward=True,
        folds=True,
        made_for_plan=True,
    ),
}
SCHEDULE_OF_OLD_PLANS: ScheduleName = "gpipe"
"""Of plans that do not say which they have."""


def known(name: ScheduleName) -> ScheduleName:
    """The name.

    Raises:
        ArgumentError: no schedule has it.
    """
    if name not in SCHEDULES:
        raise ArgumentError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    return name


def schedules_of(engine: str) -> tuple[ScheduleName, ...]:
    """Those that another engine has, too.

    >>> schedules_of("megatron-lm")
    ('1f1b', 'interleaved')
    """
    return tuple(name for name, record in SCHEDULES.items() if engine in record.elsewhere)


def split_schedules() -> tuple[ScheduleName, ...]:
    """Those that are for one stage a rank and split the backward pass."""
    return tuple(name for name, record in SCHEDULES.items() if record.most_chunks == 1 and record.splits_backward)


def chunk_schedules() -> tuple[ScheduleName, ...]:
    """Those that may have several chunks a rank, or must."""
    return tuple(name for name, record in SCHEDULES.items() if record.most_chunks > 1)


def one_chunk_schedules() -> tuple[ScheduleName, ...]:
    """Those that are for one stage a rank and no more, and do not split the backward pass."""
    return tuple(name for name, record in SCHEDULES.items() if record.most_chunks == 1 and not record.splits_backward)


@lru_cache(maxsize=256)
def rank_orders(name: ScheduleName, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[Order, ...]:
    """The passes of every rank in order."""
    order = SCHEDULES[name].order
    return tuple(order(rank, ranks, micro_batches, chunks) for rank in range(ranks))


def check_chunks(name: ScheduleName, stages: int, chunks: int) -> None:
    """Refuse so many chunks a rank.

    Raises:
        ArgumentError: the schedule has no order for them, or they do not divide the number of stages.
    """
    fewest, most = SCHEDULES[name].fewest_chunks, SCHEDULES[name].most_chunks
    if not fewest <= chunks <= most:
        able = ", ".join(map(repr, chunk_schedules()))
        has = f"exactly {most}" if fewest == most > 1 else f"at most {most}"
        raise ArgumentError(f"chunks is {chunks}, and schedule {name!r} has {has} a rank; several are for {able}")
    if stages % chunks:
        raise ArgumentError(
            f"{stages} stages are not {chunks} chunks for each rank; give a multiple of {chunks} stages"
        )
