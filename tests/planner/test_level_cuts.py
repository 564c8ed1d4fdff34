"""Cuts by which all ranks are done at about the same time: against all cuts there are."""

import itertools
import random

import numpy as np
import pytest

from planner.plan.schedules import Ring
from planner.solve.level_cuts import FEW_CUTS, Level, _moves


@pytest.mark.parametrize("seed", range(40))
def test_no_cuts_at_all_are_much_better(seed: int) -> None:
    chance = random.Random(seed)
    ring = Ring(chance.randint(2, 3), 2, folds=True)
    places = chance.randint(ring.stages, 11)
    kinds = [[[chance.choice([0.0, 0.3, 1.0, 2.0]) for _ in range(places)] for _ in range(2)] for _ in range(2)]
    classes = [chance.randrange(2) for _ in range(ring.ranks)]
    work_s, head_s = (
        np.array([np.append(0.0, np.cumsum(kinds[which][number])) for which in classes]) for number in range(2)
    )
    messages_s = np.array([chance.choice([0.0, 0.1, 1.0]) for _ in range(places + 1)])
    demanded = sorted(chance.sample(range(1, places), chance.choice([0, 0, 1])))

    def slowest_s(cuts: tuple[int, ...]) -> float:
        ends, done_s = [*itertools.pairwise((0, *cuts, places))], []
        for rank in range(ring.ranks):
            own = ring.stages_of(rank)
            before_s = sum(
                head_s[ring.rank_of(stage), ends[stage][1]]
                - head_s[ring.rank_of(stage), ends[stage][0]]
                + (0.0 if ring.is_turn(stage) else messages_s[ends[stage][1]])
                for stage in range(own[0])
            )
            done_s.append(before_s + sum(work_s[rank, ends[stage][1]] - work_s[rank, ends[stage][0]] for stage in own))
        return float(max(done_s))

    every = [cuts for cuts in itertools.combinations(range(1, places), ring.stages - 1) if set(demanded) <= set(cuts)]
    start = chance.choice(every)
    found = Level(work_s, head_s, messages_s, demanded, ring).found(start)
    assert found in every
    best_s = min(map(slowest_s, every))
    assert best_s <= slowest_s(found) <= max(best_s * 1.15, 1e-12)


def test_of_many_cuts_fewer_moves_are_looked_at() -> None:
    few, many = _moves(FEW_CUTS), _moves(FEW_CUTS + 1)
    assert len(many) < len(few) / 2
    assert {len(move) for move in many} == {FEW_CUTS + 1}
    assert all(any(move) for move in (*few, *many))
