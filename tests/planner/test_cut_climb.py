"""Where the search for cuts starts: against all cuts there are."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.rules import Rules
from planner.solve.allowed_cuts import AllowedCuts
from planner.solve.cut_climb import CutClimb
from planner.solve.deadline import NO_DEADLINE, Deadline
from planner.solve.device_orders import arrangements
from profiler.device import Cluster
from tests.planner.made_up import build_profile
from tests.planner.restricted import Asked, planned


def climb_of(allowed: list[bool], demanded: list[bool], stages: int) -> CutClimb:
    rules = SimpleNamespace(allowed=np.array(allowed), demanded=np.array(demanded))
    problem = SimpleNamespace(rules=rules, layers=len(allowed) - 1)
    split = SimpleNamespace(split=SimpleNamespace(count=1))
    plans: Any = SimpleNamespace(problem=problem, walks=1, stages=stages, candidate=split)
    return CutClimb(plans, None, NO_DEADLINE)


def test_balanced_cuts_have_the_fastest_slowest_stage() -> None:
    """Published rules cut like this; a search that starts there is never slower than these."""
    chance = random.Random(0)
    none = 0
    for _ in range(300):
        layers, stages = chance.randint(1, 8), chance.randint(1, 4)
        allowed = [True, *(chance.random() < 0.8 for _ in range(layers - 1)), True]
        demanded = [ok and 0 < place < layers and chance.random() < 0.2 for place, ok in enumerate(allowed)]
        sums = np.cumsum([0.0, *(chance.choice((0.0, 1.0, 2.5, 7.0)) for _ in range(layers))])
        every = [
            (*inner, layers)
            for inner in itertools.combinations([place for place in range(1, layers) if allowed[place]], stages - 1)
            if {place for place in range(layers) if demanded[place]} <= {*inner}
        ]
        cuts = AllowedCuts(
            Rules(np.array(allowed), np.array(demanded), np.zeros(layers, dtype=np.int64)), layers, stages
        )
        assert [*cuts.every()] == every
        found = cuts.balanced(sums)
        none += found is None
        assert (found is None) == (not every)
        if found is not None:
            assert found in every
            least = min(np.diff(sums[[0, *stops]]).max() for stops in every)
            assert np.diff(sums[[0, *found]]).max() <= least * (1 + 1e-9) + 1e-9
    assert 20 < none < 280


def test_where_all_cuts_are_tried_time_still_ends() -> None:
    """With 96 blocks on two devices a limit of 10 s took over 150: each cut's memory was counted, however late it was.

    Somebody else has a plan; without one, the search goes on until it has.
    """
    climb = climb_of([True] * 6, [False] * 6, 2)
    plans: Any = climb._plans
    asked = []

    def at_best_s(stops: Any, _: Any) -> float:
        asked.append(stops)
        climb._deadline = Deadline(0.0) if len(asked) == 3 else climb._deadline
        return float(stops[0])

    plans.at_best_s, plans.fitted = at_best_s, lambda *_: None
    assert climb._best_of_all([(0, 0)], below_s=9.0) == (None, 0.0)
    assert len(asked) == 3
    plans.tries_all = True
    assert climb._best_of_all([(0, 0)], below_s=np.inf) == (None, np.inf)
    assert len(asked) == 3 + 4


@pytest.mark.parametrize(("interrupted", "dispensable", "looks"), [(True, True, 3), (True, False, 4), (False, True, 4)])
def test_an_interrupt_leaves_all_cuts_where_another_schedule_may_have_a_plan(
    interrupted: bool, dispensable: bool, looks: int
) -> None:
    """Ctrl-C was heeded after 110 s: no cut had a plan that fits, and one stage a rank had."""
    climb = climb_of([True] * 6, [False] * 6, 2)
    plans: Any = climb._plans
    asked = []

    def at_best_s(stops: Any, _: Any) -> float:
        asked.append(stops)
        late: Any = SimpleNamespace(over=True, interrupted=interrupted)
        climb._deadline = late if len(asked) == 3 else climb._deadline
        return float(stops[0])

    plans.problem.dispensable = dispensable
    plans.at_best_s, plans.fitted, plans.tries_all = at_best_s, lambda *_: None, True
    assert climb._best_of_all([(0, 0)], below_s=np.inf)[0] is None
    assert len(asked) == looks


def test_orders_of_unlike_devices_are_all_there_are() -> None:
    """All permutations of single devices were gone through: of eleven equal ones and another for minutes."""
    chance = random.Random(1)
    for _ in range(200):
        available = [chance.randint(0, 3) for _ in range(chance.randint(1, 3))]
        length = chance.randint(1, 4)
        kinds = [kind for kind, number in enumerate(available) for _ in range(number)]
        assert [*arrangements(available, length)] == sorted({*itertools.permutations(kinds, length)})
    many = [*itertools.islice(arrangements([1023, 1], 1024), 3)]
    assert [order.index(1) for order in many] == [1023, 1022, 1021]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb"])
def test_devices_that_hold_nothing_do_not_hide_those_that_do(device: Any, schedule: str) -> None:
    """Of ten devices of unlike memory orders were tried that begin with the first ones: no plan was found."""
    profile = build_profile({("a", 1): [[1.0, 1.0, 1.0, 8, 0, 1, 1]] * 4}, weights=[(0.5, 0.5)] * 4)
    settings = {"schedule": schedule, "recompute": "never", "micro_batches_per_stage": 1}
    small = [device(memory_bytes=30 + number) for number in range(8)]
    large = [device(memory_bytes=500), device(memory_bytes=600)]
    of_all = planned(Asked(profile, Cluster(devices=(*small, *large)), 8, settings))
    of_large = planned(Asked(profile, Cluster(devices=tuple(large)), 8, settings))
    assert of_all is not None
    assert of_large is not None
    assert of_all.prediction.step_s <= of_large.prediction.step_s


@pytest.mark.parametrize(("unlike", "all_are_tried"), [(4, True), (7, False)])
def test_some_orders_of_devices_prove_nothing_of_all(unlike: int, all_are_tried: bool) -> None:
    """Three of seven devices have 210 orders, of which 52 are tried: few ways to cut, and yet no proof."""
    climb = climb_of([True] * 4, [False] * 4, 3)
    plans: Any = climb._plans
    plans.problem.classes = [
        SimpleNamespace(device=SimpleNamespace(memory_bytes=number), capacity=lambda _: 1) for number in range(unlike)
    ]
    plans.ranks, plans.candidate.replicas = 3, 1
    plans.forward_s = plans.backward_s = np.ones((1, unlike, 4))
    assert climb.tries_all_cuts == all_are_tried
    assert climb._orders[0] == (unlike - 1, unlike - 2, unlike - 3)
    assert all(len({*order}) == 3 for order in climb._orders)
