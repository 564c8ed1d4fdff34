"""Messages that their ends copy: what it costs them, and plans against all that there are, priced by themselves."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner import plan_from_profile
from planner.from_profile import make_problem
from planner.plan.simulator import Durations, simulate_plan
from planner.solve.all_schedules import balance_of_all
from planner.solve.balance import evaluate_s
from planner.solve.build_plan import make_plan
from planner.solve.chunk_candidates import candidates
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import Deadline
from planner.solve.work_bound import work_bound_s
from profiler.device import Link
from profiler.errors import PlanFileError
from tests.benchmarks.test_exhaustive_schedules import against_all_orders, against_all_plans, drawn
from tests.planner.made_up import COPIED, build_profile, copying
from tests.planner.restricted import problems

ROUNDING = 1e-9
MESSAGE_S = 0.4
ENDS = Link(latency_s=0.0, bytes_per_s=20.0, sender_share=0.5, receiver_share=0.25)


def two_stages(device: Any, link: Link, **asked: Any) -> Any:
    """Two layers of 1 s forward and 2 s backward, and 8 bytes between them."""
    rows = {("a", size): [(size, size, 2 * size, 0, 0, 8 * size, 8 * size), (size, size, 2 * size, 0, 0, 0, 0)]
            for size in (1, 2)}  # fmt: skip
    profile = build_profile(rows, links=(link,))
    given_: Any = {"batch_size": 3, "micro_batches": 3, "micro_batches_per_stage": 1, "schedule": "1f1b", **asked}
    return plan_from_profile(profile, [device(), device()], **given_)


def test_a_message_is_there_as_soon_but_its_ends_compute_later(device: Any) -> None:
    """One micro-batch takes as long as without copies; the others wait for the ends.

    stage 0  F0 copy . F1 copy . F2 copy .
    stage 1               . copy F0
    """
    plan = two_stages(device, ENDS, stages=2)
    assert plan.stages[0].copied == (0.5, 0.25)
    assert plan.stages[0].times_at(1).forward_s == 1
    assert plan.stages[0].times_at(1).send_forward_s == MESSAGE_S
    timeline = simulate_plan(plan)
    spans = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert spans["0F0"] == pytest.approx((0, 1.2))
    assert spans["0SEND_F0"] == pytest.approx((1.2, 1.3))
    assert spans["1F0"] == pytest.approx((1.3, 2.4))
    assert spans["1B0"] == pytest.approx((2.4, 4.6))  # and copies the gradient out
    assert spans["0B0"] == pytest.approx((4.7, 6.8))
    without = two_stages(device, copying(ENDS, (0.0, 0.0)), stages=2)
    ends = {str(event.action): event.end_s for event in simulate_plan(without).events}
    assert ends["0B0"] == pytest.approx(spans["0B0"][1])
    many: Any = {"stages": 2, "batch_size": 16, "micro_batches": 16, "schedule": "gpipe"}
    with_them, without = (two_stages(device, link, **many) for link in (ENDS, copying(ENDS, (0.0, 0.0))))
    once_s = 2 * (1 + 2 + MESSAGE_S)
    assert with_them.prediction.step_s == pytest.approx(once_s + 15 * (1.2 + 2.2))
    assert without.prediction.step_s == pytest.approx(once_s + 15 * (1 + 2))


def test_one_stage_copies_nothing(device: Any) -> None:
    plan = two_stages(device, ENDS, stages=1)
    assert plan.stages[0].copied == (0.0, 0.0)
    assert plan.prediction.step_s == pytest.approx(3 * 6)


def test_shares_that_leave_the_link_nothing_are_refused(device: Any) -> None:
    plan = two_stages(device, ENDS, stages=2)
    text = plan.to_json().replace("0.25\n", "0.5\n")
    with pytest.raises(PlanFileError, match=r"copied is \[0.5, 0.5\]; both shares together are less than 1"):
        type(plan).parse_json(text, source="here", error=PlanFileError)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_short_messages_are_copied_faster_also_where_layers_take_as_long(device: Any, count: int) -> None:
    """The bound knows of small micro-batches what part of a large one they take at least, layers and copies alike."""
    rows = {("a", size): [(1, 1, 2, 0, 0, 8 * size, 8 * size)] * 5 + [(1, 1, 2, 0, 0, 0, 0)] for size in (1, 2)}
    profile = build_profile(rows, links=(ENDS,))
    asked: Any = {"micro_batches": count, "micro_batches_per_stage": 1, "schedule": "interleaved", "chunks": 2}
    problem = make_problem(profile, [device(), device()], batch_size=count + 1, optimizer=None, settings=asked)
    (candidate,) = candidates(problem)
    plans = ChunkPlans(problem, candidate)
    least = min(plans.step_s((*inner, 6), (0, 0)) for inner in combinations(range(1, 6), plans.stages - 1))
    bound = CutBound(plans)
    assert bound.tightened(60, Deadline(None)) <= least * (1 + ROUNDING)
    assert bound.halved(1_000, Deadline(None), np.inf) <= least * (1 + ROUNDING)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_cuts_are_the_best_where_messages_take_as_long_as_stages(oracle: Any, device: Any, schedule: str) -> None:
    """Three stages must be: then links may be what limits a step, by what messages are under way."""
    by_links = 0
    for seed in range(40):
        chance = random.Random(seed)
        rows = [(s := chance.choice([0.25, 0.5, 1.0]), s, 2 * s, 0, 0, b := chance.randint(8, 60), b) for _ in range(6)]
        rows[-1] = (*rows[-1][:5], 0, 0)
        link = copying(Link(latency_s=0.0, bytes_per_s=8.0), chance.choice([COPIED[2], COPIED[-1], COPIED[-1]]))
        sizes = {("a", size): [[size * value for value in row] for row in rows] for size in (1, 2)}
        profile, devices, count = build_profile(sizes, links=(link,)), (device(),) * 3, chance.choice([6, 24])
        batch = count + chance.choice([0, 2])
        asked: Any = {"micro_batches": count, "micro_batches_per_stage": 1, "stages": 3, "schedule": schedule}
        plan = plan_from_profile(profile, devices, batch_size=batch, **asked)
        said, times = plan.prediction, Durations.of(plan)
        price = oracle(profile, devices, batch, "auto", 1, (schedule,)).step_s
        best_s = min(price((0, *cuts, 6), count, devices, schedule) for cuts in combinations(range(1, 6), 2))
        assert said.step_s == pytest.approx(best_s, rel=ROUNDING)
        assert said.lower_bound_s == pytest.approx(best_s, rel=ROUNDING)
        problem = make_problem(profile, devices, batch_size=batch, optimizer=None, settings=asked)
        assert work_bound_s(problem, next(problem.candidates())) <= best_s * (1 + ROUNDING)
        by_links += max(map(max, times.send_forward_s)) > max(map(max, times.forward_s))
    assert by_links >= 10


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-lean", "zb-h1", "zb"])
def test_of_all_plans_with_copies_none_is_faster(schedule: str) -> None:
    """1F1B and GPipe are among those of test_brute_force.py."""
    ended: Counter[str] = Counter()
    for seed in range(3000, 3060):
        one = drawn(schedule, seed, small=True)
        if any(one[0].links[0].copied):
            against = against_all_orders if schedule == "zb" else against_all_plans
            ended[against(seed, one)["ended"]] += 1
        if sum(ended.values()) == 12:
            break
    assert sum(ended.values()) - ended["undecided"] - ended["none fits"] >= 6, ended


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_search_and_the_report_price_plans_alike(data: st.DataObject) -> None:
    """On several hosts each boundary has the copies of its own link."""
    asked = data.draw(problems(most_layers=6, most_devices=3, hosts=True))
    assert asked.devices.link is not None
    ends = copying(asked.devices.link, (0.5, 0.25))
    far = copying(asked.devices.between or ends, data.draw(st.sampled_from(COPIED)))
    given_: Any = asked.settings
    problem = make_problem(
        asked.profile,
        asked.devices.model_copy(update={"link": ends, "between": far}),
        batch_size=asked.batch_size,
        optimizer=None,
        settings=given_,
    )
    for whole in (problem, replace(problem, hosts=None)):
        found = balance_of_all(replace(whole, hosts=None))
        assume(found is not None)
        assert found is not None
        step_s = evaluate_s(whole, found.candidate, found.stages, found.orders)
        plan = make_plan(whole, replace(found, step_s=step_s, lower_bound_s=0.5 * step_s))
        assert plan.prediction.step_s == pytest.approx(step_s, rel=ROUNDING)
        assert plan.prediction.step_s == simulate_plan(plan).step_s
