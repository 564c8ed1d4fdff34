"""A plan's explanation in three sentences: what limits the step, what the next-best cuts cost, what would help most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas

from planner.bottleneck import limit_of
from planner.cost.time_ledger import layer_seconds
from planner.plan.plan import Plan
from planner.plan.units import seconds_text
from planner.solve.problem import Problem
from profiler.device import Link
from profiler.errors import PlanError
from profiler.text import one_line

SEARCH_S = 2.0
"""Seconds that the search for each other plan may take [chosen]."""
LEAST_SAID = 0.0005
"""Part of the step that rounds to none."""
WORTH_NAMING = 0.005
"""Part of the step below which a gain is none [chosen]."""
UNLIKE = 0.01
"""By what part a stage is longer than others for that to be said."""
NOTABLE = 0.05
"""Part of a stage's time from which on it is said that it recomputes [chosen]."""
MUCH = 0.2
"""Part of a stage's time from which on its dearest layer is named [chosen]: no other cut makes it shorter."""
TWICE = 2


def sentences_on(plan: Plan, frame: pandas.DataFrame, problem: Problem | None) -> tuple[str, ...]:
    """What a person would say.

    Args:
        plan: what is explained.
        frame: the table of `Plan.explain`.
        problem: what its profile says with nothing but recompute free; None where there is no profile.
    """
    limit = _limit(plan, frame, problem)
    if problem is None:
        return (limit, "With the profile that it was made from, other cuts and other hardware can be compared.")
    return (limit, _next_best(plan, frame), _most_help(plan, problem))


def _limit(plan: Plan, frame: pandas.DataFrame, problem: Problem | None) -> str:
    """What the step would gain most by, were it faster."""
    limit = limit_of(plan)
    ring = plan.ring
    each = (frame["forward_s"] + frame["backward_s"]).to_numpy()
    computing = [float(each[[*ring.stages_of(rank)]].sum()) for rank in range(ring.ranks)]
    bubble = f"devices idle {plan.prediction.bubble:.0%} of the time"
    if limit.is_link:
        there, back = (frame[column].to_numpy() for column in ("send_forward_s", "send_backward_s"))
        sending_s = max(
            sum(row[stage] for stage in range(plan.K) if ring.lower_end(stage, forward=forward) == limit.rank)
            for row, forward in ((there, True), (back, False))
        )
        longer = ", longer than any stage computes" if sending_s > max(computing) else ""
        return (
            f"The link after stage {limit.rank} limits the step: a micro-batch's messages take "
            f"{seconds_text(sending_s)}{longer}, and {bubble}."
        )
    own_s, mean_s = computing[limit.rank], sum(computing) / ring.ranks
    over = own_s / mean_s - 1 if mean_s else 0.0
    than = f", {over:.0%} longer than the mean" if over >= UNLIKE else ""
    why = "" if plan.chunks > 1 else "; ".join(_why(plan, limit.rank, own_s, problem))
    stages = ring.stages_of(limit.rank)
    name = f"Stage {stages[0]}" if plan.chunks == 1 else f"What stages {', '.join(map(str, stages))} do"
    return (
        f"{name} on {plan.stages[limit.rank].device.name} limits the step: it computes {seconds_text(own_s)} for each "
        f"of {plan.M} micro-batches{than}{f' ({why})' if why else ''}, and {bubble}."
    )


def _why(plan: Plan, stage: int, whole_s: float, problem: Problem | None) -> Iterator[str]:
    """What takes a good part of a stage's seconds for a micro-batch: what it recomputes, and its dearest layer."""
    size, one = max(plan.micro_batch_sizes), plan.stages[stage]
    recompute_s = one.times_at(size).recompute_s
    if recompute_s >= NOTABLE * whole_s:
        yield f"{recompute_s / whole_s:.0%} of it to recompute"
    times = one.times_at(size)
    copies_s = whole_s - times.forward_s - times.backward_s - recompute_s
    if copies_s >= NOTABLE * whole_s:
        yield f"{copies_s / whole_s:.0%} of it to copy messages"
    if problem is None or one.stop_layer - one.first_layer == 1:
        return
    seconds = layer_seconds(problem.costs, one.device.kind, size)
    own_s = (seconds.forward_s + seconds.backward_s)[one.first_layer : one.stop_layer]
    dearest = one.first_layer + int(own_s.argmax())
    if float(own_s.max()) >= MUCH * whole_s:
        name = one_line(problem.costs.profile.layers[dearest].name)
        yield f"{float(own_s.max()) / whole_s:.0%} of it in layer {dearest}, {name}"


def _next_best(plan: Plan, frame: pandas.DataFrame) -> str:
    moved = [
        (float(frame[column][stage]), stage, words)
        for column, words in (("cut_earlier_s", "earlier"), ("cut_later_s", "later"))
        for stage in range(plan.K - 1)
        if not pandas.isna(frame[column][stage])
    ]
    if not moved:
        return "No cut can be moved by a layer and still fit." if plan.K > 1 else "There is one stage: no cut to move."
    step_s, stage, words = min(moved)
    more = step_s / plan.prediction.step_s - 1
    cost = f"{abs(more):.1%} {'more' if more > 0 else 'less'}" if abs(more) >= LEAST_SAID else "no more"
    would = f"the step would take {seconds_text(step_s)}, {cost}"
    return f"The next-best cut after stage {stage} is one layer {words}: {would}."


def _most_help(plan: Plan, problem: Problem) -> str:
    """The best of twice the memory, bandwidth, batch, one device more, and a looser rule for M."""
    now = plan.prediction.samples_per_s
    asked = _asked(plan, problem)
    as_asked = _samples_per_s({**asked, "devices": problem.cluster}) or now
    again = as_asked / now - 1
    now = max(now, as_asked)  # what follows has K and M free as well, and is not to be given what these bring
    gains = {}
    for words, changed in _changes(plan, problem, asked):
        found = _samples_per_s(changed)
        if found is not None:
            gains[words] = found / now - 1
    looser = None if plan.unused is None else plan.unused.looser
    if looser is not None:
        gains[f"fewer micro-batches a stage ({looser.setting})"] = plan.batch_size / looser.step_s / now - 1
    helpful = {words: gain for words, gain in gains.items() if gain > WORTH_NAMING}
    tried = ", ".join(gains)
    ranked = sorted(helpful, key=lambda words: -helpful[words])
    if again > WORTH_NAMING:
        others = f" (and then {', '.join(f'{one} {helpful[one]:.0%}' for one in ranked)})" if ranked else ""
        return f"What would help most is to choose K and M anew: {again:.0%} more samples/s{others}."
    if not ranked:
        return f"Nothing of what was tried would help by more than {WORTH_NAMING:.1%}: {tried}."
    rest = f" ({', '.join(f'{one} {helpful[one]:.0%}' for one in ranked[1:])})" if len(ranked) > 1 else ""
    return f"What would help most is {ranked[0]}: {helpful[ranked[0]]:.0%} more samples/s{rest}."


def _asked(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Keywords of `plan_from_profile` for what is asked of this plan; K, M and cuts are free."""
    return {
        "batch_size": plan.batch_size,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "replicas": plan.replicas,
        "shard_optimizer": plan.shard_optimizer,
        "skips": problem.settings.skips,
        "micro_batches_per_stage": min(4, max(1, plan.M // plan.ranks)),
        "time_limit_s": SEARCH_S,
        "optimizer": plan.optimizer,
        "profile": problem.costs.profile,
    }


def _changes(plan: Plan, problem: Problem, asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same with one thing changed."""
    cluster = problem.cluster
    devices, link = cluster.devices, cluster.link
    roomy = tuple(device.model_copy(update={"memory_bytes": TWICE * device.memory_bytes}) for device in devices)
    yield "twice the memory", {**asked, "devices": cluster.model_copy(update={"devices": roomy})}
    if link is not None and plan.K > 1:
        links = {"link": link, "between": cluster.between}
        faster = {name: None if one is None else _twice_as_fast(one) for name, one in links.items()}
        yield "twice the bandwidth", {**asked, "devices": cluster.model_copy(update=faster)}
    if link is not None:
        more = (*devices, *devices[-plan.replicas :])
        name = "a device more" if plan.replicas == 1 else f"{plan.replicas} devices more"
        yield name, {**asked, "devices": cluster.model_copy(update={"devices": more})}
    yield "twice the batch", {**asked, "devices": cluster, "batch_size": TWICE * plan.batch_size}


def _twice_as_fast(link: Link) -> Link:
    table = tuple((size, seconds / TWICE) for size, seconds in link.measured)
    return link.model_copy(update={"bytes_per_s": TWICE * link.bytes_per_s, "measured": table})


def _samples_per_s(keywords: dict[str, Any]) -> float | None:
    """Throughput of the best plan; None if there is none, or the profile does not reach so far."""
    from planner.from_profile import make_problem, plan_of

    named = {name: keywords.pop(name) for name in ("profile", "devices", "batch_size", "optimizer")}
    try:
        return plan_of(make_problem(**named, settings=keywords)).prediction.samples_per_s  # type: ignore[arg-type]
    except PlanError:
        return None
