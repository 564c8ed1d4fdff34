"""What a run measured mends the profile: one that is wrong by a factor a kind of device and link comes back."""

from __future__ import annotations

from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Plan, from_profile, plan_from_profile
from planner.plan.simulator import simulate_plan
from planner.refine import MEASURED_ERROR, refined
from profiler.device import Cluster, Device, Link
from profiler.errors import ArgumentError, ForeignPlanError, PlanFileError
from profiler.record import Profile
from tests.planner.made_up import build_profile

FORWARD = {"a": 1.7, "b": 0.8}
BACKWARD = {"a": 1.4, "b": 0.6}
LINK = 3.0
DEVICES = tuple(Device(name=f"d{number}", kind=kind, memory_bytes=2**30) for number, kind in enumerate("aabb"))


def known(forward: dict[str, float], backward: dict[str, float], link: float, parameter_bytes: int = 64) -> Profile:
    """Of eight unlike layers on two kinds of device, whose seconds are so many times the true ones."""
    rows = {
        (kind, size): [
            (
                1e-3 * (1 + layer % 3) * (size + 1) * own * forward[kind],
                1e-3 * (1 + layer % 3) * (size + 1) * own * forward[kind],
                2e-3 * (1 + layer % 2) * (size + 1) * own * backward[kind],
                *(10, 5, 4000 * size, 4000 * size),
            )
            for layer in range(8)
        ]
        for kind, own in (("a", 1.0), ("b", 1.6))
        for size in (1, 4)
    }
    links = (Link(latency_s=1e-5 * link, bytes_per_s=1e8 / link),)
    return build_profile(rows, parameters=[(parameter_bytes, True)] * 8, readers=[[k] for k in range(8)], links=links)


ONES = {"a": 1.0, "b": 1.0}


def frame(plan: Plan, ratio: Any) -> pandas.DataFrame:
    """As `Pipeline.measured()` gives it; `ratio(stage, what)` is measured by predicted."""
    rows = []
    for number, stage in enumerate(plan.stages):
        times = stage.times[0]
        for what in ("forward_s", "recompute_s", "backward_s", "send_forward_s", "send_backward_s"):
            predicted_s = getattr(times, what)
            rows.append((number, what, predicted_s, predicted_s * ratio(number, what)))
        rows.append((number, "peak_bytes", 1.0, float("nan")))
    return pandas.DataFrame(rows, columns=["stage", "what", "predicted", "measured"])


def made(profile: Profile, **settings: Any) -> Plan:
    cluster = Cluster(devices=DEVICES, link=profile.links[0])
    return plan_from_profile(profile, cluster, batch_size=16, micro_batches=16, schedule="1f1b", **settings)


def truth_of(plan: Plan) -> Any:
    """What the true profile says of the wrong one's plan."""
    kinds = [stage.device.kind for stage in plan.stages]

    def ratio(stage: int, what: str) -> float:
        if what.startswith("send"):
            return 1 / LINK
        return 1 / (BACKWARD if what == "backward_s" else FORWARD)[kinds[stage]]

    return ratio


@pytest.mark.parametrize("stages", [2, 4])
def test_a_wrong_profile_comes_back(stages: int) -> None:
    right, wrong = known(ONES, ONES, 1.0), known(FORWARD, BACKWARD, LINK)
    plan = made(wrong, stages=4)  # both kinds of device are seen
    found = refined(plan, frame(plan, truth_of(plan)), wrong, DEVICES, micro_batches=16, schedule="1f1b", stages=stages)
    for cost, true in zip(found.profile.costs, right.costs, strict=True):
        for what in ("forward_s", "recompute_s", "backward_s"):
            assert getattr(cost, what) == pytest.approx(getattr(true, what))
    assert found.profile.links[0].transfer_s(1e6) == pytest.approx(right.links[0].transfer_s(1e6))
    best = made(right, stages=stages)
    assert found.plan.prediction.step_s == pytest.approx(best.prediction.step_s)
    assert found.now_s >= (best.prediction.step_s if stages == 4 else 0.0) * (1 - 1e-9)


def test_layers_have_the_ratio_of_their_stage() -> None:
    profile = known(ONES, ONES, 1.0)
    plan = made(profile, stages=2)
    ratios = {0: 1.5, 1: 1.0}
    found = plan.refined(frame(plan, lambda stage, what: 1.0 if "send" in what else ratios[stage]))
    stop = plan.stages[0].stop_layer
    kind = plan.stages[0].device.kind
    for cost, was in zip(found.profile.costs, profile.costs, strict=True):
        if cost.device_kind == kind:
            assert cost.forward_s == pytest.approx(was.forward_s * (1.5 if cost.layer < stop else 1.0))
    slower = [1.5 * plan.stages[0].times[0].forward_s, plan.stages[1].times[0].forward_s]
    assert found.now_s > plan.prediction.step_s
    assert found.now_s >= 16 * max(slower)


def test_a_plan_that_was_right_stays() -> None:
    plan = made(known(ONES, ONES, 1.0))
    found = plan.refined(frame(plan, lambda *_: 1.0), micro_batches=16, schedule="1f1b")
    assert found.now_s == pytest.approx(simulate_plan(plan).step_s)
    assert not found.worth_it
    assert found.gain == pytest.approx(0.0, abs=1e-9)
    assert "no other plan is faster" in str(found) or "not worth a change" in str(found)


def test_a_stage_that_is_three_times_slower_is_worth_a_change() -> None:
    plan = made(known(ONES, ONES, 1.0), stages=2)
    found = plan.refined(
        frame(plan, lambda stage, what: 3.0 if stage == 0 and "send" not in what else 1.0),
        micro_batches=16,
        schedule="1f1b",
    )
    assert found.worth_it
    assert str(found).endswith("worth a change")
    assert found.plan.stages[0].stop_layer < plan.stages[0].stop_layer or found.plan.K != plan.K


def test_cuts_that_were_asked_for_stay() -> None:
    """The plan of one device was said to be the better one."""
    plain = known(ONES, ONES, 1.0)
    traced = plain.model_copy(
        update={"sample": plain.sample.model_copy(update={"cut_at": ("blocks.2.in", "blocks.7.in")})}
    )
    plan = made(traced, stages=2, cut_at=["blocks.2.in"])
    seen = frame(plan, lambda stage, what: 100.0 if "send" in what else 0.1)
    assert plan.refined(seen, micro_batches=16, schedule="1f1b", cut_at=[]).plan.K == 1
    found = plan.refined(seen, micro_batches=16, schedule="1f1b").plan
    assert 2 in [stage.first_layer for stage in found.stages]
    assert 7 not in [stage.first_layer for stage in found.stages]


def test_a_module_inside_a_layer_is_no_cut_that_stays() -> None:
    """Profiles of before, traced to be cut where no cut is safe, were refused by a setting that nobody gave."""
    plain = known(ONES, ONES, 1.0)
    layers = list(plain.layers)
    layers[2] = layers[2].model_copy(update={"module_paths": ("blocks.2", "blocks.2.out")})
    sample = plain.sample.model_copy(update={"cut_at": ("blocks.2.out", "blocks.5.in")})
    traced = plain.model_copy(update={"layers": tuple(layers), "sample": sample})
    with pytest.raises(ArgumentError, match="which begins inside layer 2"):
        made(traced, cut_at=["blocks.2.out"])
    plan = made(traced, stages=2, cut_at=["blocks.5.in"])
    found = plan.refined(frame(plan, lambda *_: 1.0), micro_batches=16, schedule="1f1b").plan
    assert 5 in [stage.first_layer for stage in found.stages]


def sharing(memory_bytes: int) -> Plan:
    """Of two replicas that share the optimizer's state."""
    row = (1.0, 1.0, 2.0, 20, 10, 16, 16)
    profile = build_profile(
        {("a", size): [[size * value for value in row]] * 4 for size in (1, 16)},
        parameters=[(640, True)] * 4,
        readers=[(layer,) for layer in range(4)],
        optimizer=(0.001, 2.0),
        links=(Link(latency_s=0.0, bytes_per_s=1e6),),
    )
    devices = [Device(name=f"d{number}", kind="a", memory_bytes=memory_bytes) for number in range(2)]
    return plan_from_profile(profile, devices, batch_size=16, replicas=2, shard_optimizer=True)


@pytest.mark.parametrize("memory_bytes", [13000, 10**6])
def test_replicas_go_on_sharing_the_state_of_the_optimizer(memory_bytes: int) -> None:
    """What fitted by that was said to fit no longer, or became slower by measuring."""
    plan = sharing(memory_bytes)
    found = plan.refined(frame(plan, lambda *_: 1.0))
    assert found.plan.shard_optimizer
    assert found.plan.prediction.step_s == pytest.approx(plan.prediction.step_s)


def test_what_was_measured_stays_where_the_search_finds_slower_plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(known(ONES, ONES, 1.0))
    slower = made(known(ONES, ONES, 1.0), stages=1)
    assert slower.prediction.step_s > plan.prediction.step_s
    monkeypatch.setattr(from_profile, "plan_from_profile", lambda *_, **__: slower)
    found = plan.refined(frame(plan, lambda *_: 1.0))
    assert found.plan is plan
    assert not found.gain
    assert plan.refined(frame(plan, lambda *_: 1.0), stages=1).plan is slower  # as it was asked for


def test_what_cannot_be_used_is_refused() -> None:
    profile = known(ONES, ONES, 1.0)
    plan = made(profile, stages=2)
    seen = frame(plan, lambda *_: 1.0)
    with pytest.raises(ArgumentError, match="does not know its profile; pass profile="):
        Plan.parse_json(plan.to_json(), source="file", error=ArgumentError).refined(seen)
    with pytest.raises(ForeignPlanError, match="not made from this profile"):
        refined(plan, seen, known(FORWARD, ONES, 1.0))
    with pytest.raises(ArgumentError, match="no column 'what'"):
        plan.refined(seen.drop(columns="what"))
    with pytest.raises(ArgumentError, match="no pass of any stage"):
        plan.refined(seen.assign(measured=float("nan")))
    with pytest.raises(ArgumentError, match="no pass of any stage"):  # an OverflowError
        plan.refined(seen.assign(measured=[10**400] * len(seen)))
    for stage in (-1, 0.5, float("nan"), "0"):  # a stage of -1 was the last one, the others ended in a TypeError
        with pytest.raises(ArgumentError, match="stages are counted from 0"):
            plan.refined(seen.assign(stage=stage))
    with pytest.raises(ArgumentError, match="the others are seconds"):
        plan.refined(seen.assign(measured="fast"))
    with pytest.raises(ForeignPlanError, match=r"was predicted to be .* and the plan predicts"):
        plan.refined(seen.assign(predicted=2 * seen["predicted"]))
    with pytest.raises(ForeignPlanError, match="forward_s of stage 7, and the plan has 2 stages"):
        plan.refined(seen.assign(stage=7))


def test_a_plan_like_itself_is_searched() -> None:
    """Of a plan with replicas, chunks or few micro-batches, others were searched only: its own was no choice."""
    right = known(ONES, ONES, 1.0)
    cluster = Cluster(devices=DEVICES[:2] * 2, link=right.links[0])
    for settings in (
        {"replicas": 2, "stages": 2, "micro_batches": 8},
        {"schedule": "interleaved", "chunks": 2, "micro_batches": 16},
        {"stages": 4, "micro_batches": 4, "micro_batches_per_stage": 1},
    ):
        plan = plan_from_profile(right, cluster, batch_size=16, **settings)
        found = plan.refined(frame(plan, lambda *_: 1.0))
        assert found.plan.replicas == plan.replicas
        assert found.plan.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


@given(
    st.sampled_from([1, 2]),
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6),
    st.floats(0.1, 10.0),
)
def test_the_same_plan_takes_what_was_measured(
    replicas: int, schedule: str, factors: list[float], whole: float
) -> None:
    """Two replicas' all-reduce was scaled in the new plan alone: the same cuts promised 22 % less."""
    cuts = {"cut_at": ["blocks.2.in", "blocks.5.in", "blocks.6.in"], "stages": 4, "micro_batches": 4}
    settings: Any = {"replicas": replicas, "recompute": "never", "micro_batches_per_stage": 1, **cuts}
    settings |= {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    right = known(ONES, ONES, 1.0, parameter_bytes=2_000_000)
    cluster = Cluster(devices=DEVICES[:2] * 4, link=right.links[0])
    plan = plan_from_profile(right, cluster, batch_size=16, **settings)
    seen = frame(plan, lambda stage, what: factors[4 if what.startswith("send") else stage])
    whole_s = simulate_plan(plan).makespan_s
    rows = [*seen.itertuples(index=False), (-1, "makespan_s", whole_s, whole_s * whole)]
    found = plan.refined(pandas.DataFrame(rows, columns=seen.columns), right, cluster, **settings)
    assert found.plan.prediction.step_s == pytest.approx(found.now_s, rel=1e-9)
    assert found.gain == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.floats(0.3, 5.0), min_size=3, max_size=3), st.floats(0.0, 1.0))
def test_splitting_a_backward_pass_is_scaled_in_both_alike(factors: list[float], more: float) -> None:
    """What it costs was scaled with the one pass in the plan and with the other in the profile: the same plan paid."""
    plain = known(ONES, ONES, 1.0)
    costs = tuple(
        cost.model_copy(update={"weight_s": 0.4 * cost.backward_s, "split_s": more * cost.backward_s})
        for cost in plain.costs
    )
    right = plain.model_copy(update={"costs": costs})
    cluster = Cluster(devices=DEVICES[:2] * 2, link=right.links[0])
    settings: Any = {
        "schedule": "zb-h1", "stages": 4, "micro_batches": 4, "micro_batches_per_stage": 1, "recompute": "never",
        "cut_at": ["blocks.2.in", "blocks.4.in", "blocks.6.in"],
    }  # fmt: skip
    plan = plan_from_profile(right, cluster, batch_size=16, **settings)
    weights = (0.4 + more) / (1 + more)  # of the backward pass, of which the whole is no less than a part
    by = {"forward_s": factors[0], "backward_s": (1 - weights) * factors[1] + weights * factors[2]}
    seen = frame(plan, lambda _, what: by.get(what, 1.0))
    passes_s = [stage.times[0].weight_s for stage in plan.stages]
    rows: list[Any] = [*seen.itertuples(index=False)]
    rows += [(number, "weight_s", pass_s, pass_s * factors[2]) for number, pass_s in enumerate(passes_s)]
    found = plan.refined(pandas.DataFrame(rows, columns=seen.columns), right, cluster, **settings)
    assert found.plan.prediction.step_s == pytest.approx(found.now_s, rel=1e-9)
    assert not found.gain
    assert not found.worth_it


@pytest.mark.parametrize("makespan", ["x", "0.5", True])
def test_a_makespan_that_is_no_number_is_refused(makespan: object) -> None:
    """It ended in a TypeError of Python's."""
    right = known(ONES, ONES, 1.0)
    plan = made(right)
    seen = frame(plan, lambda *_: 1.0).astype(object)
    rows = [*seen.itertuples(index=False), (-1, "makespan_s", 1.0, makespan)]
    with pytest.raises(ArgumentError, match="of makespan_s it is -1, and the others are seconds"):
        plan.refined(pandas.DataFrame(rows, columns=seen.columns), right)


def test_what_passes_do_not_explain_is_in_the_mended_step() -> None:
    """Passes scatter, so a step takes longer than their medians say: T5's took 8 % longer than was mended."""
    plan = made(known(ONES, ONES, 1.0), stages=2)
    seen = frame(plan, truth_of(plan))
    found = refined(plan, seen, plan.profile, micro_batches=16, schedule="1f1b", stages=2)
    whole_s = 1.08 * (found.now_s - plan.prediction.optimizer_s)
    whole = pandas.DataFrame([[-1, "makespan_s", simulate_plan(plan).makespan_s, whole_s]], columns=seen.columns)
    seen = pandas.concat([seen, whole])
    longer = refined(plan, seen, plan.profile, micro_batches=16, schedule="1f1b", stages=2)
    assert longer.now_s - plan.prediction.optimizer_s == pytest.approx(whole_s)
    assert longer.gain == pytest.approx(found.gain)
    assert longer.plan.prediction.step_s == pytest.approx(1.08 * found.plan.prediction.step_s)


@pytest.mark.parametrize("seed", range(4))
def test_links_of_a_cluster_are_those_of_the_new_plan(seed: int) -> None:
    """By the profile's own, faster link a plan that was right was said to be 9 % too slow."""
    profile = known(ONES, ONES, 1.0)
    slow = profile.links[0].slowed(4.0 + 20 * seed)
    cluster = Cluster(devices=DEVICES[:2], link=slow)
    asked: Any = {"schedule": "1f1b", "micro_batches_per_stage": 1}
    plan = plan_from_profile(profile, cluster, batch_size=16, **asked)
    measured = frame(plan, lambda *_: 1.0)
    for found in (plan.refined(measured, **asked), plan.refined(measured, profile, cluster, **asked)):
        assert found.gain == pytest.approx(0.0, abs=1e-9)
        assert found.plan.prediction.step_s == pytest.approx(plan.prediction.step_s)
    if plan.K > 1:
        of_file = Plan.parse_json(plan.to_json(), source="plan", error=PlanFileError)
        with pytest.raises(ArgumentError, match="pass devices="):
            of_file.refined(measured, profile)


@pytest.mark.parametrize(("seen", "left"), [(True, MEASURED_ERROR), (False, 0.5)])
def test_a_link_from_a_data_sheet_is_less_in_doubt_once_messages_were_seen(seen: bool, left: float) -> None:
    cluster = Cluster(devices=DEVICES[:2], link=Link.of("10gbe"))
    asked: Any = {"schedule": "1f1b", "stages": 2, "micro_batches_per_stage": 1}
    plan = plan_from_profile(known(ONES, ONES, 1.0), cluster, batch_size=16, **asked)
    measured = frame(plan, lambda stage, what: 1.5 if seen or not what.startswith("send") else float("nan"))
    found = plan.refined(measured, **asked).plan.cluster
    assert found is not None
    assert found.link is not None
    assert found.link.error == left
    hosts = cluster.model_copy(update={"between": Link.of("hdr"), "devices_per_host": 1})
    far = plan_from_profile(known(ONES, ONES, 1.0), hosts, batch_size=16, **asked)
    both = far.refined(frame(far, lambda *_: 1.5), **asked).plan.cluster
    assert both is not None
    assert {link.error for link in (both.link, both.between) if link is not None} == {0.5}
