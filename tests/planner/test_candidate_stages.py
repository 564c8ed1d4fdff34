"""Stages worth looking at hold every plan that is fast enough, and their bound is below all plans: by brute force."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.kernel.candidate_stages import IMPOSSIBLE, KEEPS, make_arcs
from planner.kernel.front import before_bounds, may_reach, step_bound_s
from planner.plan.schedules import SCHEDULES
from planner.solve.tables import make_tables
from tests.planner.conftest import WHOLE

STAGES, ROUNDING = 3, 1e-9


def tables_of(profile, devices, *, batch_size, count, **asked):
    given_: Any = {"micro_batches": count, "micro_batches_per_stage": 1, "schedule": "gpipe", **asked}
    problem = make_problem(profile, devices, batch_size=batch_size, optimizer=None, settings=given_)
    (candidate,) = problem.candidates()
    return make_tables(problem, candidate)


def need_of(arcs, number, first, stop, device=0):
    """What the stage of layers [first, stop) must do; `number` is its own from the end, 1 for the last."""
    variant = number - 1 if arcs.by_number else 0
    if stop - first > arcs.length[variant, device, stop]:
        return IMPOSSIBLE
    return arcs.need[arcs.offset[variant, device, stop] + stop - first - 1]


@pytest.mark.parametrize("schedule", WHOLE)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_no_fast_plan_is_lost_and_none_is_below_the_bound(profiles, oracle, device, schedule, data):
    profile = data.draw(profiles(kinds=("a",), most_layers=5))
    batch_size, count = data.draw(st.sampled_from([(4, 4), (8, 4), (10, 4), (7, 5), (8, 8), (9, 7), (11, 9), (13, 8)]))
    mode = data.draw(st.sampled_from(["auto", "never", "always"]))
    layers = len(profile.layers)
    roomy = oracle(profile, (device(),), batch_size)
    sizes = roomy.sizes(count)
    first = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(first + 1, layers))
    limit = int(roomy.memory("a", first, stop, sizes, sizes, [])) + data.draw(st.integers(-2, 20))
    devices = (device("a", max(1, limit)),) * STAGES
    tried = oracle(profile, devices, batch_size, mode, 1, (schedule,))
    plans = {}
    for inside in range(min(STAGES, layers)):
        for inner in itertools.combinations(range(1, layers), inside):
            step_s = tried.step_s((0, *inner, layers), count, None, schedule)
            if step_s is not None:
                plans[0, *inner, layers] = step_s
    tables = tables_of(profile, devices, batch_size=batch_size, count=count, schedule=schedule, recompute=mode)
    for below_s in (np.inf, np.median([*plans.values()]) * (1 + ROUNDING)) if plans else (np.inf,):
        arcs = make_arcs(tables, below_s)
        bound_s = step_bound_s(arcs, before_bounds(arcs)[0, -1])
        assert may_reach(arcs) or bound_s == np.inf
        for cuts, step_s in plans.items():
            if step_s < below_s:
                assert bound_s <= step_s * (1 + ROUNDING)
                stages = list(itertools.pairwise(cuts))
                for number, (begin, end) in enumerate(reversed(stages), start=1):
                    assert need_of(arcs, number, begin, end) != IMPOSSIBLE, (cuts, begin, end)
        assert plans or bound_s == np.inf or mode == "auto"  # segments are looked at later, and may not fit


@pytest.mark.parametrize("schedule", WHOLE)
def test_a_stage_that_fits_as_it_is_keeps(profile_of, oracle, device, schedule):
    """Stages of GPipe need as much wherever they are; with others the last ones have fewer micro-batches in flight."""
    all_in_flight = SCHEDULES[schedule].keeps_all
    profile = profile_of(
        {
            ("a", size): [[size * value for value in (1, 1, 1, 30 + layer, 5, 2, 2)] for layer in range(4)]
            for size in (1, 8)
        }
    )
    memory = oracle(profile, (device(),), 8).memory
    sizes = [1] * 8
    limit = int(memory("a", 1, 3, sizes, sizes if all_in_flight else sizes[:2], []))  # one of them just fits
    devices = (device("a", limit),) * STAGES
    arcs = make_arcs(tables_of(profile, devices, batch_size=8, count=8, schedule=schedule), np.inf)
    found = set()
    for number in (1, 2, 3):
        held = sizes if all_in_flight else sizes[:number]
        for first, stop in itertools.combinations(range(5), 2):
            need = need_of(arcs, number, first, stop)
            if need != IMPOSSIBLE:
                assert (need == KEEPS) == (memory("a", first, stop, sizes, held, []) <= limit), (number, first, stop)
                found.add(need)
    assert len(found) == 2


def test_no_stage_breaks_a_rule(profile_of, device):
    """Layers that stay together, a cut that must be, layers of one device."""
    row = (1, 1, 1, 1, 0, 2, 2)
    profile = profile_of({(kind, size): [row] * 5 for kind in "ab" for size in (1, 8)})
    asked = {"keep_together": ["blocks.1.in", "blocks.2.in"], "cut_at": ["blocks.3"], "pinned": {"blocks.4": 1}}
    arcs = make_arcs(tables_of(profile, [device("a"), device("b")], batch_size=8, count=8, **asked), np.inf)
    listed = {
        (which, first, stop)
        for which in (0, 1)
        for first, stop in itertools.combinations(range(6), 2)
        if need_of(arcs, 1, first, stop, which) != IMPOSSIBLE
    }
    free = {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (3, 4)}
    assert listed <= {(which, *ends) for which in (0, 1) for ends in free} | {(1, 3, 5), (1, 4, 5)}
    assert {(0, 0, 3), (1, 0, 3), (1, 3, 5)} <= listed
