"""The plan: what runs where, in which order, and what that is predicted to cost. Torch-free, JSON in and out.

A plan is the only thing that passes from the planner to the executor.

    plan = Plan.load("plan.json")
    print(plan)                      # one screen: stages, times, memory
    plan.stages[1].module_paths      # what the second stage holds
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from planner.plan.actions import Schedule, make_schedule
from planner.plan.first_format import in_later_form
from planner.plan.order_text import order_of_text
from planner.plan.prediction import Prediction
from planner.plan.schedules import (
    MOST_CHUNKS,
    SCHEDULE_OF_OLD_PLANS,
    SCHEDULES,
    Ring,
    ScheduleName,
    known,
)
from planner.plan.stage import Skip, Stage, StageMemory
from planner.plan.unused import Unused
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError, PlanFileError
from profiler.field_types import Samples
from profiler.quantities import MOST_DEVICES, MOST_MICRO_BATCHES
from profiler.sample_spec import SampleSpec
from profiler.value import Value, first_missing, read_file, write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    import pandas
    from torch import nn

    from planner.export.target import Export
    from planner.keywords import SettingKeywords
    from planner.plan.explanation import Explanation
    from planner.refine import Refined
    from profiler.device import Cluster, Device
    from profiler.record import Profile

PLAN_SCHEMA_VERSION: Final = 2
_MADE_FROM: Final = "made_from_profile"
_MADE_FOR: Final = "made_for_cluster"


class Plan(Value):
    """A pipeline-parallel training plan. K is `len(plan.stages)`, M is `len(plan.micro_batch_sizes)`.

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

    file_kind: ClassVar[str] = "plan"
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
    shard_optimizer: bool = False
    optimizer: str
    stages: tuple[Stage, ...] = Field(min_length=1)
    skips: tuple[Skip, ...] = ()
    prediction: Prediction
    rank_memories: tuple[StageMemory, ...] = ()
    unused: Unused | None = None
    interrupted: bool = False

    @model_serializer(mode="wrap")
    def _without_what_files_leave_out(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name in ("interrupted", "shard_optimizer", "rank_memories"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields

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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from planner.plan.contradictions import check_plan

        check_plan(self)
        return self

    @fits_its_arguments
    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically; equal plans give equal bytes."""
        write_atomically(path, self.to_json())

    @classmethod
    @fits_its_arguments
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote.

        Raises:
            PlanFileError: the file is missing, cut off, or holds no plan of this or an earlier version; the message
                gives the JSON path of the first thing that is wrong.
        """
        from planner.plan.contradictions import contradicting_figures

        given = read_file(path, "plan", PlanFileError)
        text = in_later_form(given)
        plan = cls.parse_json(text, source=str(path), error=PlanFileError)
        missing = first_missing(plan.model_dump(mode="json"), json.loads(text)) if text == given else None
        if missing is not None:
            raise PlanFileError(f"{path}: {missing}: is missing, and files do not leave it out; save the plan anew")
        contradiction = contradicting_figures(plan)
        if contradiction is not None:
            raise PlanFileError(f"{path}: $: {contradiction}; save the plan anew")
        return plan

    # What follows asks a higher floor, when it is called and not before.

    def to_frame(self) -> pandas.DataFrame:
        """One row a stage: layers, device, parameters, times of the largest micro-batch, bytes by class.

        Seconds are in columns that end in `_s`, bytes in columns that end in `_bytes`.
        """
        from planner.plan.report import plan_frame

        return plan_frame(self)

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from, if that was in this process; it is in no file and goes to no other process."""
        return self.__dict__.get(_MADE_FROM)

    @property
    def cluster(self) -> Cluster | None:
        """The devices and links that it was made for, likewise; with the limits of memory that were given."""
        return self.__dict__.get(_MADE_FOR)

    def made_from(self, profile: Profile, cluster: Cluster) -> Self:
        """This plan, which knows its profile and its cluster from now on."""
        self.__dict__[_MADE_FROM] = profile  # no fields: two plans are equal whoever knows their profile
        self.__dict__[_MADE_FOR] = cluster
        return self

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name not in (_MADE_FROM, _MADE_FOR)}
        return {**state, "__dict__": kept}

    @fits_its_arguments
    def explain(self, profile: Profile | None = None, devices: Cluster | Sequence[Device] | None = None) -> Explanation:
        """Why these cuts: three sentences, and busy times, bottlenecks and limits of each stage.

        With the profile, which a plan made in this process knows itself, also what others would cost.

        See `planner.explain.explain`.
        """
        from planner.explain import explain

        return explain(self, profile, devices)

    @fits_its_arguments
    def refined(
        self,
        measured: pandas.DataFrame,
        profile: Profile | None = None,
        devices: Cluster | Sequence[Device] | None = None,
        **settings: Unpack[SettingKeywords],
    ) -> Refined:
        """Plan again with what `Pipeline.measured()` saw, and say whether that is worth a change.

        See `planner.refine.refined`.
        """
        from planner.refine import refined

        return refined(self, measured, profile, devices, **settings)

    @fits_its_arguments
    def compare(self, other: Plan) -> pandas.DataFrame:
        """This plan and another side by side, one row a quantity."""
        from planner.explain import compare

        return compare(self, other)

    @fits_its_arguments
    def export(self, target: str, model: nn.Module, *, profile: Profile | None = None) -> Export:
        """This plan for another engine, such as `"torch.distributed.pipelining"`; see `planner.export.export`.

        Where cuts must move to the borders of modules, the export says what that costs; what the engine would train
        wrongly is refused with the reason.

        Args:
            target: a key of `planner.export.export.TARGETS`.
            model: that the plan was made for.
            profile: what the plan was made from, which a plan made in this process knows itself; for cuts that move.
        """
        from planner.export.export import export

        return export(self, target, model, profile=profile)

    def memory_over_time(self) -> pandas.DataFrame:
        """Predicted bytes of every stage during a step; see `planner.explain.memory_over_time`."""
        from planner.explain import memory_over_time

        return memory_over_time(self)

    def __repr__(self) -> str:
        from planner.plan.report import plan_report

        return plan_report(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from planner.plan.html import plan_html

        return plan_html(self)
