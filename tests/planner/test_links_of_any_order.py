"""What links take whatever the order of passes: of given stages, and at least of all cuts."""

import random
from collections import defaultdict
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from planner.from_profile import make_problem
from planner.kernel.any_order import any_order_s
from planner.kernel.makespan import SEND_B, SEND_F, B, F, W
from planner.kernel.turns import ways
from planner.plan.schedules import Ring
from planner.solve.chunk_candidates import candidates, plans_of
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import NO_DEADLINE
from profiler.device import Link
from tests.planner.made_up import COPIED, build_profile, copying

ROUNDING = 1e-9
CLOSE = 1e-5


def longest_s(seconds: np.ndarray, ring: Ring) -> tuple[float, float]:
    """Of ranks and of links, each by what is before its first work, its work, and what is after its last one."""
    stages = range(ring.stages)
    way: list[tuple[str, int, np.ndarray]] = []
    for stage in stages:
        way += [("F", stage, seconds[F, stage]), ("SEND_F", stage, seconds[SEND_F, stage])]
    for stage in reversed(stages):
        way += [("B", stage, seconds[B, stage]), ("SEND_B", stage, seconds[SEND_B, stage])]
    way = [one for one in way if (one[0], one[1]) not in {("SEND_F", ring.stages - 1), ("SEND_B", 0)}]
    places = {one[:2]: place for place, one in enumerate(way)}
    before = [sum(one[0] for *_, one in way[:place]) for place in range(len(way))]
    after = [sum(one[-1] for *_, one in way[place + 1 :]) + seconds[W, 0, -1] for place in range(len(way))]
    of_ranks = []
    for rank in range(ring.ranks):
        own = [*ring.stages_of(rank)]
        work_s, weights_s = seconds[[F, B]][:, own].sum(), seconds[W, own].sum()
        of_ranks.append(before[places["F", own[0]]] + work_s + max(weights_s, after[places["B", own[0]]]))
    links: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kind, step in (("SEND_F", 1), ("SEND_B", -1)):
        for stage in stages:
            if (kind, stage) in places and ring.rank_of(stage) != ring.rank_of(stage + step):
                links[ring.rank_of(stage), ring.rank_of(stage + step)].append(places[kind, stage])
    sets = [[place] for some in links.values() for place in some] + [*links.values()]
    of_links = [before[min(own)] + sum(way[one][2].sum() for one in own) + after[max(own)] for own in sets if own]
    return max(of_ranks), max(of_links, default=0.0)


@pytest.mark.parametrize("schedule", ["zb", "zb-v"])
def test_the_bound_of_all_cuts_is_that_of_the_best_ones_where_links_take_long(schedule: str, device: Any) -> None:
    """And no cuts' own bound is below what their links take."""
    by_links = 0
    for seed in range(20):
        chance = random.Random(seed)
        layers, chunks = chance.randint(6, 7), 2 if schedule == "zb-v" else 1
        rows = [(s := chance.uniform(0.2, 1), s, 2 * s, 0, 0, b := chance.randint(5, 60), b) for _ in range(layers)]
        rows[-1] = (*rows[-1][:5], 0, 0)
        copied = (0.0, 0.0) if chunks == 2 or seed % 2 else COPIED[seed % len(COPIED)]  # bounds of a V leave copies out
        link = copying(Link(latency_s=0.0, bytes_per_s=chance.choice([3.0, 20.0])), copied)
        profile = build_profile(
            {("a", 1): rows}, links=(link,), weights=[(chance.uniform(0, 0.6), 0) for _ in range(layers)]
        )
        count, ranks = chance.choice([3, 8]), 2 if chunks == 2 else chance.choice([2, 3])
        asked: Any = {"micro_batches": count, "micro_batches_per_stage": 1, "stages": ranks * chunks}
        asked |= {"schedule": schedule, "chunks": chunks}
        problem = make_problem(profile, (device(),) * ranks, batch_size=count, optimizer=None, settings=asked)
        (candidate,) = candidates(problem)
        plans: Any = plans_of(problem, candidate, NO_DEADLINE)
        ring, found = plans.ring, []
        for cuts in combinations(range(1, layers), ring.stages - 1):
            seconds = plans.seconds((*cuts, layers), (0,) * ranks)
            of_ranks_s, of_links_s = longest_s(seconds, ring)
            least_s = any_order_s(seconds, np.full(ring.stages, count), ways(ring))
            assert least_s >= max(of_ranks_s, of_links_s) * (1 - ROUNDING)
            found.append((max(of_ranks_s, of_links_s), of_links_s > of_ranks_s))
        best_s, is_link = min(found)
        by_links += is_link
        bound = CutBound(plans)
        bound.tightened(60, NO_DEADLINE)
        assert bound.halved(10_000, NO_DEADLINE, np.inf) == pytest.approx(best_s, rel=CLOSE)
    assert by_links >= 3
