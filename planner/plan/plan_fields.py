"""What a plan says: its fields, and what follows from them with no other value. Who may read only that is here."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from operator import not_
from typing import Final, Literal

from pydantic import Field, field_validator

from planner.plan.actions import Schedule, make_schedule
from planner.plan.order_text import order_of_text
from planner.plan.prediction import Prediction
from planner.plan.schedules import MOST_CHUNKS, SCHEDULE_OF_OLD_PLANS, SCHEDULES, Ring, ScheduleName, known
from planner.plan.stage import Skip, Stage, StageMemory
from planner.plan.unused import Unused
from profiler.errors import ArgumentError
from profiler.field_types import Index, Samples
from profiler.quantities import MOST_DEVICES, MOST_MICRO_BATCHES
from profiler.sample_spec import SampleSpec
from profiler.value import Value

PLAN_SCHEMA_VERSION: Final = 2


class PlanFields(Value):
    """The fields of a `planner.plan.plan.Plan`.

    Attributes:
        schema_version: of this format; `load` reads earlier ones as well, and a later one is refused.
        model_fingerprint: of the traced model; the executor refuses any other model.
        profile_fingerprint: of the profile that the predictions come from.
        sample: what the model is called with.
        batch_size: samples of a mini-batch, over all replicas.
        micro_batch_sizes: samples of each micro-batch of one replica in order; replica r takes samples
            `[r * n, (r + 1) * n)` of the mini-batch with `n = batch_size / replicas`, which they add up to.
        schedule: order of the passes on each stage, one of `planner.plan.schedules.SCHEDULES`.
        orders: the passes of each rank as letters, F, I and W, and f, i and w of its second chunk, of a schedule that
            each plan has its own of; micro-batches take each of them in order.
        replicas: R, pipelines side by side; their gradients are averaged at the end of the step.
        positions: by rank, where in the list of devices of several hosts its device of each replica is, ascending.
            Processes are numbered in the order of their devices; without, the ranks of a replica after each other.
            Files leave it out where nothing is said of hosts.
        devices_per_host: so many devices after each other in that list are in one host; left out likewise.
        shard_optimizer: whether the replicas share the optimizer's state, each stepping a part of every stage's
            parameters (ZeRO, stage 1), by `planner.plan.shares`. Files leave it out where they do not.
        optimizer: class name of the optimizer that the predictions assume.
        chunks: stages a rank, of a schedule that has several; each stage names its rank.
        stages: in pipeline order.
        skips: what goes past stages, one entry for each pair of ends; all else is sent from neighbour to neighbour.
        prediction: step time and how good the plan is.
        rank_memories: predicted peak bytes of each rank on its device, where ranks have several chunks: at the moment
            of its passes at which all its chunks together need most. Files may leave them out, then each chunk counts
            with its own peak.
        unused: devices that stay idle, and a faster plan that a rule forbids; None if there is neither.
        interrupted: whether the search was ended from the keyboard, and this is the best plan so far. Files leave it
            out where it is not.
    """

    schema_version: Literal[2] = PLAN_SCHEMA_VERSION
    model_fingerprint: str
    profile_fingerprint: str
    sample: SampleSpec
    batch_size: Samples
    micro_batch_sizes: tuple[Samples, ...] = Field(min_length=1, max_length=MOST_MICRO_BATCHES)
    schedule: ScheduleName = SCHEDULE_OF_OLD_PLANS
    chunks: int = Field(default=1, gt=0, le=MOST_CHUNKS)
    orders: tuple[str, ...] = ()
    replicas: int = Field(default=1, gt=0, le=MOST_DEVICES)
    positions: tuple[tuple[Index, ...], ...] = Field(default=(), exclude_if=not_)
    devices_per_host: int | None = Field(default=None, ge=1, le=MOST_DEVICES, exclude_if=not_)
    shard_optimizer: bool = Field(default=False, exclude_if=not_)
    optimizer: str
    stages: tuple[Stage, ...] = Field(min_length=1)
    skips: tuple[Skip, ...] = ()
    prediction: Prediction
    rank_memories: tuple[StageMemory, ...] = Field(default=(), exclude_if=not_)
    unused: Unused | None = None
    interrupted: bool = Field(default=False, exclude_if=not_)

    @property
    def K(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def M(self) -> int:
        """Number of micro-batches of one replica."""
        return len(self.micro_batch_sizes)

    def actions(self, micro_batches: int | None = None) -> Schedule:
        """The lists of actions of one replica's step; with other than M micro-batches where given.

        One list a stage, or one a rank where ranks have several chunks.
        """
        count = self.M if micro_batches is None else micro_batches
        return make_schedule(
            self.schedule,
            stages=self.K,
            micro_batches=count,
            recompute=[bool(stage.recompute) for stage in self.stages],
            skips=[skip.ends for skip in self.skips],
            chunks=self.chunks,
            orders=[order_of_text(text, count, self.chunks) for text in self.orders],
        )

    @property
    def ranks(self) -> int:
        """Processes of one replica; `ranks * replicas` of them train together."""
        return 1 + max(stage.rank for stage in self.stages)

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """By rank the process that runs it in each replica, of all that train together."""
        ranks, replicas = self.ranks, self.replicas
        rows = self.positions or [range(rank, ranks * replicas, ranks) for rank in range(ranks)]
        process_at = {position: process for process, position in enumerate(sorted(chain.from_iterable(rows)))}
        return tuple(tuple(process_at[position] for position in row) for row in rows)

    @property
    def processes_by_host(self) -> dict[int, int]:
        """How many processes each host runs, in their order; empty where the plan says nothing of hosts."""
        per_host = self.devices_per_host
        if per_host is None:
            return {}
        return dict(Counter(position // per_host for position in sorted(chain.from_iterable(self.positions))))

    @property
    def ring(self) -> Ring:
        """Which list of actions is of which stages: one list a stage, or one a rank where ranks have several chunks."""
        return SCHEDULES[self.schedule].ring(self.K // self.chunks, self.chunks)

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """What a rank runs, in pipeline order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def rank_memory(self, rank: int) -> StageMemory:
        """Predicted peak bytes of a rank on its device: of all its chunks, one of which computes at a time."""
        if self.rank_memories:
            return self.rank_memories[rank]
        memories = [stage.memory for stage in self.stages_of(rank)]
        return StageMemory(
            **{
                name: (max if name == "transient" else sum)(getattr(memory, name) for memory in memories)
                for name in StageMemory.model_fields
            }
        )

    @property
    def device_memories(self) -> tuple[StageMemory, ...]:
        """Of each stage, or of each rank where ranks have several chunks: on the device of the stage of that number."""
        if self.chunks == 1:
            return tuple(stage.memory for stage in self.stages)
        return tuple(self.rank_memory(rank) for rank in range(self.ranks))

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        try:
            return known(name)
        except ArgumentError as problem:
            raise ValueError(str(problem)) from problem
