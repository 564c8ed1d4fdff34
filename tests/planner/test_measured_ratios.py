"""Tables of random measurings, sound and damaged: the refined profile says what they say, or an error does."""

from itertools import pairwise
from math import isfinite
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pandas
import pytest

from planner import Plan, from_profile, plan_from_profile
from planner.cost.layer_costs import fingerprint_of
from planner.plan.simulator import simulate_plan
from planner.plan.stage import Segment
from planner.planned_for import as_it_is_s, evaluated, problem_of
from planner.solve.build_plan import make_plan
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, PlanError
from profiler.record import Profile
from tests.planner.made_up import build_profile

LAYERS, SIZES = 8, (1, 8)
COLUMNS = ["stage", "what", "predicted", "measured"]
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe", "stages": 2},
    {"schedule": "1f1b", "stages": 4},
    {"schedule": "interleaved", "chunks": 2, "stages": 4},
    {"schedule": "zb-h1", "stages": 3},
    {"schedule": "zb", "stages": 2},
    {"schedule": "zb-v", "chunks": 2, "stages": 8},
)


def random_profile(random: Random) -> Profile:
    """Of layers whose backward passes have all to no gradients of parameters, on two kinds of device."""
    work = [(random.uniform(1, 3) * 1e-3, random.uniform(1, 4) * 1e-3) for _ in range(LAYERS)]
    rows = {
        (kind, size): [[pace * (size + 0.3) * s for s in (f, 1.1 * f, b)] + [10, 5, 400, 400] for f, b in work]
        for kind, pace in (("a", 1.0), ("b", 1.7))
        for size in SIZES
    }
    link = Link(latency_s=1e-5, bytes_per_s=1e7)
    weights = [(random.choice([0.0, 0.3, 0.6, 1.0]), 0.5) for _ in range(LAYERS)]
    profile = build_profile(rows, links=(link,), weights=weights)
    more = random.choice([0.0, 0.1, 0.5])
    costs = tuple(cost.model_copy(update={"split_s": more * cost.weight_s}) for cost in profile.costs)
    return profile.model_copy(update={"costs": costs})


def random_plan(random: Random, profile: Profile) -> Plan:
    """On one or two kinds of device, with micro-batches of one size or two; layers in segments are recomputed."""
    kinds = random.choice(["aaaa", "aabb"])
    devices = tuple(Device(name=f"d{number}", kind=kind, memory_bytes=2**30) for number, kind in enumerate(kinds))
    cluster = Cluster(devices=devices, link=profile.links[0])
    asked = {"micro_batches_per_stage": 1, "micro_batches": random.choice([4, 8]), **random.choice(SCHEDULES)}
    plan = plan_from_profile(profile, cluster, batch_size=random.choice([16, 18]), **asked)
    problem, cuts = problem_of(plan, profile, cluster), [stage.stop_layer for stage in plan.stages[:-1]]
    ends = {position for position in range(1, LAYERS) if random.random() < 0.5}
    segments = {(stage.first_layer, stage.stop_layer): segments_in(stage, ends) for stage in plan.stages}
    recomputes = random.random() < 0.5
    made = evaluated(problem, plan, cuts, lambda first, stop: segments[first, stop] if recomputes else ())
    return make_plan(problem, made).made_from(profile, cluster)


def segments_in(stage: Any, ends: set[int]) -> tuple[Segment, ...]:
    """The stage's layers, parted at these positions."""
    places = [stage.first_layer, *sorted(ends & {*range(stage.first_layer + 1, stage.stop_layer)}), stage.stop_layer]
    return tuple(Segment(first=first, stop=stop) for first, stop in pairwise(places))


def table_of(random: Random, plan: Plan) -> pandas.DataFrame:
    """As `Pipeline.measured()` gives it, with any times, and now and then without a pass."""
    whole_s, slower = simulate_plan(plan).makespan_s, random.uniform(0.3, 4)
    rows = [(-1, "makespan_s", whole_s, whole_s * slower)]
    for number, stage in enumerate(plan.stages):
        for what in ("forward_s", "recompute_s", "backward_s", "weight_s", "send_forward_s", "send_backward_s"):
            predicted_s = fmean(getattr(stage.times_at(size), what) for size in plan.micro_batch_sizes)
            if random.random() < 0.9:
                rows.append((number, what, predicted_s, predicted_s * random.uniform(0.3, 4)))
        rows.append((number, "peak_bytes", 1.0, float("nan")))
    return pandas.DataFrame(rows, columns=COLUMNS)


@pytest.mark.parametrize("seed", range(24))
def test_the_refined_profile_says_of_the_plan_what_was_measured(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights were bounded by the whole layer by layer in the one and by stage in the other: 1.6 % apart."""
    random = Random(seed)
    profile = random_profile(random)
    plan = random_plan(random, profile)
    monkeypatch.setattr(from_profile, "plan_from_profile", lambda *_, **__: plan)
    for _ in range(4):
        found = plan.refined(table_of(random, plan))
        assert plan.cluster is not None
        cluster = plan.cluster.model_copy(update={"link": found.profile.links[0]})
        same = plan.model_copy(update={"profile_fingerprint": fingerprint_of(found.profile)})
        assert as_it_is_s(problem_of(same, found.profile, cluster), same) == pytest.approx(found.now_s, rel=1e-9)
        assert all(0 <= cost.weight_s <= cost.backward_s for cost in found.profile.costs)


ASKED: Any = {"schedule": "zb-h1", "micro_batches": 4, "micro_batches_per_stage": 1, "stages": 2}
DAMAGES: tuple[Any, ...] = (
    None, float("nan"), float("inf"), -float("inf"), -1, 0, 0.5, 2, 10**400, 1e-320, 1e-9, 1e9, 1e300, 1e308, True, "x",
    "forward_s", "makespan_s", "skip_to_1_send_forward_s", b"forward_s", [1], 1j, pandas.NA, pandas.NaT, np.float32(3),
    np.int64(1), np.bool_(True),
)  # fmt: skip


def two_stages() -> Plan:
    profile = random_profile(Random(0))
    devices = [Device(name=f"d{number}", kind="a", memory_bytes=2**30) for number in range(2)]
    return plan_from_profile(profile, Cluster(devices=tuple(devices), link=profile.links[0]), batch_size=16, **ASKED)


def damaged(random: Random, table: pandas.DataFrame) -> pandas.DataFrame:
    table = table.astype(object)
    for _ in range(random.randint(1, 3)):
        table.iat[random.randrange(len(table)), random.randrange(len(COLUMNS))] = random.choice(DAMAGES)
    match random.randrange(8):
        case 0:
            return pandas.concat([table, table])
        case 1:
            return table.drop(columns=random.choice(COLUMNS))
        case 2:
            return pandas.concat([table, table[[random.choice(COLUMNS)]]], axis=1)
        case 3:
            return table.sample(frac=random.random(), random_state=random.randrange(100))
        case 4:
            whole = table[table["what"].map(lambda what: isinstance(what, str) and what == "makespan_s")]
            return pandas.concat([table, whole.assign(measured=random.choice(DAMAGES[3:]))])
        case _:
            return table


def test_damaged_tables_are_refined_or_refused() -> None:
    """Errors of Python's, pandas' and the link's came of them."""
    random, plan = Random(0), two_stages()
    refused = 0
    for _ in range(150):
        table = damaged(random, table_of(random, plan))
        try:
            found = plan.refined(table, **ASKED)
        except PlanError:
            refused += 1
            continue
        assert isfinite(found.now_s)
        assert isfinite(found.plan.prediction.step_s)
        found.plan.to_json()
    assert 50 < refused < 140


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            (0, "forward_s", None, 1e308),
            r"forward_s of stage 0 took 1e\+308 seconds, where .* are predicted: .* 1e\+09",
        ),
        ((0, "send_forward_s", None, 1e-300), "send_forward_s of stage 0 took 1e-300 seconds, where"),
        ((0, "send_forward_s", 1e308, 1e308), "was predicted to be 1e.308, and the plan predicts"),
        ((-1, "makespan_s", 1e-300, 1e-290), "makespan_s, by what passes took, took 1e-290 seconds, where"),
        ((0, pandas.NA, 1.0, 1.0), "a row of <NA>, which is no text"),
        ((0, "makespan_s", 1.0, 1.0), "of makespan_s it is -1"),
    ],
)
def test_what_no_run_measures_is_refused(row: Any, message: str) -> None:
    plan = two_stages()
    table = table_of(Random(0), plan).astype(object)
    of_row = (table["stage"] == row[0]) & (table["what"] == row[1]) if isinstance(row[1], str) else table.index == 1
    known = table[of_row]
    number, what, predicted_s, seconds = row
    if predicted_s is None:
        predicted_s = known["predicted"].iloc[0]
    new = pandas.DataFrame([(number, what, predicted_s, seconds)], columns=COLUMNS, dtype=object)
    with pytest.raises(PlanError, match=message):
        plan.refined(pandas.concat([table[~of_row], new]), **ASKED)


def test_two_tables_in_one_are_refused() -> None:
    """The makespan, of which there were two, was passed over without a word."""
    plan = two_stages()
    table = table_of(Random(0), plan)
    with pytest.raises(ArgumentError, match=r"two rows of makespan_s of stage -1; pass what .* of one call"):
        plan.refined(pandas.concat([table, table]), **ASKED)
