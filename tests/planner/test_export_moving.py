"""Cuts and recompute moved to what an engine can have: against every such plan, listed one by one."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from planner.export.moving import Form, _overflow, _with_cuts, moved
from planner.export.target import Recompute
from planner.export.units import Units
from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from planner.plan.stage import Segment
from planner.planned_for import problem_of
from profiler.device import Cluster, Link
from profiler.errors import ArgumentError, InfeasibleError
from profiler.work import Work

LAYERS = 6


@st.composite
def planned(draw, profile_of, device):
    """A plan whose devices are short of memory, and where an engine may cut."""
    work = [draw(st.integers(1, 9)) / 8 for _ in range(LAYERS)]
    kept = [draw(st.integers(1, 40)) for _ in range(LAYERS)]
    sent = [draw(st.integers(1, 8)) for _ in range(LAYERS)]
    rows = {
        ("a", size): [
            [w * size, w * size, 2 * w * size, k * size, 4, s * size, s * size]
            for w, k, s in zip(work, kept, sent, strict=True)
        ]
        for size in (1, 8)
    }
    for table in rows.values():
        table[-1][5:] = [0, 0]
    link = Link(latency_s=0.01, bytes_per_s=1e3)
    profile = profile_of(rows, links=(link,))
    stages = draw(st.integers(2, 3))
    most = draw(st.integers(20, 400) | st.integers(10**5, 10**6))
    cluster = Cluster(devices=(device(memory_bytes=most),) * stages, link=link)
    if draw(st.booleans()):  # where only some boundaries leave a host
        far = Link(latency_s=draw(st.sampled_from([0.01, 1.0])), bytes_per_s=draw(st.sampled_from([1.0, 8.0])))
        cluster = cluster.model_copy(update={"between": far, "devices_per_host": draw(st.integers(1, 2))})
    try:
        plan = plan_from_profile(
            profile,
            cluster,
            batch_size=8,
            stages=stages,
            micro_batches=4,
            micro_batches_per_stage=1,
            schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        )
    except InfeasibleError:
        plan = None
    positions = draw(st.sets(st.integers(1, LAYERS - 1), min_size=stages - 1))
    if plan is not None and len(positions) >= stages and draw(st.booleans()):
        positions -= {plan.stages[0].stop_layer}  # else it often stays as it is
    return profile, plan, frozenset(positions)


def units_at(positions):
    order = sorted(positions)
    paths = tuple(f"blocks.{n}" for n in range(len(order) + 1))
    return Units(paths, {"blocks": paths}, {p: n + 1 for n, p in enumerate(order)}, LAYERS)


def recomputes_all(plan: Plan) -> bool:
    return all(
        sum(part.stop - part.first for part in stage.recompute) == stage.stop_layer - stage.first_layer
        for stage in plan.stages
    )


def every_plan(plan: Plan, profile, form: Form):
    """Step times of all plans of that form that fit: each planned with nothing left to choose but what it keeps."""
    problem = problem_of(plan, profile)
    nothing: tuple[Segment, ...] = ()
    choices = (form.segments,) if recomputes_all(plan) else (lambda first, stop: nothing, form.segments)
    for cuts in itertools.combinations(sorted(form.positions or ()), plan.K - 1):
        for segments_of in choices:
            made = _with_cuts(problem, plan, cuts, segments_of)
            if not _overflow(made):
                yield made.prediction.step_s


@pytest.mark.parametrize("recompute", [Recompute.STAGES, Recompute.UNITS, Recompute.ANY])
def test_no_plan_of_the_form_is_faster(recompute, profile_of, device):
    @settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(planned(profile_of, device))
    def check(drawn):
        profile, plan, positions = drawn
        if plan is None:
            return
        form = Form(positions, recompute, units_at(positions), "it", "blocks")
        listed = list(every_plan(plan, profile, form))
        try:
            found = moved(plan, form, profile)
        except InfeasibleError:
            assert not listed
            return
        assert found.plan.prediction.doubt is not None
        if form.holds(plan):
            assert found.plan is plan
            return
        assert form.holds(found.plan)
        assert found.original_s == pytest.approx(plan.prediction.step_s)
        memories = [(stage.memory.total, stage.device.memory_bytes) for stage in found.plan.stages]
        assert all(total <= most for total, most in memories)
        assert {stage.device.kind for stage in found.plan.stages} == {"a"}
        assert found.plan.prediction.step_s <= min(listed, default=float("inf")) * (1 + 1e-9)

    check()


def test_cuts_that_move_lie_where_few_bytes_leave_a_host(profile_of, device):
    """They were laid for the link inside a host: a step of GPipe took up to 1.4 times as long as another's."""
    rows = {("a", 1): [[1.0, 1.0, 2.0, 1, 0, sent, sent] for sent in (9, 1, 9, 9, 9, 0)]}
    near, far = Link(latency_s=0.01, bytes_per_s=1e3), Link(latency_s=0.01, bytes_per_s=1.0)
    hosts = Cluster(devices=(device(),) * 2, link=near, between=far, devices_per_host=1)
    asked: Any = {"batch_size": 4, "micro_batches": 4, "micro_batches_per_stage": 1, "schedule": "gpipe", "stages": 2}
    profile = profile_of(rows, links=(near,)).model_copy(update={"work": Work(forward_flops=1e9, dtype="float32")})
    plan = plan_from_profile(profile, hosts, **asked, cut_at=["blocks.5"])
    positions = frozenset({2, 3, 4})
    made = moved(plan, Form(positions, Recompute.ANY, units_at(positions), "it", "blocks"), plan.profile)
    assert made.plan.stages[0].stop_layer == 2
    assert made.original_s == pytest.approx(plan.prediction.step_s)
    assert made.plan.prediction.device_flops_per_s == pytest.approx(3e9 * made.plan.prediction.samples_per_s / 2)


def test_what_recomputes_everything_goes_on_to_do_so(profile_of, device):
    """It went without, and the export said that a step takes less than planned."""
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    profile = profile_of(
        {("a", size): [[value * size for value in row]] * (LAYERS - 1) + [[*row[:5], 0, 0]] for size in (1, 8)},
        links=(Link(latency_s=0.01, bytes_per_s=1e3),),
    )
    plan = plan_from_profile(
        profile, [device()] * 2, batch_size=8, schedule="gpipe", stages=2, micro_batches=8, recompute="always"
    )
    own = plan.stages[0].stop_layer
    positions = frozenset({own - 1})
    for recompute in (Recompute.STAGES, Recompute.UNITS):
        found = moved(plan, Form(positions, recompute, units_at(positions), "it", "blocks"), profile)
        assert recomputes_all(found.plan)
        assert found.plan.prediction.step_s >= found.original_s


def test_without_a_profile_what_must_move_is_said(profile_of, device):
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    profile = profile_of({("a", size): [[value * size for value in row]] * LAYERS for size in (1, 8)})
    plan = plan_from_profile(profile, [device()] * 2, batch_size=8, stages=2, micro_batches=8)
    (cut,) = [stage.stop_layer for stage in plan.stages[:-1]]
    form = Form(frozenset({cut + 1}), Recompute.ANY, None, "it", "blocks")
    with pytest.raises(ArgumentError, match=r"cuts inside of blocks must move for it, .* pass profile=\.\.\."):
        moved(plan, form, None)
    assert [stage.stop_layer for stage in moved(plan, form, profile).plan.stages] == [cut + 1, LAYERS]
    nowhere = Form(frozenset(), Recompute.ANY, None, "it", "blocks")
    with pytest.raises(InfeasibleError, match="this model has 0 such places where K = 2 stages need 1; plan with sta"):
        moved(plan, nowhere, profile)
