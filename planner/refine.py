"""The closed loop: what a training run measured goes back into the profile, and the plan is made again.

    refined = plan.refined(pipe.measured())
    print(refined)                              # is it worth a change?
    plan = refined.plan                         # only then

What a stage took, as a ratio to what was predicted, holds for each of its layers on that kind of device; layers that
did not run on a kind of device have the ratio of all that ran on it. Messages do the same to the link, and so to the
all-reduce that goes over it. All is scaled by how much longer a step takes than its passes explain: they scatter, and
the executor's own code takes time. What was not seen (the optimizer, links that nobody waited for) stays as it was.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isclose
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from planner.cost.layer_costs import fingerprint_of
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from planner.plan.simulator import simulate_plan
from planner.plan.stage import SkipTimes, Stage, StageTimes
from planner.plan.units import seconds_text
from planner.planned_for import planned_for, problem_of, refuse_other_links
from planner.rules import start_of
from planner.settings import MICRO_BATCHES_PER_STAGE
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, ForeignPlanError
from profiler.record import LayerCost, Profile
from profiler.text import counted

if TYPE_CHECKING:
    from typing import Unpack

    import pandas

    from planner.keywords import SettingKeywords

_Times = TypeVar("_Times", StageTimes, SkipTimes)
COLUMNS = ("stage", "what", "predicted", "measured")
PASSES = ("forward_s", "recompute_s", "backward_s", "weight_s")
WHOLE = "makespan_s"
SAME = 1e-6
"""Relative difference of a prediction in a table from the plan's, at most."""
MEASURED_ERROR = 0.1
"""Of times that came from a data sheet and were scaled by what was measured of their kind of device [chosen]."""


@dataclass(frozen=True, slots=True)
class Refined:
    """What measuring a plan's steps comes to.

    Attributes:
        plan: the best plan for the refined profile, perhaps with the same cuts as before; the one that was measured, as
            it was, where nothing else is asked for and the search, which of direct skips is one near some plans, found
            only slower ones.
        profile: scaled by what was measured.
        now_s: seconds of a step of the plan that was measured, by that profile.
        gain: the share of them that the other plan saves; 0 if it is no faster.
        doubt: the share that gain must be more than to be worth a change.
    """

    plan: Plan
    profile: Profile
    now_s: float
    gain: float
    doubt: float

    @property
    def worth_it(self) -> bool:
        """Whether the gain is beyond doubt."""
        return self.gain > self.doubt

    def __str__(self) -> str:
        """One sentence."""
        said = f"a step of this plan takes {seconds_text(self.now_s)} by what was measured"
        if not self.gain:
            return f"{said}, and no other plan is faster"
        plan = self.plan
        return (
            f"{said}; K = {plan.K}, M = {plan.M}, {plan.schedule} would take {seconds_text(plan.prediction.step_s)}, "
            f"{self.gain:.1%} less, which is {'beyond' if self.worth_it else 'within'} the doubt of {self.doubt:.1%}: "
            f"{'worth a change' if self.worth_it else 'not worth a change'}"
        )


def refined(
    plan: Plan,
    measured: pandas.DataFrame,
    profile: Profile | None = None,
    devices: Cluster | Sequence[Device] | None = None,
    **settings: Unpack[SettingKeywords],
) -> Refined:
    """Plan again with what `Pipeline.measured()` saw of a plan.

    Args:
        plan: that was measured.
        measured: what `Pipeline.measured()` returned; columns `stage`, `what`, `predicted` and `measured`.
        profile: what the plan was made from, which a plan made in this process knows itself.
        devices: what may be used; by default the plan's own, with the links that it was made for.
        settings: see `planner.keywords.SettingKeywords`; replicas, whether they share the optimizer's state, skips,
            cuts before modules that the model was traced to be cut at, and the fewest micro-batches a stage are the
            plan's own where they are not given, and chunks are chosen anew where the plan has several. A limit of
            memory is not part of a plan: give it again, as well as rules that the model was traced without.

    Raises:
        ArgumentError: the plan does not know its profile, or the table is none of `measured()`, or of no step.
        ForeignPlanError: the plan was not made from that profile, or the table is of a plan of more stages.
    """
    profile = plan.profile if profile is None else profile
    if profile is None:
        raise ArgumentError("a plan from a file does not know its profile; pass profile=, what it was made from")
    if fingerprint_of(profile) != plan.profile_fingerprint:
        raise ForeignPlanError("the plan was not made from this profile; pass the one that it was made from")
    ratios = _Ratios.of(plan, measured)
    ratios = ratios.times(_rest(plan, measured, ratios))
    better = _scaled_profile(profile, plan, ratios)
    if devices is None and plan.cluster is None:
        refuse_other_links(plan, problem_of(plan, profile), None)
    given: Cluster | Sequence[Device] = planned_for(plan, profile) if devices is None else devices
    if isinstance(given, Cluster) and given.link is not None:
        between = None if given.between is None else given.between.slowed(ratios.link)
        given = given.model_copy(update={"link": given.link.slowed(ratios.link), "between": between})
    from planner.from_profile import plan_from_profile

    asked: SettingKeywords = {**_settings_of(plan, profile, settings.get("schedule", plan.schedule)), **settings}
    new = plan_from_profile(better, given, batch_size=plan.batch_size, optimizer=plan.optimizer, **asked)
    now_s = simulate_plan(_scaled_plan(plan, ratios), events=False).step_s
    free = devices is None and settings.keys() <= {"time_limit_s"}
    if free and new.prediction.step_s > now_s * (1 + SAME):
        new = plan
    doubt = new.prediction.doubt
    return Refined(
        plan=new,
        profile=better,
        now_s=now_s,
        gain=0.0 if _trains_alike(new, plan) else max(0.0, 1 - new.prediction.step_s / now_s),
        doubt=doubt.step_more if doubt is not None else 0.0,
    )


def _trains_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans differ in nothing but what is predicted of them."""

    def all_of(plan: Plan) -> tuple[object, ...]:
        stages = [(stage.stop_layer, stage.recompute, stage.rank, stage.devices) for stage in plan.stages]
        skips = [(skip.ends, skip.values) for skip in plan.skips]
        return plan.schedule, plan.micro_batch_sizes, plan.orders, plan.shard_optimizer, plan.positions, stages, skips

    return all_of(one) == all_of(other)


def _settings_of(plan: Plan, profile: Profile, schedule: str) -> SettingKeywords:
    """What a plan shows of the settings that it was made with, so that a plan like itself is among those searched."""
    fewest = min(MICRO_BATCHES_PER_STAGE, max(1, plan.M // plan.ranks))
    found: SettingKeywords = {
        "cut_at": list(_cuts_kept(plan, profile)),
        "replicas": plan.replicas,
        "shard_optimizer": plan.shard_optimizer,
        "micro_batches_per_stage": fewest,
    }
    if plan.chunks > 1 and schedule == plan.schedule:
        found["chunks"] = "auto"
    if plan.skips and schedule == plan.schedule:
        found["skips"] = "direct"
    return found


def _cuts_kept(plan: Plan, profile: Profile) -> Iterator[str]:
    """Those of the modules that the model was traced to be cut at that a stage of the plan begins with.

    Profiles of before may have been traced to be cut where no cut is safe: no layer begins there, and no stage.
    """
    begun, firsts = profile.sample.cut_at, {stage.first_layer for stage in plan.stages}
    for path in begun:
        with suppress(ArgumentError):
            if start_of(profile.layers, path, begun) in firsts:
                yield path


@dataclass(frozen=True, slots=True)
class _Ratios:
    """Measured by predicted.

    Attributes:
        stages: of each stage the ratio of each of `PASSES` that was seen.
        kinds: the same of all stages on a kind of device.
        link: of all messages.
    """

    stages: tuple[dict[str, float], ...]
    kinds: dict[str, dict[str, float]]
    link: float

    @classmethod
    def of(cls, plan: Plan, measured: pandas.DataFrame) -> _Ratios:
        stages: list[dict[str, float]] = [{} for _ in plan.stages]
        kinds: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        sent: list[tuple[float, float]] = []
        for stage, what, predicted_s, seconds in _seen(plan, measured):
            if what in PASSES:
                stages[stage][what] = seconds / predicted_s
                kinds[plan.stages[stage].device.kind][what].append((seconds, predicted_s))
            else:
                sent.append((seconds, predicted_s))
        if not any(stages):
            raise ArgumentError("measured holds no pass of any stage; train a step before Pipeline.measured() is asked")
        of_kinds = {kind: {what: _ratio(pairs) for what, pairs in found.items()} for kind, found in kinds.items()}
        return cls(tuple(stages), of_kinds, _ratio(sent))

    def times(self, factor: float) -> _Ratios:
        """All of them so many times as large."""
        stages = tuple({what: ratio * factor for what, ratio in one.items()} for one in self.stages)
        kinds = {kind: {what: ratio * factor for what, ratio in one.items()} for kind, one in self.kinds.items()}
        return _Ratios(stages, kinds, self.link * factor)

    def at(self, what: str, stage: int | None, kind: str) -> float:
        """Of a pass of a stage, or of a kind of device; of a pass that was not seen that of the most alike."""
        found = self.kinds.get(kind, {}) if stage is None else self.stages[stage]
        for name in (what, *_ALIKE[what]):
            if name in found:
                return found[name]
        return 1.0 if stage is None else self.at(what, None, kind)


_ALIKE = {
    "forward_s": ("backward_s",),
    "recompute_s": ("forward_s", "backward_s"),
    "backward_s": ("forward_s",),
    "weight_s": ("backward_s", "forward_s"),
}


def _seen(plan: Plan, measured: pandas.DataFrame) -> Iterator[tuple[int, str, float, float]]:
    """Stage, what, predicted and measured seconds of the passes and transfers that took time.

    Raises:
        ArgumentError: the table is none of `Pipeline.measured()`.
        ForeignPlanError: it is that of another plan.
    """
    missing = [name for name in COLUMNS if name not in getattr(measured, "columns", ())]
    if missing:
        raise ArgumentError(f"measured has no column {missing[0]!r}; pass what Pipeline.measured() returns")
    for stage, what, predicted_s, seconds in measured[list(COLUMNS)].itertuples(index=False):
        sends = str(what).endswith(("send_forward_s", "send_backward_s"))
        if what not in PASSES and not sends:
            continue
        numbers = (stage, predicted_s, seconds)
        if not all(map(_is_number, numbers)) or stage != stage // 1 or stage < 0:
            raise ArgumentError(
                f"measured has a row of stage {stage!r}, {what}, {predicted_s!r}, {seconds!r}; stages are counted from "
                "0 and the others are seconds: pass what Pipeline.measured() returns"
            )
        if stage >= plan.K:
            raise ForeignPlanError(f"measured has stage {stage}, and the plan has {counted(plan.K, 'stage')}")
        if not (_is_positive(seconds) and _is_positive(predicted_s)):
            continue
        if not sends:
            of_plan = [getattr(plan.stages[int(stage)].times_at(size), what) for size in plan.micro_batch_sizes]
            if not isclose(predicted_s, fmean(of_plan), rel_tol=SAME):
                raise ForeignPlanError(
                    f"measured says that {what} of stage {stage} was predicted to be {predicted_s:.6g}, and the plan "
                    f"predicts {fmean(of_plan):.6g}; pass what a Pipeline of this plan measured"
                )
        yield int(stage), what, float(predicted_s), float(seconds)


def _rest(plan: Plan, measured: pandas.DataFrame, ratios: _Ratios) -> float:
    """How many times as long a step takes as its passes and messages explain; 1 if the table does not say it.

    A stage waits for the slowest pass of its neighbours, not for their median, and the executor's own code takes time.
    """
    whole = measured[(measured["what"] == WHOLE) & (measured["stage"] == -1)]["measured"]
    if len(whole) != 1:
        return 1.0
    if not _is_number(whole.iloc[0]):
        raise ArgumentError(
            f"measured says that the makespan is {whole.iloc[0]!r}; it is a number of seconds: pass what "
            "Pipeline.measured() returns"
        )
    if not _is_positive(whole.iloc[0]):
        return 1.0
    return float(whole.iloc[0]) / simulate_plan(_scaled_plan(plan, ratios), events=False).makespan_s


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def _is_positive(seconds: float) -> bool:
    """Whether a number is more than 0, and a float may hold it."""
    return 0 < seconds <= sys.float_info.max


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs) if pairs else 1.0


def _scaled_profile(profile: Profile, plan: Plan, ratios: _Ratios) -> Profile:
    ran_on = {
        (layer, stage.device.kind): number
        for number, stage in enumerate(plan.stages)
        for layer in range(stage.first_layer, stage.stop_layer)
    }
    splits = SCHEDULES[plan.schedule].splits_backward
    costs = tuple(
        _scaled_cost(cost, ratios, ran_on.get((cost.layer, cost.device_kind)), splits=splits) for cost in profile.costs
    )
    estimates = tuple(
        estimate.model_copy(update={"error": min(estimate.error, MEASURED_ERROR)})
        if estimate.device_kind in ratios.kinds
        else estimate
        for estimate in profile.estimates
    )
    links = tuple(link.slowed(ratios.link) for link in profile.links)
    return profile.model_copy(update={"costs": costs, "estimates": estimates, "links": links})


def _scaled_cost(cost: LayerCost, ratios: _Ratios, stage: int | None, *, splits: bool) -> LayerCost:
    """The costs with the seconds that were measured, of a plan that splits the backward pass or does not.

    Where it does, both of its passes were measured with what splitting costs more, which is one of weights.
    """
    if cost.device_kind not in ratios.kinds:
        return cost
    forward, again, backward, weight = (ratios.at(what, stage, cost.device_kind) for what in PASSES)
    more_s = cost.split_s if splits else 0.0
    backward_s, weight_s = backward * (cost.backward_s + more_s), weight * (cost.weight_s + more_s)
    share = min(1.0, backward_s / weight_s) if weight_s else 1.0  # a part is no more than the whole
    split_s = weight * share * more_s if splits else backward * cost.split_s
    return cost.model_copy(
        update={
            "forward_s": cost.forward_s * forward,
            "recompute_s": cost.recompute_s * again,
            "backward_s": max(backward_s - (split_s if splits else 0.0), weight * share * cost.weight_s),
            "weight_s": weight * share * cost.weight_s,
            "split_s": split_s,
            "slowdown": 0.0,
        }
    )


def _scaled_plan(plan: Plan, ratios: _Ratios) -> Plan:
    """The same plan with the seconds that were measured."""
    stages = tuple(_scaled_stage(stage, number, ratios) for number, stage in enumerate(plan.stages))
    skips = tuple(
        skip.model_copy(update={"times": tuple(_sent(entry, ratios) for entry in skip.times)}) for skip in plan.skips
    )
    return plan.model_copy(update={"stages": stages, "skips": skips})


def _scaled_stage(stage: Stage, number: int, ratios: _Ratios) -> Stage:
    times = []
    for entry in stage.times:
        seconds = {what: getattr(entry, what) * ratios.at(what, number, stage.device.kind) for what in PASSES}
        seconds["weight_s"] = min(seconds["weight_s"], seconds["backward_s"])
        times.append(_sent(entry.model_copy(update=seconds), ratios))
    return stage.model_copy(update={"times": tuple(times), "all_reduce_s": stage.all_reduce_s * ratios.link})


def _sent(entry: _Times, ratios: _Ratios) -> _Times:
    sends = {what: getattr(entry, what) * ratios.link for what in ("send_forward_s", "send_backward_s")}
    return entry.model_copy(update=sends)
