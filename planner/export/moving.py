"""A plan with its cuts and its recompute as an engine can have them: the best such plan, by our own prediction.

Devices, schedule, K, M and R stay; where devices are unlike stages may change places. A plan that the engine can run as
it is stays as it is, for which no profile is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from planner.doubt import with_doubt
from planner.export.target import Recompute
from planner.export.units import Units
from planner.plan.plan import Plan
from planner.plan.stage import Segment, Stage
from planner.planned_for import SegmentsOf, as_it_is_s, evaluated, problem_of, refuse_other_links
from planner.rates import with_rates
from planner.solve.build_plan import make_plan
from planner.solve.host_search import best_in_order
from planner.solve.problem import Problem
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, InfeasibleError
from profiler.record import Profile

FEW = 300
"""Choices of cuts that are all tried [chosen]."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan as an engine can have it.

    Attributes:
        plan: with other cuts and other recompute, if need be.
        original_s: predicted seconds of the original plan's step, under the same conditions.
    """

    plan: Plan
    original_s: float


@dataclass(frozen=True, slots=True)
class Form:
    """What plans an engine can have.

    Attributes:
        positions: of its cuts; None for any.
        recompute: what it can recompute.
        units: what it recomputes, if that is units.
        engine: its name, for messages.
        between: what may be cut apart, for messages.
    """

    positions: frozenset[int] | None
    recompute: Recompute
    units: Units | None
    engine: str
    between: str

    def holds(self, plan: Plan) -> bool:
        """Whether a plan has it."""
        return self.has_cuts(plan) and self.has_recompute(plan) and not plan.skips

    def has_cuts(self, plan: Plan) -> bool:
        """Whether all its cuts are at such positions."""
        return self.positions is None or {stage.stop_layer for stage in plan.stages[:-1]} <= self.positions

    def has_recompute(self, plan: Plan) -> bool:
        """Whether it recomputes what the engine can."""
        if self.recompute in (Recompute.ANY, Recompute.LEFT_TO_ENGINE) or not any(s.recompute for s in plan.stages):
            return True
        return all(stage.recompute == self.segments(stage.first_layer, stage.stop_layer) for stage in plan.stages)

    def segments(self, first: int, stop: int) -> tuple[Segment, ...]:
        """What the engine recomputes of a stage where it recomputes at all."""
        if self.recompute is Recompute.STAGES or self.units is None:
            return (Segment(first=first, stop=stop),)
        spans = self.units.spans(first, stop, blocks_only=self.recompute is Recompute.BLOCKS)
        return tuple(Segment(first=a, stop=b) for a, b in spans)


def moved(plan: Plan, form: Form, profile: Profile | None, devices: Cluster | Sequence[Device] | None = None) -> Moved:
    """The best plan of that form with the plan's devices, schedule, K, M and R.

    Args:
        plan: what to run.
        form: what the engine can.
        profile: what the plan was made from; needed if it must change.
        devices: what it was made for, which a plan made in this process knows itself.

    Raises:
        ArgumentError: the plan must change, and there is no profile, or by its link the plan takes another time than it
            says, and no devices are given.
        ForeignPlanError: the profile is not the plan's, or the devices are not.
        InfeasibleError: there are not enough places for the cuts, or no plan of the form fits the memory.
    """
    if form.holds(plan):
        return Moved(plan, plan.prediction.step_s)
    if form.positions is not None and len(form.positions) < plan.K - 1:
        raise InfeasibleError(
            f"{form.engine} cuts between {form.between}, and this model has {len(form.positions)} such places where "
            f"K = {plan.K} stages need {plan.K - 1}; plan with stages={len(form.positions) + 1} or fewer"
        )
    if profile is None:
        raise ArgumentError(
            f"{_what_changes(plan, form)} for {form.engine}, and where it costs least only the profile says; pass "
            "profile=..., which the plan was made from (autoplan export --profile)"
        )
    problem = problem_of(plan.model_copy(update={"skips": ()}), profile, devices)
    refuse_other_links(plan, problem, devices)
    found = _best(problem, plan, form)
    if found is None:
        raise InfeasibleError(
            f"no plan for {form.engine} with K = {plan.K}, M = {plan.M} and schedule {plan.schedule!r} fits: cuts "
            f"between {form.between} and recompute of {form.recompute.value} need more than the "
            f"{max(stage.device.memory_bytes for stage in plan.stages)} bytes of a device; plan with more stages, or "
            "smaller micro-batches"
        )
    if problem.hosts is None and [stage.devices for stage in found.stages] == [stage.devices for stage in plan.stages]:
        found = found.model_copy(update={"positions": plan.positions, "devices_per_host": plan.devices_per_host})
    found = with_rates(with_doubt(found, problem.costs, problem.links), profile)
    return Moved(found, plan.prediction.step_s if plan.skips else as_it_is_s(problem, plan))


def _what_changes(plan: Plan, form: Form) -> str:
    if not form.has_cuts(plan):
        return f"cuts inside of {form.between} must move"
    return "values that go past stages must be relayed" if plan.skips else "what is recomputed must change"


def _best(problem: Problem, plan: Plan, form: Form) -> Plan | None:
    """First the search's own choice of recompute: if the engine can have it, no plan of the form is faster.

    What recomputes everything goes on to do so if that fits: it may have been asked for.
    """
    if all(_recomputes_all(stage) for stage in plan.stages):
        found = _recomputing(problem, plan, form, ())
        if found is not None:
            return found
    free = _searched(problem, plan, form, "auto")
    if free is None or form.has_recompute(free):
        return free
    never = _searched(problem, plan, form, "never")
    fitting = [choice for choice in (never, _recomputing(problem, plan, form, (free, never))) if choice is not None]
    return min(fitting, key=lambda choice: choice.prediction.step_s, default=None)


def _recomputing(problem: Problem, plan: Plan, form: Form, others: Sequence[Plan | None]) -> Plan | None:
    """The best plan that recomputes all that the engine can; from cuts of others, too, where units are recomputed."""
    whole = _searched(problem, plan, form, "always")
    if form.recompute not in (Recompute.UNITS, Recompute.BLOCKS):
        return whole
    return _recomputing_units(problem, [start for start in (*others, whole) if start is not None], plan, form)


def _recomputes_all(stage: Stage) -> bool:
    return sum(segment.stop - segment.first for segment in stage.recompute) == stage.stop_layer - stage.first_layer


def _searched(problem: Problem, plan: Plan, form: Form, recompute: str) -> Plan | None:
    """The search's best plan with cuts at the form's positions; the plan's own cuts if it may have any."""
    rules = problem.rules
    own = (stage.stop_layer for stage in plan.stages[:-1])
    positions = frozenset(own) if form.positions is None else form.positions
    allowed = rules.allowed & False
    allowed[[0, *positions, problem.layers]] = True
    narrowed = replace(rules, allowed=allowed)
    settings = replace(problem.settings, recompute=recompute)  # type: ignore[arg-type]  # one of its modes
    return best_in_order(replace(problem, rules=narrowed, settings=settings))


def _recomputing_units(problem: Problem, starts: Iterable[Plan], plan: Plan, form: Form) -> Plan | None:
    """The best plan that recomputes every unit by itself: all choices of cuts, if they are few.

    With more, from the cuts of each of some plans one cut at a time goes to where the plan is best, as long as one
    helps, which need not lead to the best plan of all.
    """
    own = [stage.stop_layer for stage in plan.stages[:-1]]
    places = sorted(form.positions) if form.positions is not None else own
    known: dict[tuple[int, ...], tuple[Plan, tuple[int, float]]] = {}

    def rank(cuts: tuple[int, ...]) -> tuple[int, float]:
        if cuts not in known:
            made = _with_cuts(problem, plan, cuts, form.segments)
            known[cuts] = made, (_overflow(made), made.prediction.step_s)
        return known[cuts][1]

    if comb(len(places), plan.K - 1) <= FEW:
        best = min(combinations(places, plan.K - 1), key=rank, default=())
    else:
        cuts_of_starts = {tuple(stage.stop_layer for stage in start.stages[:-1]) for start in starts}
        best = min((_climbed(cuts, places, rank) for cuts in sorted(cuts_of_starts)), key=rank, default=())
    if not best and plan.K > 1:
        return None
    made, (overflow, _) = known[best]
    return None if overflow else made


def _climbed(
    cuts: tuple[int, ...], places: Sequence[int], rank: Callable[[tuple[int, ...]], tuple[int, float]]
) -> tuple[int, ...]:
    """Cuts of which none could go elsewhere between its neighbours and be better."""
    while True:
        ends = [0, *cuts, places[-1] + 1]
        near = [
            (*cuts[:index], place, *cuts[index + 1 :])
            for index in range(len(cuts))
            for place in places
            if ends[index] < place < ends[index + 2]
        ]
        best = min(near, key=rank)
        if rank(best) >= rank(cuts):
            return cuts
        cuts = best


def _with_cuts(problem: Problem, plan: Plan, cuts: Sequence[int], segments_of: SegmentsOf) -> Plan:
    """The plan with other cuts and recompute, whether it fits or not."""
    return make_plan(problem, evaluated(problem, plan, cuts, segments_of))


def _overflow(plan: Plan) -> int:
    """Bytes that its stages need beyond their devices."""
    pairs = zip(plan.device_memories, plan.stages, strict=False)
    return sum(max(0, memory.total - stage.device.memory_bytes) for memory, stage in pairs)
