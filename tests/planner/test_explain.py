"""What a plan says of itself and of others, against plans made for the purpose."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from planner import bottleneck
from planner.explain import what_if
from planner.from_profile import plan_from_profile
from planner.plan.plan import Plan
from planner.plan.simulator import Durations, simulate
from planner.plan.units import seconds_text
from profiler.device import Cluster, Link
from profiler.errors import ArgumentError, ForeignPlanError, PlanFileError
from tests.planner.made_up import build_profile

FORMATS = Path(__file__).resolve().parents[1] / "data" / "formats"


@pytest.fixture
def profile(profile_of):
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    return profile_of(
        {("a", size): [[value * size * (1 + layer % 3) for value in row] for layer in range(6)] for size in (1, 8)},
        parameters=[(64, True)] * 6,
        readers=[(layer,) for layer in range(6)],
        optimizer=(0.001, 2.0),
        links=(Link(latency_s=0.01, bytes_per_s=1e6),),
    )


def loaded(plan):
    """As from a file."""
    return Plan.parse_json(plan.to_json(), source="plan", error=PlanFileError)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_neighbouring_cuts_cost_what_their_plans_cost(profile, device, schedule):
    plan = plan_from_profile(profile, [device()] * 3, batch_size=24, micro_batches=12, stages=3, schedule=schedule)
    frame = plan.explain(profile)
    cuts = [stage.stop_layer for stage in plan.stages[:-1]]
    assert set(frame["bottleneck"]) - {""}
    for stage, cut in enumerate(cuts):
        for column, moved in (("cut_earlier_s", cut - 1), ("cut_later_s", cut + 1)):
            paths = [f"blocks.{position}" for position in [*cuts[:stage], moved, *cuts[stage + 1 :]]]
            if len(set(paths)) < len(paths) or moved in (0, 6):
                assert math.isnan(frame[column][stage])
                continue
            other = plan_from_profile(
                profile, [device()] * 3, batch_size=24, micro_batches=12, stages=3, schedule=schedule, cut_at=paths
            )
            assert frame[column][stage] == pytest.approx(other.prediction.step_s)
            assert frame[column][stage] >= plan.prediction.step_s * (1 - 1e-9)


def test_memory_binds_where_a_stage_recomputes_or_is_full(profile, device):
    heavy = [parameter.model_copy(update={"size_bytes": 10**6}) for parameter in profile.parameters]
    profile = profile.model_copy(update={"parameters": tuple(heavy)})  # recompute makes no room for one more
    asked: dict[str, Any] = {"batch_size": 24, "micro_batches": 12, "stages": 3, "cut_at": ["blocks.2", "blocks.4"]}
    roomy = plan_from_profile(profile, [device()] * 3, **asked)
    assert not roomy.explain(profile)["memory_binds"].any()
    needs = [stage.memory.total for stage in roomy.stages]
    full = [device(memory_bytes=needs[0]), device(), device()]
    plan = plan_from_profile(profile, full, **asked, pinned={f"blocks.{2 * stage}": stage for stage in range(3)})
    assert loaded(plan).explain()["memory_binds"].tolist() == [False] * 3
    assert plan.explain(profile)["memory_binds"].tolist() == [True, False, False]
    short = [device(memory_bytes=needs[0] - 1), device(), device()]
    plan = plan_from_profile(profile, short, **asked, pinned={f"blocks.{2 * stage}": stage for stage in range(3)})
    assert plan.explain()["memory_binds"].tolist() == [True, False, False]


def test_a_foreign_profile_explains_nothing(profile, device):
    plan = plan_from_profile(profile, [device()] * 2, batch_size=16)
    assert "cut_later_s" not in loaded(plan).explain()
    assert loaded(plan).profile is pickle.loads(pickle.dumps(plan)).profile is None
    assert loaded(plan) == plan == pickle.loads(pickle.dumps(plan))
    with pytest.raises(ForeignPlanError, match="not made from this profile"):
        plan.explain(profile.model_copy(update={"reserve_bytes": 1}))
    assert plan.profile is profile


@pytest.mark.parametrize("given", ["profile.json", 3, {}])
def test_what_is_no_profile_is_named(profile, device, given):
    """An empty one was taken for none, and a path for a profile."""
    plan = plan_from_profile(profile, [device()] * 2, batch_size=8, stages=2, schedule="gpipe")
    seen = pandas.DataFrame({"stage": [0], "what": ["forward_s"], "predicted": [1.0], "measured": [1.0]})
    for asked in (lambda: plan.explain(given), lambda: plan.refined(seen, given)):
        with pytest.raises(ArgumentError, match=r"profile is .*; pass a Profile"):
            asked()


def test_a_plan_explained_on_devices_that_it_has_not_is_refused(profile, device):
    """It ended in a ValueError of a list."""
    link, slow = Link(latency_s=0.01, bytes_per_s=1e6), Link(latency_s=0.02, bytes_per_s=1e6)
    hosts = Cluster(devices=(device(),) * 2, link=link, between=slow, devices_per_host=1)
    plan = plan_from_profile(profile, hosts, batch_size=8, stages=2, schedule="gpipe")
    smaller = device().model_copy(update={"memory_bytes": device().memory_bytes // 2})
    others = hosts.model_copy(update={"devices": (smaller,) * 2})
    with pytest.raises(ForeignPlanError, match=r"device 0 of its cluster, and here that is .a. with 500000000"):
        plan.explain(profile, others)


def test_a_loaded_plan_is_priced_on_its_own_devices(profile_of, device):
    """Positions are those in a list of devices that a file does not hold."""
    rows = {
        (kind, size): [[cost * size] * 3 + [1, 1, 1, 1]] * 6
        for kind, cost in (("a", 1.0), ("b", 9.0))
        for size in (1, 8)
    }
    profile = profile_of(rows, links=(Link(latency_s=0.01, bytes_per_s=1e6),))
    hosts = Cluster(devices=(device("b"), device("a"), device("a")), link=profile.links[0], devices_per_host=2)
    plan = plan_from_profile(profile, hosts, batch_size=8, stages=2, schedule="gpipe")
    assert plan.positions == ((1,), (2,))
    own, read = plan.explain(), loaded(plan).explain(profile)
    assert read["cut_later_s"][0] == own["cut_later_s"][0] > plan.prediction.step_s


def test_other_numbers_of_processes_are_compared():
    plan = Plan.load(FORMATS / "plan-2-placed.json")
    other = plan.model_copy(update={"positions": ((0, 1), (2, 3))})
    frame = plan.compare(other)
    assert (frame["this"]["processes"], frame["other"]["processes"]) == ("2,3 0,1", "0,1 2,3")
    assert "processes" not in Plan.load(FORMATS / "plan-2.json").compare(Plan.load(FORMATS / "plan-2.json")).index


def test_plans_compare(profile, device):
    one = plan_from_profile(profile, [device()] * 2, batch_size=16, stages=1)
    two = plan_from_profile(profile, [device()] * 2, batch_size=16, stages=2)
    frame = one.compare(two)
    assert frame["other / this"]["K"] == 2
    assert frame["other / this"]["step_s"] == two.prediction.step_s / one.prediction.step_s


def test_what_if_is_what_planning_says(profile, device):
    frame = what_if(
        profile,
        [device()] * 3,
        {"stages": [1, 2, 3], "link_bytes_per_s": [1e3, 1e6], "memory_limit": [None, 10]},
        batch_size=24,
    )
    assert len(frame) == 12
    assert frame[frame["memory_limit"] == 10]["reason"].str.contains("no plan fits").all()
    fits = frame[frame["memory_limit"] != 10].set_index(["stages", "link_bytes_per_s"])
    for stages in (1, 2, 3):
        expected = plan_from_profile(profile, [device()] * 3, batch_size=24, stages=stages).prediction.step_s
        assert fits["step_s"][stages, 1e6] == pytest.approx(expected)
    assert fits["step_s"][2, 1e3] > fits["step_s"][2, 1e6]


def test_what_if_of_clusters(profile, device):
    """A cluster has no length of its own, and the table said so by a TypeError."""
    clusters = [Cluster(devices=tuple([device()] * count)) for count in (1, 2)]
    frame = what_if(profile, clusters[0], {"devices": [*clusters, [device()] * 3]}, batch_size=24)
    assert list(frame["devices"]) == [1, 2, 3]
    assert (frame["K"] <= frame["chunks"] * frame["devices"]).all()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_memory_over_time_peaks_at_the_predicted_peak(profile, device, schedule, recompute):
    plan = plan_from_profile(
        profile, [device()] * 3, batch_size=26, micro_batches=12, stages=3, schedule=schedule, recompute=recompute
    )
    frame = plan.memory_over_time()
    for index, stage in enumerate(plan.stages):
        rows, memory = frame[frame["stage"] == index], stage.memory
        assert rows["bytes"].max() == pytest.approx(memory.total)
        assert rows["bytes"].iloc[-1] == pytest.approx(memory.total - memory.activations - memory.transient)
        assert np.all(np.diff(rows["time_s"]) > 0)


def test_three_sentences_say_what_limits_what_is_next_and_what_would_help(profile, device):
    plan = plan_from_profile(profile, [device()] * 3, batch_size=24, micro_batches=12, stages=3)
    explanation = plan.explain()
    limit, next_best, help_ = explanation.sentences
    computing = explanation["forward_s"] + explanation["backward_s"]
    assert limit.startswith(f"Stage {computing.argmax()} on ")
    moved = explanation[["cut_earlier_s", "cut_later_s"]].min().min()
    assert seconds_text(moved) in next_best
    assert help_.startswith("What would help most is ")
    assert str(explanation).startswith(limit)
    assert f"<p>{limit}</p>" in explanation._repr_html_()
    assert "stage" in str(explanation.head(1))
    (one, _) = loaded(plan).explain().sentences
    assert one == limit.replace(" (60% of it in layer 5, layer5)", "")  # which its profile says


def test_it_says_why_a_stage_is_slow(profile_of, device):
    """Its dearest layer, which no other cut makes shorter, and what it recomputes; a better cut is said to be one."""
    row = (0.25, 0.25, 0.5, 100, 4, 8, 8)
    layers = [row] * 7 + [(2.0, 2.0, 4.0, *row[3:])]
    rows = {("a", size): [[value * size for value in one] for one in layers] for size in (1, 8)}
    profile = profile_of(rows, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    asked: dict[str, Any] = {"batch_size": 16, "micro_batches": 16, "schedule": "gpipe", "stages": 4}
    by_hand: dict[str, Any] = {**asked, "cut_at": ["blocks.2", "blocks.4", "blocks.6"]}
    limit, next_best, _ = plan_from_profile(profile, [device()] * 4, **by_hand).explain().sentences
    assert limit.startswith("Stage 3 on cpu limits the step: it computes 6.75 s for each of 16 micro-batches, ")
    assert "longer than the mean (89% of it in layer 7, layer7), and" in limit
    assert next_best.startswith("The next-best cut after stage 2 is one layer later: the step would take ")
    assert next_best.endswith("% less.")
    limit, _, _ = plan_from_profile(profile, [device()] * 4, **by_hand, recompute="always").explain().sentences
    assert "(25% of it to recompute; 67% of it in layer 7, layer7)" in limit


def test_the_rule_for_micro_batches_is_named_where_it_costs_most(profile, device):
    """The report said that without M >= 4K a step takes half as long, and the sentences advised a larger batch."""
    plan = plan_from_profile(profile, [device()] * 4, batch_size=8)
    assert plan.unused is not None
    assert plan.unused.looser is not None
    rule = plan.unused.looser.micro_batches * plan.unused.looser.chunks // plan.unused.looser.stages
    free = plan_from_profile(profile, [device()] * 4, batch_size=8, micro_batches_per_stage=rule)
    gain = free.prediction.samples_per_s / plan.prediction.samples_per_s - 1
    help_ = plan.explain().sentences[2]
    assert f"fewer micro-batches a stage (micro_batches_per_stage={rule})" in help_
    assert f"{gain:.0%}" in help_


def test_what_another_number_of_stages_brings_is_not_said_of_memory(profile, device):
    """Of a plan that was told its K, twice the memory and twice the batch were each said to bring eight times more."""
    slow = profile.model_copy(update={"links": (Link(latency_s=30.0, bytes_per_s=1e6),)})
    told = plan_from_profile(slow, [device()] * 2, batch_size=24, stages=2)
    free = plan_from_profile(slow, [device()] * 2, batch_size=24)
    assert free.prediction.samples_per_s > 1.5 * told.prediction.samples_per_s
    help_ = told.explain().sentences[2]
    gain = free.prediction.samples_per_s / told.prediction.samples_per_s - 1
    assert help_.startswith(f"What would help most is to choose K and M anew: {gain:.0%} more samples/s")
    assert "twice the memory" not in help_


def test_of_many_stages_those_that_matter_are_shown(profile_of, device):
    row = (0.25, 0.25, 0.5, 10, 4, 8, 8)
    rows = [[*row] for _ in range(40)]
    rows[20] = [2 * value for value in row]
    of_sizes = {("a", size): [[value * size for value in one] for one in rows] for size in (1, 8)}
    profile = profile_of(of_sizes, links=(Link(latency_s=0.0, bytes_per_s=1e6),))
    plan = plan_from_profile(
        profile, [device()] * 40, batch_size=40, stages=40, schedule="1f1b", micro_batches_per_stage=1
    )
    explanation = loaded(plan).explain()
    assert len(explanation) == 40
    short, remark = explanation.in_short()
    assert {0, 1, 20, 38, 39} <= {*short.index}
    assert len(short) < 16
    assert remark == f"{40 - len(short)} of 40 stages are left out; the table itself has all"
    for shown in (str(explanation), explanation._repr_html_()):
        assert remark in shown
        assert shown.count("\n") < 200  # a row of a page takes 14 lines
    assert explanation.head(3).shape[0] == 3
    few = plan_from_profile(profile, [device()] * 2, batch_size=40, stages=2)
    assert few.explain().in_short()[1] == ""


def test_a_slow_link_is_said_to_limit_the_step(profile, device):
    slow = profile.model_copy(update={"links": (Link(latency_s=30.0, bytes_per_s=1e6),)})
    plan = plan_from_profile(slow, [device()] * 2, batch_size=24, stages=2)
    limit, _, help_ = plan.explain().sentences
    assert limit.startswith("The link after stage 0 limits the step")
    assert "twice the bandwidth" not in help_.partition(":")[0]  # its latency counts, not its bandwidth
    assert (
        plan_from_profile(slow, [device()], batch_size=24).explain().sentences[1]
        == "There is one stage: no cut to move."
    )


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.45, 0.45)])
def test_what_is_said_to_limit_the_step_is_what_the_simulator_gains_most_by(profile_of, device, shares):
    """Messages that both ends copy keep these from computing, and their links idle: the link was blamed for it."""
    link = Link(latency_s=2.0, bytes_per_s=1e6, sender_share=shares[0], receiver_share=shares[1])
    rows = {("a", size): [[value * size for value in (0.25, 0.25, 0.5, 10, 4, 8, 8)]] * 6 for size in (1, 8)}
    profile = profile_of(rows, links=(link,))
    plan = plan_from_profile(
        profile, Cluster(devices=(device(),) * 3, link=link), batch_size=12, micro_batches=12, stages=3,
        schedule="1f1b", cut_at=["blocks.2", "blocks.4"],
    )  # fmt: skip
    explanation = plan.explain()
    said = "Stage 1 on" if any(shares) else "The link after stage"
    assert explanation.sentences[0].startswith(said)
    assert ("of it to copy messages" in explanation.sentences[0]) == any(shares)
    passes = explanation["forward_s"] + explanation["backward_s"]
    assert passes[1] == pytest.approx(1.5 + 2 * sum(shares) * plan.stages[0].times[0].send_forward_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_else_brings_more_than_what_limits_the_step(device, schedule, seed, monkeypatch):
    monkeypatch.setattr(bottleneck, "SEARCH_S", 600.0)
    random = np.random.default_rng(seed)
    layers = random.uniform(0.1, 1.0, (6, 7))
    rows = {("a", size): [[value * size for value in layer] for layer in layers] for size in (1, 2)}
    shares = random.uniform(0.0, 0.4, 2) * (seed % 2)
    link = Link(latency_s=0.0, bytes_per_s=1.0, sender_share=shares[0], receiver_share=shares[1])
    asked: dict[str, Any] = {"chunks": 2, "stages": 6} if schedule == "interleaved" else {"stages": 3}
    asked |= {"batch_size": 12, "micro_batches": 12, "schedule": schedule, "recompute": "never"}
    cluster = Cluster(devices=(device(),) * 3, link=link)
    plan = plan_from_profile(build_profile(rows, links=(link,)), cluster, **asked)
    durations = Durations.of(plan)
    whole_s = simulate(plan.actions(), durations).makespan_s
    every = [
        whole_s - simulate(plan.actions(), faster(durations, rank, plan.ring)).makespan_s
        for faster in (bottleneck._faster_device, bottleneck._faster_link)
        for rank in range(plan.ranks)
    ]
    limit = bottleneck.limit_of(plan)
    assert limit.gain_s == pytest.approx(max(every))
    assert limit.gain_s == pytest.approx(every[limit.rank + plan.ranks * limit.is_link])


@pytest.mark.parametrize("hosts", [False, True])
def test_others_are_priced_by_the_links_that_the_plan_was_made_for(profile, device, hosts):
    """And not by the profile's own: one plan was said to take 18 % less with a cut that made it 2.5 % slower."""
    slow = profile.links[0].slowed(2_000.0)
    devices = (device(),) * 4
    cluster = Cluster(devices=devices, link=slow)
    if hosts:
        cluster = Cluster(devices=devices, link=profile.links[0], between=slow, devices_per_host=2)
    asked: dict[str, Any] = {"batch_size": 24, "micro_batches": 12, "stages": 3, "schedule": "1f1b"}
    plan = plan_from_profile(profile, cluster, **asked)
    assert plan.cluster == cluster
    for frame in (plan.explain(), loaded(plan).explain(profile, cluster)):
        cuts = [stage.stop_layer for stage in plan.stages[:-1]]
        for stage, cut in enumerate(cuts):
            for column, moved in (("cut_earlier_s", cut - 1), ("cut_later_s", cut + 1)):
                if moved not in (0, *cuts, profile.layers[-1].index + 1):
                    paths = [f"blocks.{place}" for place in [*cuts[:stage], moved, *cuts[stage + 1 :]]]
                    other = plan_from_profile(profile, cluster, cut_at=paths, **asked)
                    assert frame[column][stage] == pytest.approx(other.prediction.step_s)
    with pytest.raises(ArgumentError, match=r"by the link in the profile a step of this plan takes .*; pass devices="):
        loaded(plan).explain(profile)
    assert "cut_later_s" not in loaded(plan).explain()


def test_a_plan_that_knows_its_cluster_is_the_same_plan(profile, device):
    plan = plan_from_profile(profile, [device()] * 3, batch_size=24, stages=3)
    assert plan.cluster == Cluster(devices=(device(),) * 3, link=profile.links[0])
    assert loaded(plan) == plan
    assert loaded(plan).cluster is None
    assert pickle.loads(pickle.dumps(plan)).cluster is None
