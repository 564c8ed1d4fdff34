"""What a plan leaves unused: which devices stay idle and why, and what the rule M >= n K costs."""

from __future__ import annotations

from dataclasses import replace

from planner.plan.plan import Plan
from planner.plan.unused import LooserPlan, Unused
from planner.solve.deadline import Deadline
from planner.solve.equal_groups import best_plan, with_equal_groups
from planner.solve.problem import Problem
from planner.solve.time_shares import making_s
from planner.solve.work_bound import work_bound
from profiler.text import counted

WORTH_NAMING = 0.01
"""By what a plan must be faster for what forbids it to be named."""
SHARE_OF_TIME = 0.1
"""What the search for such a plan may take of the time of the first one [chosen]."""
LEAST_LOOKED_S = 3.0
"""Seconds that it may take, the making of the plan included, where there is no time limit [chosen: a third of the 55 s
that zb took for 70B parameters on 64 devices went to a plan that came to nothing]."""


def with_unused(problem: Problem, plan: Plan, spent_s: float) -> Plan:
    """The plan with what it leaves unused, if anything; the search without the rule is a short one.

    Args:
        problem: that it solves.
        plan: the plan.
        spent_s: seconds that it took.
    """
    looser = _looser(problem, plan, spent_s)
    idle = len(problem.devices) - plan.ranks * plan.replicas
    if not idle and looser is None:
        return plan
    reason = _reason(problem, plan, looser) if idle else ""
    return plan.model_copy(update={"unused": Unused(devices=idle, reason=reason, looser=looser)})


def time_for_plan(problem: Problem) -> Problem:
    """The problem with the time that is not needed to find out what the rule costs."""
    limit_s = problem.settings.time_limit_s
    if limit_s is None or not _binds(problem):
        return problem
    return replace(problem, settings=replace(problem.settings, time_limit_s=limit_s * (1 - SHARE_OF_TIME)))


def _without_rule(problem: Problem) -> Problem:
    return replace(problem, settings=replace(problem.settings, micro_batches_per_stage=1))


def _binds(problem: Problem) -> bool:
    """Whether there are more stages, for some M, without the rule."""
    loose = _without_rule(problem)
    return any(
        loose.most_stages(one.replicas, one.split.count) > problem.most_stages(one.replicas, one.split.count)
        for one in loose.candidates()
    )


def _looser(problem: Problem, plan: Plan, spent_s: float) -> LooserPlan | None:
    """The best plan without the rule if it is worth naming."""
    if Deadline(None).interrupted:
        return None
    limit = problem.settings.time_limit_s
    loose, per_stage = _without_rule(problem), problem.settings.micro_batches_per_stage
    if limit is None:
        time_limit_s = max(LEAST_LOOKED_S, spent_s * SHARE_OF_TIME) - making_s(loose)
    else:
        time_limit_s = min(limit - spent_s - making_s(loose), limit * SHARE_OF_TIME)
    if time_limit_s <= 0:
        return None
    limit_s = plan.prediction.step_s * (1 - WORTH_NAMING)
    hopeful = [
        one
        for one in loose.candidates()
        if loose.most_stages(one.replicas, one.split.count) > problem.most_stages(one.replicas, one.split.count)
        and work_bound(loose, one).step_s() <= limit_s
    ]
    if not hopeful:
        return None
    sizes = frozenset(size for one in hopeful for size in (one.split.largest, one.split.smallest))
    settings = replace(loose.settings, time_limit_s=time_limit_s, micro_batch_sizes=sizes)
    found = best_plan(replace(loose, settings=settings, patience=SHARE_OF_TIME, dispensable=True, below_s=limit_s))
    if found is None or found.prediction.step_s > limit_s or per_stage * found.ranks <= found.M:
        return None
    return LooserPlan(
        stages=found.K,
        chunks=found.chunks,
        micro_batches=found.M,
        micro_batches_per_stage=per_stage,
        step_s=found.prediction.step_s,
    )


def _few_layers(problem: Problem) -> str:
    whole = problem.costs.profile.whole
    why = f": {whole}" if whole else ""
    return f"the model has {counted(problem.layers, 'layer')}, and a stage holds at least 1{why}"


def _in_line(plan: Plan, devices: int) -> str:
    """So many devices in line, for people: K is of stages, of which each may have several."""
    return f"K = {devices}" if plan.chunks == 1 else counted(devices, "rank")


def _reason(problem: Problem, plan: Plan, looser: LooserPlan | None) -> str:
    """Why there are not more stages: what allows no more, or that more are not faster."""
    settings, per_stage = problem.settings, problem.settings.micro_batches_per_stage
    most_micro_batches = settings.micro_batches or settings.batch_size // plan.replicas
    equal = with_equal_groups(problem, plan.replicas)
    groups = sum(group.capacity(plan.replicas) for group in equal.classes)
    rule = f"M >= {per_stage}K (micro_batches_per_stage)"
    where = f" where R = {plan.replicas}" if plan.replicas > 1 else ""
    reasons = (
        (settings.stages is not None, f"stages is {settings.stages}"),
        (settings.max_stages == plan.K < groups * settings.chunks, f"max_stages is {settings.max_stages}"),
        (problem.layers == plan.K, _few_layers(problem)),
        (
            groups == plan.ranks,
            f"R = {plan.replicas} needs as many equal devices for each stage, which makes at most "
            f"{_in_line(plan, groups)}",
        ),
        (
            most_micro_batches // per_stage == plan.ranks,
            f"{rule} allows no more than {_in_line(plan, plan.ranks)} with M = {most_micro_batches}{where}",
        ),
        (looser is not None and looser.stages > plan.K, f"with {rule} more stages are not faster"),
        (plan.prediction.gap > 0, "no faster plan was found that has more stages"),
    )
    return next((reason for holds, reason in reasons if holds), "more stages are not faster")
