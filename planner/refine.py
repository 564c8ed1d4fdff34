"""The closed loop: what a training run measured goes back into the profile, and the plan is made again.

    refined = plan.refined(pipe.measured())
    print(refined)                              # is it worth a change?
    plan = refined.plan                         # only then

What a stage took, as a ratio to what was predicted, holds for each of its layers on that kind of device; layers that
did not run on a kind of device have the ratio of all that ran on it (`measured_ratios`). Messages do the same to the
link, and so to the all-reduce that goes over it. All is scaled by how much longer a step takes than its passes explain:
they scatter, and the executor's own code takes time. What was not seen (the optimizer, links that nobody waited for)
stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cost.layer_costs import fingerprint_of
from planner.measured_ratios import SAME, WHOLE, PassRatios, Ratios, Seen, check_ratio, seen_of
from planner.plan.plan import Plan
from planner.plan.simulator import simulate_plan
from planner.plan.units import seconds_text
from planner.planned_for import planned_for, problem_of, refuse_other_links
from planner.rules import start_of
from planner.scaled import scaled_plan, simulated_step_s
from planner.settings import MICRO_BATCHES_PER_STAGE
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, ForeignPlanError
from profiler.record import LayerCost, Profile

if TYPE_CHECKING:
    from typing import Unpack

    import pandas

    from planner.keywords import SettingKeywords

MEASURED_ERROR = 0.1
"""Of times that came from a data sheet and were scaled by what was measured of their kind of device, or of their link
[chosen]."""


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
        ArgumentError: the plan does not know its profile, or the table is none of `measured()`, or of no step, or of
            several, or measured by predicted is below `LEAST_RATIO` or above `MOST_RATIO`.
        ForeignPlanError: the plan was not made from that profile, or the table is of a plan of more stages.
    """
    profile = plan.profile if profile is None else profile
    if profile is None:
        raise ArgumentError("a plan from a file does not know its profile; pass profile=, what it was made from")
    if fingerprint_of(profile) != plan.profile_fingerprint:
        raise ForeignPlanError("the plan was not made from this profile; pass the one that it was made from")
    seen = seen_of(plan, measured)
    ratios = Ratios.of(plan, seen)
    ratios = ratios.times(_rest(plan, seen, ratios))
    better = _scaled_profile(profile, plan, ratios)
    if devices is None and plan.cluster is None:
        refuse_other_links(plan, problem_of(plan, profile), None)
    given: Cluster | Sequence[Device] = planned_for(plan, profile) if devices is None else devices
    if isinstance(given, Cluster) and given.link is not None:
        links = {"link": _scaled_link(given.link, ratios)}
        if given.between is not None:  # which of both messages went over was not seen
            links = {name: getattr(given, name).slowed(ratios.link) for name in ("link", "between")}
        given = given.model_copy(update=links)
    from planner.from_profile import plan_from_profile

    asked: SettingKeywords = {**_settings_of(plan, profile, settings.get("schedule", plan.schedule)), **settings}
    new = plan_from_profile(better, given, batch_size=plan.batch_size, optimizer=plan.optimizer, **asked)
    now_s = simulated_step_s(scaled_plan(plan, ratios.stages, ratios.link))
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


def _rest(plan: Plan, seen: Seen, ratios: Ratios) -> float:
    """How many times as long a step takes as its passes and messages explain; 1 if the table does not say it.

    A stage waits for the slowest pass of its neighbours, not for their median, and the executor's own code takes time.
    """
    if (-1, WHOLE) not in seen:
        return 1.0
    whole_s, _ = seen[-1, WHOLE]
    explained_s = simulate_plan(scaled_plan(plan, ratios.stages, ratios.link), events=False).makespan_s
    check_ratio(whole_s, explained_s, f"{WHOLE}, by what passes took,")
    return whole_s / explained_s


def _scaled_profile(profile: Profile, plan: Plan, ratios: Ratios) -> Profile:
    ran_on = {
        (layer, stage.device.kind): (number, any(part.first <= layer < part.stop for part in stage.recompute[:-1]))
        for number, stage in enumerate(plan.stages)
        for layer in range(stage.first_layer, stage.stop_layer)
    }

    def scaled(cost: LayerCost) -> LayerCost:
        if cost.device_kind not in ratios.kinds:
            return cost
        number, in_backward = ran_on.get((cost.layer, cost.device_kind), (None, False))
        by = ratios.kinds[cost.device_kind] if number is None else ratios.stages[number]
        return _scaled_cost(cost, by, recompute=by.other if in_backward else by.recompute)

    costs = tuple(map(scaled, profile.costs))
    estimates = tuple(
        estimate.model_copy(update={"error": min(estimate.error, MEASURED_ERROR)})
        if estimate.device_kind in ratios.kinds
        else estimate
        for estimate in profile.estimates
    )
    links = tuple(_scaled_link(link, ratios) for link in profile.links)
    return profile.model_copy(update={"costs": costs, "estimates": estimates, "links": links})


def _scaled_link(link: Link, ratios: Ratios) -> Link:
    """The link as it was measured; one whose sizes were measured before is as far off a line as it was."""
    error = min(link.error, MEASURED_ERROR) if ratios.sent and not link.measured else link.error
    return link.slowed(ratios.link).model_copy(update={"error": error})


def _scaled_cost(cost: LayerCost, by: PassRatios, *, recompute: float) -> LayerCost:
    """The costs with the seconds that were measured; what splitting a backward pass costs more is one of weights."""
    weight_s = by.weight * cost.weight_s
    return cost.model_copy(
        update={
            "forward_s": by.forward * cost.forward_s,
            "recompute_s": recompute * cost.recompute_s,
            "backward_s": weight_s + by.other * (cost.backward_s - cost.weight_s),
            "weight_s": weight_s,
            "split_s": by.weight * cost.split_s,
            "slowdown": 0.0,
        }
    )
