"""How sure a prediction is: each cause counts, and the report says it."""

from __future__ import annotations

from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from executor.commands.option_words import in_settings
from planner import Plan, plan_from_profile
from planner.cost.layer_costs import CostModel
from planner.doubt import LESS_MEMORY, LESS_MEMORY_OF_PARTS, MODEL, NINE_OF_TEN, NORMAL, with_doubt
from planner.measured_ratios import PassRatios
from planner.plan.actions import make_schedule
from planner.plan.prediction import Doubt
from planner.plan.report import plan_report
from planner.plan.simulator import Durations, simulate, simulate_plan
from planner.scaled import scaled_plan
from profiler.datasheets import ERROR
from profiler.device import Cluster, Device, Link
from profiler.record import Estimate, Profile
from profiler.timing.sweeps import FEWEST_SWEEPS
from tests.planner.made_up import build_profile
from tests.planner.restricted import Asked, planned, problems

DEVICES = tuple(Device(name="cpu", kind="a", memory_bytes=2**40) for _ in range(2))


def profile_with(link_error: float = 0.0, message: int = 0, **changes: Any) -> Profile:
    rows = {("a", size): [(0.1 * size**0.8, 0.1 * size**0.8, 0.2, 8, 8, message, message)] * 4 for size in (1, 4)}
    made = build_profile(
        rows, links=(Link(latency_s=0.0, bytes_per_s=1e3, error=link_error),), weights=[(0.4, 0.3)] * 4
    )
    return made.model_copy(update={"costs": tuple(cost.model_copy(update=changes) for cost in made.costs)})


def doubt_of(profile: Profile, **settings: Any) -> Doubt:
    plan = plan_of(profile, **settings)
    assert plan.prediction.doubt is not None
    return plan.prediction.doubt


def plan_of(profile: Profile, batch_size: int = 8, **settings: Any) -> Plan:
    asked = {"stages": 2, "schedule": "1f1b", "micro_batches": 8, **settings}
    return plan_from_profile(profile, Cluster(devices=DEVICES), batch_size=batch_size, **asked)


def test_a_quiet_profile_leaves_the_models_doubt() -> None:
    quiet = doubt_of(profile_with())
    assert quiet.step_less == pytest.approx(MODEL)
    assert MODEL < quiet.step_more < MODEL + 0.01
    assert (quiet.memory_less, quiet.memory_more) == (LESS_MEMORY, 0.0)
    usual = doubt_of(profile_with(spread=0.015))
    assert usual.step_less + usual.step_more <= 0.12


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"spread": 0.2}, {}),
        ({"drift": 0.02}, {}),
        ({"slowdown": 0.5}, {}),
        ({}, {"batch_size": 16}),  # micro-batches of 2, between 1 and 4
        ({"link_error": 0.5, "message": 100}, {}),
    ],
)
def test_each_cause_counts(more: dict[str, Any], settings: dict[str, Any]) -> None:
    quiet, other = doubt_of(profile_with()), doubt_of(profile_with(**more), **settings)
    assert other.step_less > quiet.step_less + 0.01
    assert other.step_more > quiet.step_more + 0.01


def test_what_layers_have_by_chance_adds_in_squares_and_what_is_common_adds_up() -> None:
    quiet = doubt_of(profile_with()).step_less

    def more(**changes: Any) -> float:
        return doubt_of(profile_with(**changes)).step_less - quiet

    assert more(spread=0.2, drift=0.05) == pytest.approx(np.hypot(more(spread=0.2), more(drift=0.05)))
    assert more(slowdown=0.1, drift=0.05) == pytest.approx(more(slowdown=0.1) + more(drift=0.05))
    fewer, many = (profile_of(np.ones((2, count)), spread=0.2, drift=0.0) for count in (4, 16))
    chances = [doubt_of(profile, stages=1).step_less - quiet for profile in (fewer, many)]
    assert chances[0] == pytest.approx(2 * chances[1])


def test_a_data_sheet_has_its_own_error() -> None:
    profile = profile_with(spread=5.0).model_copy(update={"estimates": (sheet_of("a", 0.3),)})
    assert doubt_of(profile).step_less == pytest.approx(0.3)


def sheet_of(kind: str, error: float) -> Estimate:
    rates: dict[str, Any] = {f"{name}_flops_per_s": 1e12 for name in ("float32", "convolution", "half")}
    return Estimate(device_kind=kind, error=error, memory_bytes_per_s=1e12, launch_s=1e-6, **rates)


def test_moments_that_are_counted_together_leave_more_room() -> None:
    assert doubt_of(profile_with(), schedule="zb").memory_less == LESS_MEMORY_OF_PARTS


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_may_not_be_there_at_a_peak_leaves_more_room(schedule: str) -> None:
    """Half of the messages; and where all micro-batches are in flight at once, the gradients that come after that."""
    plan = plan_of(profile_with(message=40), schedule=schedule)
    assert plan.prediction.doubt is not None
    gradients = schedule == "gpipe"
    shares = [
        (one.receive_buffers / 2 + gradients * one.gradients) / (one.total - one.reserve)
        for one in plan.device_memories
    ]
    assert plan.prediction.doubt.memory_less == pytest.approx(max(shares))
    assert max(shares) > LESS_MEMORY


def test_the_report_says_it_and_asks_for_a_quiet_hour() -> None:
    calm, busy = str(plan_of(profile_with())), str(plan_of(profile_with(slowdown=0.45)))
    assert "in doubt: step " in calm
    assert "peak memory 95% to 100% of what is predicted" in calm
    assert "slower than usual" not in calm
    assert "the devices were 45% slower than usual while they were profiled" in busy.replace("\n  ", " ")
    assert 'cache="off"' in busy
    typed = plan_report(plan_of(profile_with(slowdown=0.45)), spoken=in_settings)
    assert "--cache off" in typed
    assert 'cache="off"' not in typed


def test_it_is_in_the_file() -> None:
    plan = plan_of(profile_with())
    again = Plan.parse_json(plan.to_json(), source="file", error=ValueError)  # type: ignore[arg-type]
    assert again == plan
    assert again.prediction.doubt == plan.prediction.doubt


@pytest.mark.parametrize(
    ("stages", "alone", "common"), [(1, 0.1, 0.0), (2, 0.1, 0.0), (2, 0.02, 0.03), (4, 0.15, 0.02), (2, 0.0, 0.05)]
)
def test_nine_of_ten_steps_lie_inside_and_the_interval_is_no_wider_than_that_takes(
    stages: int, alone: float, common: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers' laps that vary independently by `alone`, all of a step alike by `common` (standard deviations)."""
    monkeypatch.setattr("planner.doubt.MODEL", 0.0)
    monkeypatch.setattr("planner.doubt.OVERHEAD_S", 0.0)
    inside, taken, wide = [], [], []
    for seed in range(25):
        generator = np.random.default_rng(seed)
        true_s = generator.uniform(0.5, 1.5, (2, 24))  # forward and backward of each layer
        laps_s = true_s * (1 + alone * generator.standard_normal((FEWEST_SWEEPS, 2, 24)))
        plan = plan_from_profile(
            profile_of(np.median(laps_s, axis=0), spread=NORMAL * alone * COMBINED, drift=NINE_OF_TEN * common),
            Cluster(devices=DEVICES[:1] * stages), batch_size=8, stages=stages, schedule="1f1b",
            micro_batches=8, micro_batches_per_stage=1, recompute="never",
        )  # fmt: skip
        doubt, predicted_s = plan.prediction.doubt, plan.prediction.step_s
        assert doubt is not None
        for _ in range(32):
            step_s = (1 + common * generator.standard_normal()) * drawn_step_s(plan, true_s, alone, generator)
            inside.append(-doubt.step_less <= step_s / predicted_s - 1 <= doubt.step_more)
            taken.append(step_s / predicted_s)
        wide.append(doubt.step_less + doubt.step_more)
    least, most = np.quantile(taken, (0.05, 0.95))
    assert np.mean(inside) >= 0.9
    assert np.mean(wide) <= 1.75 * (most - least)


COMBINED = 1 / np.sqrt(2)
"""Relative deviation of a forward and a backward pass together, where each has 1."""


def profile_of(seconds: Any, spread: float, drift: float) -> Profile:
    rows = {("a", 1): [(forward, forward, backward, 8, 8, 0, 0) for forward, backward in seconds.T]}
    made = build_profile(rows, links=(Link(latency_s=0.0, bytes_per_s=1e9),), weights=None)
    changes = {"spread": spread, "drift": drift}
    return made.model_copy(update={"costs": tuple(cost.model_copy(update=changes) for cost in made.costs)})


def drawn_step_s(plan: Plan, true_s: Any, alone: float, generator: np.random.Generator) -> float:
    passes_s = true_s * (1 + alone * generator.standard_normal((plan.M, 2, true_s.shape[1])))
    forward, backward = (
        tuple(tuple(passes_s[:, way, stage.first_layer : stage.stop_layer].sum(axis=1)) for stage in plan.stages)
        for way in (0, 1)
    )
    nothing = ((0.0,) * plan.M,) * plan.K
    order = make_schedule("1f1b", stages=plan.K, micro_batches=plan.M, recompute=(False,) * plan.K)
    return simulate(order, Durations(forward, nothing, backward, nothing, nothing)).makespan_s


@pytest.mark.parametrize("between", [False, True])
def test_errors_of_links_that_are_given_count_and_all_reduce_with_them(between: bool) -> None:
    """Only links of the profile did, and only messages between stages."""
    rows = {("a", size): [(0.1 * size, 0.1 * size, 0.2, 8, 8, 100, 100)] * 4 for size in (1, 4)}
    profile = build_profile(rows, parameters=[(1000, True)], readers=[[0]] * 4)

    def wide(error: float, **settings: Any) -> float:
        link = Link(latency_s=0.0, bytes_per_s=1e3, error=0.0 if between else error)
        cluster = Cluster(devices=DEVICES, link=link)
        if between:
            far = link.model_copy(update={"error": error})
            cluster = cluster.model_copy(update={"between": far, "devices_per_host": 1})
        asked = {"schedule": "1f1b", "batch_size": 8, "micro_batches_per_stage": 1, **settings}
        doubt = plan_from_profile(profile, cluster, **asked).prediction.doubt
        assert doubt is not None
        return doubt.step_less

    for asked in ({"stages": 2}, {"stages": 1, "replicas": 2}):
        assert wide(0.5, **asked) > wide(0.1, **asked) > wide(0.0, **asked)


ON = [(False, False), (True, False), (False, True)]
"""Whether devices are on hosts, and whether ranks have chunks."""
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def doubted(plan: Plan, profile: Profile, links: list[Link]) -> Doubt:
    """The doubt of a plan whose profile or links are less sure than those that it was made from."""
    doubt = with_doubt(plan, CostModel(profile), links).prediction.doubt
    assert doubt is not None
    return doubt


def links_of(problem: Asked, error: float) -> list[Link]:
    found = [problem.devices.link or problem.profile.links[0], problem.devices.between]
    return [link.model_copy(update={"error": error}) for link in found if link is not None]


def simulated(plan: Plan, link: float, *, off: float = 0.0, of_optimizer: float = 0.0, every: int = 1) -> float:
    """How many times as long the plan's step is, by the simulator, with every so many-th stage off by that."""
    passes = [PassRatios.alike(1.0 if stage % every else 1 + off) for stage in range(plan.K)]
    optimizer = [1.0 if stage % every else 1 + of_optimizer for stage in range(plan.K)]
    return simulate_plan(scaled_plan(plan, passes, link, optimizer), events=False).step_s / plan.prediction.step_s


@pytest.mark.parametrize(("hosts", "chunks"), ON)
@given(data=st.data())
@settings(max_examples=8, suppress_health_check=SLOW)
def test_what_is_off_by_its_stated_error_lies_inside(hosts: bool, chunks: bool, data: st.DataObject) -> None:
    """Messages of GPipe half as fast: a step 46 % longer, where 27 were said; of interleaved chunks 48 and 19."""
    problem = data.draw(problems(most_layers=5, most_devices=3, hosts=hosts, chunks=chunks))
    plan, error = planned(problem), data.draw(st.sampled_from([0.05, 0.2, 0.5, 0.9]))
    if plan is None:
        return
    link = links_of(problem, error)
    doubt = doubted(plan, problem.profile, link)
    for off in (error, -error):
        assert -doubt.step_less - 1e-9 <= simulated(plan, 1 + off) - 1 <= doubt.step_more
    kinds = {cost.device_kind for cost in problem.profile.costs}
    sheets = problem.profile.model_copy(update={"estimates": tuple(sheet_of(kind, error) for kind in sorted(kinds))})
    doubt = doubted(plan, sheets, link)
    for off, of_optimizer in ((error, ERROR), (-error, -ERROR)):
        for every, sent in product((1, 2), (1 + error, 1 - error, 1.0)):  # all stages, or every second one
            longer = simulated(plan, sent, off=off, of_optimizer=of_optimizer, every=every)
            assert -doubt.step_less - 1e-9 <= longer - 1 <= doubt.step_more


@pytest.mark.parametrize(("hosts", "chunks"), ON)
@given(data=st.data())
@settings(max_examples=8, suppress_health_check=SLOW)
def test_what_is_less_sure_never_narrows_and_widens_where_it_is_used(
    hosts: bool, chunks: bool, data: st.DataObject
) -> None:
    """Of two sizes the larger alone counted, and between two measured sizes the laps of the upper one."""
    problem = data.draw(problems(most_layers=5, most_devices=3, hosts=hosts, chunks=chunks))
    plan = planned(problem)
    if plan is None:
        return
    shares = st.sampled_from([0.0, 0.02, 0.3])
    names = ("spread", "drift", "slowdown")
    costs = tuple(cost.model_copy(update={name: data.draw(shares) for name in names}) for cost in problem.profile.costs)
    profile, links = problem.profile.model_copy(update={"costs": costs}), links_of(problem, data.draw(shares))
    before = doubted(plan, profile, links)
    first = plan.stages[0]  # every step begins with its pass
    model = CostModel(profile)
    used = {near for size in plan.micro_batch_sizes for near in model.around(first.device.kind, size)[:2]}
    for name in names:
        kind, size = data.draw(st.sampled_from([(cost.device_kind, cost.micro_batch_size) for cost in costs]))
        more = tuple(
            cost.model_copy(update={name: getattr(cost, name) + 2.0})
            if (cost.device_kind, cost.micro_batch_size) == (kind, size)
            else cost
            for cost in costs
        )
        after = doubted(plan, profile.model_copy(update={"costs": more}), links)
        assert after.step_less >= before.step_less
        assert after.step_more >= before.step_more
        if kind == first.device.kind and (size in used or name != "spread"):
            assert after.step_more > before.step_more
    after = doubted(plan, profile, [link.model_copy(update={"error": link.error + 0.5}) for link in links])
    assert after.step_more >= before.step_more
    assert after.step_less >= before.step_less


def test_a_link_from_a_data_sheet_is_in_doubt_as_its_devices_are() -> None:
    """An all-reduce over it took three quarters of a step, whose doubt was 14 % where passes were off by half."""
    rows = {("a", 4): [(1e-3, 1e-3, 2e-3, 8, 8, 10**6, 10**6)] * 4}
    profile = build_profile(rows, parameters=[(4 * 10**8, True)], readers=[[0]] * 4, optimizer=(1e-12, 2.0))
    profile = profile.model_copy(update={"estimates": (sheet_of("a", ERROR),)})
    cluster = Cluster(devices=DEVICES, link=Link.of("pcie3"))
    asked: Any = {"batch_size": 8, "stages": 1, "replicas": 2, "micro_batches": 1, "micro_batches_per_stage": 1}
    plan = plan_from_profile(profile, cluster, **asked)
    doubt = plan.prediction.doubt
    assert doubt is not None
    assert doubt.step_less >= ERROR - 1e-9
    assert doubt.link_error == 0.0  # no line was found too far off
