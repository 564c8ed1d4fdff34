"""What a search tries when its queue has ended: the best candidate over fewer ranks, and more cuts near the best ones.

What the queue finds of a candidate depends on others: on how good its bound is when its turn comes, and on which plan
is the best by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from planner.solve import limits
from planner.solve.balance import TIE, Balance
from planner.solve.chunk_candidates import fewest_ranks, most_ranks, with_ranks
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.cut_climb import CutClimb
from planner.solve.device_orders import device_orders
from planner.solve.findings import Climbed, Findings
from planner.solve.first_plans import MARGIN, PROBES_CLIMBED, Waiting, fewest_of_each_size
from planner.solve.other_counts import promising
from planner.solve.problem import Candidate, Problem
from planner.solve.waiting_bounds import PROGRAMS_OF_HALVES

FEW_TO_SEARCH_AGAIN = 1_000
"""Micro-batches of stages up to which those like the best candidate are searched once more, and those beside it are
[chosen: 1 to 2 s]."""
MOST_ORDERS = 4
"""Orders of unlike devices that the best cuts are tried in with other M, beside their own [chosen]."""
TIMES_AT_LAST = 4
"""Cuts near the best ones that are tried at last, in those that were tried before [chosen: 0.5 s, and of densenet121 on
8 devices a step 3 % shorter]."""


def try_fewer_ranks(findings: Findings, made: Callable[[Problem, Candidate], Waiting | None]) -> None:
    """Search the best candidate over fewer ranks, too, where these may take no longer.

    They may where one layer takes much of a rank's share. Bounds of many ranks are loose there and come first, so that
    the search can end before those of few: of vgg16 on 8 devices a step was 1 % longer than on 4 of them.

    Args:
        findings: what was found.
        made: the candidate that waits; None where the model is too large for so many ranks.
    """
    plans = findings.best_plans
    if plans is None or plans.problem.settings.stages is not None:
        return
    probed: list[tuple[float, Waiting]] = []
    for ranks in range(plans.ranks - 1, fewest_ranks(plans.problem) - 1, -1):
        entry = made(plans.problem, with_ranks(plans.candidate, ranks, plans.ring.chunks))
        if findings.over or entry is None or entry.bound_s >= findings.reached_s:
            break
        probed.append((findings.first_plans.step_s(entry, findings.reached_s * MARGIN), entry))
    for step_s, entry in sorted(probed)[:PROBES_CLIMBED]:
        if step_s < np.inf:
            findings.search(entry)


def try_beside_the_best(findings: Findings, made: Callable[[Problem, Candidate], Waiting | None]) -> None:
    """Search the best plan's candidate with other M, and over half to twice its ranks, as long as plans become better.

    Candidates over few ranks wait behind those with the same M over more, and where memory is short what these take
    says nothing of them: of 5 layers that only one of 6 devices can hold a step was 10 % longer than with half its M,
    and of 20 on 8 devices, in a V, 40 % longer than over two ranks more.

    Args:
        findings: what was found.
        made: the candidate that waits; None where the model is too large for so many ranks.
    """
    before: float | None = None
    while findings.reached_s != before and not findings.over:
        before, plans, best = findings.reached_s, findings.best_plans, findings.best
        if plans is None or best is None or plans.stages * plans.candidate.split.count > FEW_TO_SEARCH_AGAIN:
            return
        beside = [_with_other_count(findings, plans, best, made)]
        if plans.problem.settings.stages is None:
            least = max(fewest_ranks(plans.problem), -(-plans.ranks // 2))
            most = min(most_ranks(plans.problem, plans.candidate), 2 * plans.ranks)
            beside += [
                _not_searched(findings, plans.problem, with_ranks(plans.candidate, ranks, plans.ring.chunks), made)
                for ranks in range(most, least - 1, -1)
            ]
        for entry in beside:
            if entry is not None and entry.bound_s < findings.reached_s and not findings.over:
                findings.search(entry)


def _not_searched(
    findings: Findings, problem: Problem, candidate: Candidate, made: Callable[[Problem, Candidate], Waiting | None]
) -> Waiting | None:
    """The candidate, if its cuts were not searched."""
    searched = any(climbed.plans.candidate == candidate for climbed in findings.climbs.values())
    return None if searched else made(problem, candidate)


def _with_other_count(
    findings: Findings, plans: ChunkPlans, best: Balance, made: Callable[[Problem, Candidate], Waiting | None]
) -> Waiting | None:
    """The candidate over as many ranks as the best plan with the M that makes its cuts fastest; None if none does."""
    stops = tuple(stage.stop for stage in best.stages)
    classes = tuple(stage.device_class for stage in best.stages[: plans.ranks])
    entries = {entry.plans.candidate: entry for entry in _over_as_many_ranks(findings, plans, made)}

    def step_s(candidate: Candidate) -> float:
        entry = entries[candidate]
        if findings.over or entry.bound_s >= findings.reached_s:
            return np.inf
        orders = dict.fromkeys([classes, *device_orders(entry.plans)[:MOST_ORDERS]])
        tried = [entry.plans.fitted(stops, one, findings.reached_s, thorough=False) for one in orders]
        return min((choice.step_s for choice in tried if choice is not None), default=np.inf)

    found = promising([*entries], step_s, lambda _: True, findings.reached_s)
    return None if found is None else entries[found]


def _over_as_many_ranks(
    findings: Findings, plans: ChunkPlans, made: Callable[[Problem, Candidate], Waiting | None]
) -> list[Waiting]:
    """Of each size of micro-batches the candidate with fewest of them, if it was not searched, in the order of M."""
    own, ring = plans.candidate, plans.ring
    alike = [
        with_ranks(one, ring.ranks, ring.chunks)
        for one in sorted(plans.problem.candidates(), key=lambda one: one.split.count)
        if (one.schedule, one.replicas) == (own.schedule, own.replicas) and most_ranks(plans.problem, one) >= ring.ranks
    ]
    entries = [_not_searched(findings, plans.problem, one, made) for one in alike]
    return fewest_of_each_size([entry for entry in entries if entry is not None])


def nearer(findings: Findings, problems: Iterable[Problem], first: Iterable[Candidate]) -> list[Problem]:
    """The problems with the M of the best plan and no more ranks, if that is not what they are; only small ones.

    Args:
        findings: what was found.
        problems: of the search.
        first: their candidates, over the most ranks.
    """
    plans = findings.best_plans
    if plans is None or findings.over:
        return []
    best = plans.candidate
    few = best.ring.stages * best.split.count <= FEW_TO_SEARCH_AGAIN
    if not few or all(one.split == best.split and one.ring.ranks <= best.ring.ranks for one in first):
        return []
    return [
        replace(
            problem,
            settings=replace(
                problem.settings,
                micro_batches=best.split.count,
                max_stages=best.ring.ranks * problem.settings.chunks,
            ),
        )
        for problem in problems
    ]


def go_over_the_best(findings: Findings, least_s: float, spent: bool) -> None:
    """Search the best candidate's cuts from its best bound, where ranks have several chunks and their own orders.

    How good a bound is when its cuts are searched depends on other candidates: of densenet121 on 8 devices a step was
    4 % longer.

    Args:
        findings: what was found.
        least_s: what no plan is below.
        spent: whether bounds took what they may.
    """
    plans = findings.best_plans
    if plans is None or plans.ring.chunks == 1 or plans.tries_all or least_s >= findings.reached_s:
        return
    if findings.over or (spent and plans.stages > limits.STAGES_OF_WORK):
        return
    bound = CutBound(plans)
    bound.tightened(PROGRAMS_OF_HALVES, findings.deadline)
    climb = CutClimb(plans, bound, findings.deadline)
    for choice in () if climb.tries_all_cuts else climb.found(findings.reached_s)[0]:
        findings.note(plans, choice)


def try_some_near_the_best(findings: Findings, least_s: float) -> None:
    """Where there is a gap, and that is soon done."""
    plans = findings.best_plans
    if plans is None or findings.over or least_s >= findings.reached_s * (1 - TIE):
        return
    climb = next(climbed.climb for climbed in findings.climbs.values() if climbed.plans is plans)
    if plans.stages * plans.candidate.split.count <= FEW_TO_SEARCH_AGAIN and not climb.tries_all_cuts:
        findings.note(plans, climb.kicked(TIMES_AT_LAST))
        _go_around(findings, climb)


def try_cuts_near_the_best(findings: Findings, again: Sequence[Climbed], least_s: float) -> None:
    """As long as there is time and a gap.

    Args:
        findings: what was found.
        again: what a search of those like the best candidate searched.
        least_s: what no plan is below.
    """
    climbs = sorted((*findings.climbs.values(), *again), key=lambda one: one.plans is not findings.best_plans)
    for number, climbed in enumerate(climbs):
        if findings.over or findings.best is None or least_s >= findings.reached_s * (1 - TIE):
            return
        if climbed.climb.tries_all_cuts:
            continue
        if number == 0:
            _go_around(findings, climbed.climb)
        if climbed.least_s < findings.reached_s:
            findings.note(climbed.plans, climbed.climb.kicked())


def _go_around(findings: Findings, climb: CutClimb) -> None:
    """Move cuts of the best plan, which this climb found, and single passes with each."""
    plans, best = findings.best_plans, findings.best
    if plans is not None and best is not None and plans.moves_passes:
        stops = tuple(stage.stop for stage in best.stages)
        classes = tuple(stage.device_class for stage in best.stages[: plans.ranks])
        findings.note(plans, climb.around(stops, classes, best.step_s))
