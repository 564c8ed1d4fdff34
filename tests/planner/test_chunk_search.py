"""Plans with several chunks a rank, against all that there are."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.cost.stage_sums import pooled_bytes
from planner.explain import explain
from planner.from_profile import plan_from_profile
from planner.kernel.critical_path import longest_path
from planner.kernel.makespan import makespan_s
from planner.kernel.turns import turns_of
from planner.plan.schedules import SCHEDULES
from planner.solve import chunk_plans, chunk_search, cut_climb
from planner.solve.build_plan import make_plan
from planner.solve.chunk_bound import has_room, least_s
from planner.solve.chunk_candidates import candidates, most_that_fit
from planner.solve.chunk_plans import MOST_PASSES_OF_SETS, ChunkChoice, ChunkPlans
from planner.solve.cut_bound import CutBound
from planner.solve.deadline import Deadline
from profiler.device import Link
from profiler.errors import ArgumentError, InfeasibleError
from tests.planner.made_up import build_profile
from tests.planner.test_chunk_plans import problem_of

ROUGH = 1e-9
ONE_BY_ONE = 0.05  # where each rank's recomputed chunks are chosen for themselves
SLOW = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def every_step_s(problem):
    """Simulated step time of every plan that fits: ranks, M, cuts, order of the devices and recompute."""
    mode = problem.settings.recompute
    for candidate in candidates(problem):
        plans = ChunkPlans(problem, candidate)
        inner = itertools.combinations(range(1, problem.layers), plans.stages - 1)
        orders = set(
            itertools.permutations(
                [index for index, group in enumerate(problem.classes) for _ in group.members], plans.ranks
            )
        )
        choices = {"auto": (False, True), "never": (False,), "always": (True,)}[mode]
        for cuts, order in itertools.product(inner, orders):
            for again in itertools.product(choices, repeat=plans.stages):
                plan = make_plan(problem, plans.balance(ChunkChoice(0.0, (*cuts, problem.layers), order, again)))
                limits = [plan.stages[rank].device.memory_bytes for rank in range(plans.ranks)]
                needs = [plan.rank_memory(rank).total for rank in range(plans.ranks)]
                if all(need <= limit for need, limit in zip(needs, limits, strict=True)):
                    yield plan.prediction.step_s


def settings_of(chunks, **more):
    return {"schedule": "interleaved", "chunks": chunks, "micro_batches_per_stage": 1, **more}


@pytest.mark.parametrize(
    ("few_cuts", "most_passes"), [(0, MOST_PASSES_OF_SETS), (10**6, MOST_PASSES_OF_SETS), (10**6, 0)]
)
@given(data=st.data())
@SLOW
def test_no_plan_is_faster_than_the_bound_says_and_few_are_missed(
    few_cuts, most_passes, profiles, device, monkeypatch, data
):
    """With all cuts and all sets of recomputed chunks tried the best plan is found; when they change one by one, one
    close to it."""
    monkeypatch.setattr(cut_climb, "FEW_CUTS", few_cuts)
    monkeypatch.setattr(chunk_plans, "MOST_PASSES_OF_SETS", most_passes)
    mode = data.draw(st.sampled_from(["auto", "never", "always"]))
    profile = data.draw(profiles(most_layers=5 if mode == "auto" else 7))
    layers = len(profile.layers)
    assume(layers >= 4)
    chunks = data.draw(st.integers(2, max(2, min(3, layers // 2))))
    kinds = data.draw(st.sampled_from([("a", "a"), ("a", "b"), ("a", "a", "a")]))
    batch, count = data.draw(st.sampled_from([(4, 4), (6, 3), (7, 5), (8, 8)]))
    more = {"micro_batches": count, "recompute": mode}
    free = [device(kind) for kind in kinds]
    roomy = plan_from_profile(profile, free, batch_size=batch, **settings_of(chunks, **more))
    share = data.draw(st.sampled_from([None, 0.7, 0.9, 1.0]))
    limit = None if share is None else int(max(memory.total for memory in roomy.device_memories) * share)
    devices = [device(kind, 10**9 if limit is None else max(1, limit)) for kind in kinds]
    problem = problem_of(profile, devices, batch, chunks=chunks, **more)
    best_s = min(every_step_s(problem), default=None)
    if best_s is None:
        with pytest.raises(InfeasibleError, match=f"no plan with {chunks} chunks a rank was found that fits"):
            plan_from_profile(profile, devices, batch_size=batch, **settings_of(chunks, **more))
        return
    try:
        plan = plan_from_profile(profile, devices, batch_size=batch, **settings_of(chunks, **more))
    except InfeasibleError:
        assert few_cuts == 0  # moving cuts may end where nothing fits
        return
    assert plan.prediction.lower_bound_s <= best_s * (1 + ROUGH)
    assert plan.prediction.step_s >= best_s * (1 - ROUGH)
    if few_cuts:
        assert plan.prediction.step_s <= best_s * (1 + (ROUGH if most_passes else ONE_BY_ONE))
    for rank in range(plan.ranks):
        assert plan.rank_memory(rank).total <= plan.stages[rank].device.memory_bytes


@given(data=st.data())
@SLOW
def test_the_bound_is_below_every_cut(profiles, device, data):
    profile = data.draw(profiles())
    layers = len(profile.layers)
    assume(layers >= 4)
    batch = data.draw(st.sampled_from([4, 7, 10]))
    devices = [device(kind) for kind in data.draw(st.sampled_from([("a", "a"), ("a", "b"), ("b", "a", "a")]))]
    problem = problem_of(profile, devices, batch, chunks=2)
    for candidate in itertools.islice(candidates(problem), 4):
        plans = ChunkPlans(problem, candidate)
        bound = CutBound(plans)
        cheap_s, root_s = least_s(plans), bound.tightened(60, Deadline(None))
        halved_s = bound.halved(10_000, Deadline(None), np.inf)
        assert bound.closed
        best_s = np.inf
        for cuts in itertools.combinations(range(1, layers), plans.stages - 1):
            for order in set(itertools.permutations(range(len(problem.classes)), plans.ranks)) | {(0,) * plans.ranks}:
                step_s = plans.step_s((*cuts, layers), order)
                assert max(cheap_s, root_s, halved_s) <= step_s
                best_s = min(best_s, step_s)
        assert CutBound(plans).halved(10_000, Deadline(None), best_s) <= best_s


@given(data=st.data())
@SLOW
def test_where_the_model_is_too_large_for_so_many_ranks_no_cuts_fit(profiles, device, data):
    """Ranks have room for half of the model, or for as much as they all need together; on unlike devices, too."""
    profile = data.draw(profiles(most_layers=6))
    layers = len(profile.layers)
    assume(layers >= 4)
    kinds = data.draw(st.sampled_from([("a", "a"), ("a", "b"), ("b", "a", "a")]))
    free = problem_of(profile, [device(kind) for kind in kinds], 4, chunks=2)
    whole = min(pooled_bytes(free.basis(kind, candidate)) for kind in kinds for candidate in candidates(free))
    share = data.draw(st.sampled_from([0.3, 0.5, 0.9, 1.1]))
    assume(share * whole / 2 >= 1)  # a device has a byte at least
    problem = problem_of(profile, [device(kind, int(share * whole / 2)) for kind in kinds], 4, chunks=2)
    every = [ChunkPlans(problem, candidate) for candidate in candidates(problem)]
    assert share > 1 or not all(map(has_room, every))
    for plans in every:
        ways = itertools.product(
            itertools.combinations(range(1, layers), plans.stages - 1),
            itertools.permutations(
                [index for index, group in enumerate(problem.classes) for _ in group.members], plans.ranks
            ),
        )
        fit = (
            not any(plans.over_bytes(rank, (*cuts, layers), order) for rank in range(plans.ranks))
            for cuts, order in ways
        )
        assert has_room(plans) or not any(fit)


@given(
    st.sampled_from(["interleaved", "interleaved-lean", "zb-h1"]),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 17),
    st.integers(0, 2**32 - 1),
)
def test_the_longest_path_is_the_makespan_and_a_line_below_it(name, ranks, chunks, count, seed):
    """Messages wait for their sender and for one another, of 2 ranks in both directions, and senders for room."""
    random = np.random.default_rng(seed)
    kinds = 3 if SCHEDULES[name].splits_backward else 2
    chunks = min(chunks, SCHEDULES[name].most_chunks)
    stages = ranks * chunks
    turns = turns_of(name, ranks, count, chunks)

    def steps_s(seconds, sends):
        rows = np.zeros((6, stages, count))
        for row, of_stages in zip((0, 2, 5), seconds, strict=False):
            rows[row] = of_stages[:, None]
        rows[3], rows[4, 1:] = sends[0][:, None], sends[1, :-1][:, None]
        return makespan_s(name, rows, chunks)

    here, there = random.random((2, kinds, stages))
    sends_here, sends_there = random.random((2, 2, stages)) * random.choice([0.0, 0.1, 1.0])
    length_s, on_path, on_links = longest_path(
        turns, ranks, here, np.ones((kinds, count)), sends_here, np.ones((2, count))
    )
    assert length_s == pytest.approx(steps_s(here, sends_here))
    assert (on_path * here).sum() + (on_links * sends_here).sum() == pytest.approx(length_s)
    assert (on_path * there).sum() + (on_links * sends_there).sum() <= steps_s(there, sends_there) * (1 + ROUGH)

    sends, shares, send_shares = random.random((2, stages)), random.random((kinds, count)), random.random((2, count))
    length_s, on_path, on_links = longest_path(turns, ranks, here, shares, sends, send_shares)
    assert (on_path * here).sum() + (on_links * sends).sum() == pytest.approx(length_s)


def uniform(layers, *, sizes=(1, 2)):
    row = (1.0, 1.0, 2.0, 10, 4, 8, 8)
    return build_profile(
        {("a", size): [[value * size for value in row]] * layers for size in sizes},
        links=(Link(latency_s=0.0, bytes_per_s=1e9),),
        reserve_bytes=1000,
    )


def plan_of(profile, devices, batch, chunks=2, **more):
    return plan_from_profile(profile, devices, batch_size=batch, **settings_of(chunks, **more))


def test_unequal_chunks_beat_equal_ones(device):
    """Of equal layers: small chunks at the end let the first backward pass begin earlier."""
    plan = plan_of(uniform(32), [device()] * 4, 4, micro_batches=4, stages=8)
    equal_s = 3 * 32 + 3 * 3 * 4
    assert plan.prediction.step_s < 0.97 * equal_s
    assert plan.prediction.gap < 0.03


def test_cuts_may_be_given(device):
    names = [f"blocks.{layer}" for layer in (1, 4, 5)]
    plan = plan_of(uniform(8), [device()] * 2, 4, micro_batches=4, stages=4, cut_at=names)
    assert [stage.stop_layer for stage in plan.stages] == [1, 4, 5, 8]
    plan = plan_of(uniform(8), [device()] * 2, 4, stages=4, keep_together=["blocks.2"], cut_at=["blocks.3"])
    assert 3 in [stage.stop_layer for stage in plan.stages]


def test_ranks_and_micro_batches_are_chosen(device):
    plan = plan_of(uniform(12), [device()] * 3, 8)
    assert (plan.ranks, plan.chunks, plan.K) == (3, 2, 6)
    assert plan.prediction.step_s <= min(
        plan_of(uniform(12), [device()] * 3, 8, **more).prediction.step_s * (1 + ROUGH)
        for more in ({"stages": 4}, {"max_stages": 4}, {"micro_batches": 4}, {"micro_batches": 7})
    )
    two = plan_of(uniform(12), [device()] * 4, 8, replicas=2)
    assert (two.replicas, two.ranks) == (2, 2)
    assert [len(stage.devices) for stage in two.stages] == [2] * 4


def test_a_search_ends_in_time_with_a_bound_that_is_true(device):
    profile = uniform(60)
    plan = plan_of(profile, [device()] * 4, 32, time_limit_s=0.001, micro_batches=16)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    assert plan_of(profile, [device()] * 4, 32, micro_batches=16).prediction.step_s >= plan.prediction.lower_bound_s


def test_a_plan_with_chunks_is_explained(device):
    profile = uniform(8)
    plan = plan_of(profile, [device()] * 2, 4, micro_batches=4, stages=4)
    frame = explain(plan, profile)
    moved = [*frame["cut_earlier_s"][:-1], *frame["cut_later_s"][:-1]]
    assert all(np.isnan(step_s) or step_s >= plan.prediction.step_s * (1 - ROUGH) for step_s in moved)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"schedule": "1f1b"}, "chunks is 2, and schedule '1f1b' has at most 1 a rank"),
        ({"schedule": "auto"}, 'schedule is "auto" and chooses the chunks, too; leave chunks=2 out'),
        ({"schedule": "zb-v", "chunks": 1}, "chunks is 1, and schedule 'zb-v' has exactly 2 a rank"),
        ({"schedule": "zb-v", "chunks": 3}, "chunks is 3, and schedule 'zb-v' has exactly 2 a rank"),
        ({"schedule": "zb-v", "stages": 2}, "give at least 2 devices and 4 stages, or choose another schedule"),
        ({"chunks": 0}, "chunks is 0"),
        ({"chunks": 100}, "chunks is 100"),
        ({"stages": 3}, "3 stages are not 2 chunks for each rank"),
        ({"stages": 2}, "chunks is 2, and there would be 1 rank"),
        ({"max_stages": 3}, "max_stages is 3, and 2 ranks with 2 chunks each have 4 stages"),
        ({"stages": 8}, "stages is 8, and there are 2 devices; 2 of them share one"),
        ({"skips": "direct"}, "chunks is 2 and skips is 'direct'"),
        ({"pinned": {"blocks.0": 0}}, "chunks is 2 and pinned is"),
    ],
)
def test_settings_that_chunks_do_not_go_with_are_refused(device, more, message):
    asked: Any = settings_of(2, micro_batches=8) | more
    with pytest.raises(ArgumentError, match=message):
        plan_from_profile(uniform(8), [device()] * 2, batch_size=8, **asked)


def test_what_cannot_be_has_a_reason(device):
    with pytest.raises(ArgumentError, match="there would be 1 rank"):
        plan_of(uniform(8), [device()], 8)
    with pytest.raises(InfeasibleError, match="2 ranks have 4 stages, but the model has 3 layers"):
        plan_of(uniform(3), [device()] * 2, 8)
    with pytest.raises(InfeasibleError, match=r"its rank . needs .* and device cpu \(a\) has .* too many"):
        plan_of(uniform(8), [device(memory_bytes=1100)] * 2, 8, recompute="never")
    with pytest.raises(InfeasibleError, match="a batch of 4 samples is too small for 2 ranks of 2 chunks"):
        plan_from_profile(uniform(8), [device()] * 2, batch_size=4, schedule="interleaved", chunks=2)


def long_messages(layers, by):
    """Layers that keep little and say much: ranks between others hold more bytes of messages than of anything else."""
    row = (1.0, 1.0, 2.0, 1, 1, by, by)
    rows = {
        ("a", size): [[value * size for value in row]] * (layers - 1) + [[value * size for value in row[:5]] + [0, 0]]
        for size in (1, 2, 4)
    }
    return build_profile(rows, links=(Link(latency_s=0.0, bytes_per_s=1e3),), weights=[(0.5, 0.5)] * layers)


@pytest.mark.parametrize(
    ("more", "layers", "by", "memories"),
    [
        ({"schedule": "zb-h1", "chunks": 1}, 5, 40, range(50, 45, -1)),
        ({"schedule": "zb", "chunks": 1}, 5, 40, range(50, 45, -1)),
        ({"schedule": "zb-h1", "chunks": 1, "time_limit_s": 0.01}, 5, 40, range(50, 45, -1)),
        ({"schedule": "interleaved"}, 24, 8, [230] * 4),
    ],
    ids=["zb-h1", "zb", "in no time", "interleaved"],
)
def test_where_many_ranks_do_not_fit_fewer_are_tried(device, more, layers, by, memories):
    """With four candidates in vain over the most ranks the search ended: `max_stages` had plans that it had not."""
    profile, devices = long_messages(layers, by), [device(memory_bytes=size) for size in memories]
    few = plan_of(profile, devices, 16, **more, max_stages=2 if more.get("chunks") else 4)
    assert plan_of(profile, devices, 16, **more).prediction.step_s <= few.prediction.step_s


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 80))
def test_the_most_ranks_that_fit_are_found(most, least, fitting):
    least = min(least, most)
    found = most_that_fit(lambda ranks: ranks if ranks <= fitting else None, most, least)
    assert found == (min(most, fitting) if fitting >= least else None)


def test_the_nearest_plan_has_the_smallest_micro_batches(device):
    """What is named as the nearest kept four samples of a micro-batch where one would have done."""
    with pytest.raises(InfeasibleError, match=r"its rank 0 needs (\d+) B") as caught:
        plan_of(long_messages(6, 8), [device(memory_bytes=3)] * 3, 16, schedule="zb-h1", chunks=1)
    needs = re.search(r"M = (\d+) micro-batches; its rank 0 needs (\d+) B", str(caught.value))
    assert needs is not None
    assert needs[1] == "16"
    one = plan_of(long_messages(6, 8), [device(memory_bytes=int(needs[2]))], 16, schedule="zb-h1", chunks=1)
    assert one.device_memories[0].total <= int(needs[2])


def test_where_nothing_fits_bounds_are_raised_no_more(device, monkeypatch):
    """They leave out memory: of Llama 70B on 64 devices they took 105 of the 120 s until zb-h1 fitted nowhere."""
    raised, tightened = [], CutBound.tightened

    def noting(self, *more):
        raised.append(self)
        return tightened(self, *more)

    monkeypatch.setattr(CutBound, "tightened", noting)
    with pytest.raises(InfeasibleError, match="too many"):
        plan_of(uniform(12, sizes=(1, 64)), [device(memory_bytes=1110)] * 2, 64, recompute="never")
    assert len(raised) <= chunk_search.SOME_IN_VAIN


@given(st.data())
@SLOW
def test_one_search_for_all_numbers_of_chunks_finds_the_best_of_each(profiles, device, data):
    """With and without a limit that forbids some of them; its bound is below what each of them finds."""
    profile = data.draw(profiles(most_layers=7, kinds=("a",)))
    asked: Any = {"batch_size": 6, "micro_batches_per_stage": 1, "schedule": "interleaved"}
    devices = [device()] * 2
    if data.draw(st.booleans()):
        most = max(one.total for one in plan_from_profile(profile, devices, **asked).device_memories)
        devices = [device(memory_bytes=max(1, int(most * data.draw(st.sampled_from([0.6, 0.8, 0.95])))))] * 2
    found = []
    for chunks in (1, 2, 3, 4):
        try:
            found.append(plan_from_profile(profile, devices, chunks=chunks, **asked).prediction)
        except (ArgumentError, InfeasibleError):
            continue  # fewer layers, or none that fits
    try:
        said = plan_from_profile(profile, devices, chunks="auto", **asked).prediction
    except InfeasibleError:
        assert not found
        return
    assert said.step_s <= min(one.step_s for one in found) * (1 + ROUGH)
    assert said.lower_bound_s <= min(one.step_s for one in found) * (1 + ROUGH)
    assert said.lower_bound_s >= min(one.lower_bound_s for one in found) * (1 - ROUGH)
