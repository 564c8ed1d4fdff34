"""The plan: what runs where, in which order, and what that is predicted to cost. Torch-free, JSON in and out.

A plan is the only thing that passes from the planner to the executor.

    plan = Plan.load("plan.json")
    print(plan)                      # one screen: stages, times, memory
    plan.stages[1].module_paths      # what the second stage holds
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import model_validator

from planner.plan.contradictions import check_plan, contradicting_figures
from planner.plan.earlier_formats import in_later_form
from planner.plan.plan_fields import PlanFields
from profiler.arguments import fits_its_arguments
from profiler.errors import PlanFileError
from profiler.value import first_missing, read_file, write_atomically

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

_MADE_FROM: Final = "made_from_profile"
_MADE_FOR: Final = "made_for_cluster"


class Plan(PlanFields):
    """A pipeline-parallel training plan. K is `len(plan.stages)`, M is `len(plan.micro_batch_sizes)`.

    Its fields are in `planner.plan.plan_fields.PlanFields`.
    """

    file_kind: ClassVar[str] = "plan"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
        given = read_file(path, "plan", PlanFileError)
        text = in_later_form(given)
        plan = cls.parse_json(text, source=str(path), error=PlanFileError)
        said = json.loads(text)
        of_today = json.loads(given).get("schema_version") == said.get("schema_version")
        missing = first_missing(plan.model_dump(mode="json"), said) if of_today else None
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
    def export(
        self,
        target: str,
        model: nn.Module,
        *,
        profile: Profile | None = None,
        devices: Cluster | Sequence[Device] | None = None,
    ) -> Export:
        """This plan for another engine, such as `"torch.distributed.pipelining"`; see `planner.export.export`.

        Where cuts must move to the borders of modules, the export says what that costs; what the engine would train
        wrongly is refused with the reason.

        Args:
            target: a key of `planner.export.export.TARGETS`.
            model: that the plan was made for.
            profile: what the plan was made from, which a plan made in this process knows itself; for cuts that move.
            devices: what it was made for, likewise.
        """
        from planner.export.export import export

        return export(self, target, model, profile=profile, devices=devices)

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
