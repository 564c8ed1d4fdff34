"""The search's arrays against sums over layers and micro-batches, one at a time; of bytes see test_ledger.py."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.from_profile import make_problem
from planner.plan.schedules import SCHEDULES, Objective
from planner.solve.tables import make_tables
from tests.planner.conftest import WHOLE

KINDS = ("a", "b")


def tables_of(profile, devices, *, batch_size, count, **asked):
    given_: Any = {"micro_batches": count, "micro_batches_per_stage": 1, "schedule": "gpipe", **asked}
    problem = make_problem(profile, devices, batch_size=batch_size, optimizer=None, settings=given_)
    (candidate,) = problem.candidates()
    return make_tables(problem, candidate), candidate.split.sizes


@pytest.mark.parametrize("schedule", WHOLE)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_seconds_of_ranges_are_sums_over_layers_and_micro_batches(profiles, oracle, device, schedule, data):
    profile = data.draw(profiles(most_layers=4))
    batch_size, count = data.draw(st.sampled_from([(8, 4), (10, 4), (5, 5), (7, 3)]))
    devices = [device(kind, 10**6) for kind in KINDS]
    tables, sizes = tables_of(profile, devices, batch_size=batch_size, count=count, schedule=schedule)
    cost = oracle(profile, tuple(devices), batch_size).cost
    layers = range(len(profile.layers))
    free_bytes = 10**6 - profile.reserve_bytes - batch_size * profile.input_bytes
    assert tables.limit == pytest.approx(np.full_like(tables.limit, free_bytes))
    for position, kind in enumerate(KINDS):
        for first, stop in itertools.combinations(range(len(layers) + 1), 2):
            inside = layers[first:stop]

            def between(sums, place=position, first=first, stop=stop):
                return sums[place][..., stop] - sums[place][..., first]

            def steady(name, kind=kind, inside=inside):
                return np.mean([sum(cost(kind, layer, size, name) for layer in inside) for size in sizes[:-1]])

            least_s = sum(
                min(cost(kind, layer, size, name) for size in sizes)
                for layer in inside
                for name in ("forward_s", "backward_s")
            )
            first_s = sum(
                cost(kind, layer, sizes[0], "forward_s") + min(cost(kind, layer, size, "backward_s") for size in sizes)
                for layer in inside
            )
            after_first_s = np.mean(
                [sum(cost(kind, layer, size, "forward_s") for layer in inside) for size in sizes[1:]]
            )
            rounds = SCHEDULES[schedule].objective is Objective.ROUNDS
            assert between(tables.passing_least) == pytest.approx(least_s)
            assert between(tables.passing) == pytest.approx(first_s if rounds else least_s)
            assert between(tables.forward) == pytest.approx(after_first_s if rounds else steady("forward_s"))
            assert between(tables.backward) == pytest.approx(steady("backward_s"))
            again = sizes[1:] if rounds else sizes[:-1]  # the first one is recomputed while its gradient is under way
            again_s = np.mean([sum(cost(kind, layer, size, "recompute_s") for layer in inside) for size in again])
            assert between(tables.steady_recompute) == pytest.approx(again_s)


def test_rules_and_equal_devices(profile_of, device):
    """Two equal devices are one class that runs two stages; the one that layers are pinned to is a class of its own."""
    row = (1, 1, 1, 1, 0, 2, 2)
    profile = profile_of({(kind, size): [row] * 4 for kind in KINDS for size in (1, 8)})
    devices = [device("a"), device("b"), device("a"), device("a")]
    tables, _ = tables_of(
        profile, devices, batch_size=8, count=8, keep_together=["blocks.1"], cut_at=["blocks.3"], pinned={"blocks.0": 2}
    )
    assert tables.capacity.tolist() == [2, 1, 1]
    assert tables.pinned.tolist() == [2, -1, -1, -1]
    assert tables.allowed.tolist() == [True, True, True, True, True]
    assert tables.demanded.tolist() == [0, 0, 0, 1, 1]
