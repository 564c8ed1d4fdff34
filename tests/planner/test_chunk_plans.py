"""Plans whose ranks have several chunks: the file, the memory of a device, what is drawn, and what is recomputed."""

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib import pyplot

from planner import Plan
from planner.cost.stage_memory import stage_memory
from planner.explain import compare, explain, memory_over_time
from planner.from_profile import make_problem, plan_from_profile
from planner.pictures.memory import plot_memory
from planner.pictures.timeline import plot_timeline
from planner.plan.actions import ActionKind
from planner.plan.held import Held
from planner.plan.micro_batches import MicroBatches
from planner.plan.schedules import Ring
from planner.plan.simulator import simulate_plan
from planner.plan.timeline import save_timeline_json
from planner.solve.build_plan import make_plan
from planner.solve.chunk_plans import ChunkPlans
from planner.solve.problem import Candidate
from profiler.device import Link
from profiler.errors import PlanFileError
from tests.planner.made_up import build_profile

ROW = (0.1, 0.1, 0.2, 10, 4, 8, 8)


def problem_of(profile, devices, batch_size, **more):
    given: Any = {"schedule": "interleaved", "micro_batches_per_stage": 1, **more}
    return make_problem(profile, devices, batch_size=batch_size, optimizer=None, settings=given)


def plans_of(problem, count, ranks, chunks, schedule="interleaved"):
    return ChunkPlans(
        problem, Candidate(schedule, 1, MicroBatches(problem.settings.batch_size, count), Ring(ranks, chunks))
    )


@pytest.fixture
def plan(device):
    profile = build_profile(
        {("a", size): [[value * size for value in ROW]] * 8 for size in (1, 2)},
        parameters=[(16 * (1 + layer), True) for layer in range(8)],
        readers=[(layer,) for layer in range(8)],
        optimizer=(0.001, 2.0),
        links=(Link(latency_s=0.01, bytes_per_s=1000.0),),
        input_bytes=3,
        reserve_bytes=1000,
    )
    plans = plans_of(problem_of(profile, [device(name="one"), device(name="two")], 12), 7, 2, 3)
    return make_plan(plans.problem, plans.balance(plans.fitted((1, 2, 4, 5, 6, 8), (0, 0))))


def test_stages_go_round_the_devices(plan):
    assert (plan.K, plan.chunks, plan.ranks, plan.M) == (6, 3, 2, 7)
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1, 0, 1]
    assert [stage.device.name for stage in plan.stages] == ["one", "two"] * 3
    assert len(plan.actions()) == 2
    assert {action.stage for action in plan.actions()[1]} == {1, 3, 5}


def test_the_optimizer_steps_all_chunks_of_a_rank(plan):
    seconds = [sum(stage.optimizer_s for stage in plan.stages[rank::2]) for rank in range(2)]
    assert plan.prediction.optimizer_s == max(seconds) == pytest.approx(0.001 * 16 * (2 + 5 + 7 + 8))


def test_a_plan_file_round_trips_and_an_old_one_has_one_chunk(plan):
    text = plan.to_json()
    assert Plan.parse_json(text, source="here", error=PlanFileError) == plan
    old = json.loads(text)
    del old["rank_memories"]
    each_at_its_peak = Plan.parse_json(json.dumps(old), source="here", error=PlanFileError)
    assert each_at_its_peak.rank_memory(0).activations > plan.rank_memory(0).activations
    del old["chunks"]
    for index, stage in enumerate(old["stages"]):
        stage["rank"] = index
    assert Plan.parse_json(json.dumps(old), source="here", error=PlanFileError).chunks == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": 0}, "chunks"),
        ({"chunks": "3"}, "chunks"),
        ({"chunks": 1.5}, "chunks"),
        ({"chunks": 65}, "chunks"),
        ({"chunks": 4}, "6 stages are not 4 chunks for each rank"),
        ({"chunks": 2}, "stage 2 is on rank 0; with 2 chunks on each of 3 ranks it belongs on rank 2"),
        ({"schedule": "1f1b"}, "chunks is 3, and schedule '1f1b' has at most 1 a rank"),
    ],
)
def test_a_file_whose_chunks_mean_nothing_is_refused(plan, change, message):
    with pytest.raises(PlanFileError, match=message):
        Plan.parse_json(json.dumps({**json.loads(plan.to_json()), **change}), source="here", error=PlanFileError)


def test_a_file_has_memory_for_all_ranks_or_none(plan):
    file = json.loads(plan.to_json())
    for wrong in ({"rank_memories": file["rank_memories"][:1]}, {"chunks": 1}):
        if "chunks" in wrong:
            for index, stage in enumerate(file["stages"]):
                stage["rank"] = index
        with pytest.raises(PlanFileError, match=r"rank_memories has [12] entries for [26] ranks with"):
            Plan.parse_json(json.dumps({**file, **wrong}), source="here", error=PlanFileError)


def test_a_file_whose_chunks_lie_elsewhere_is_refused(plan):
    for stage, key, value in [(3, "rank", 0), (4, "devices", [{**plan.stages[4].device.model_dump(), "name": "else"}])]:
        file = json.loads(plan.to_json())
        file["stages"][stage][key] = value
        with pytest.raises(PlanFileError, match=rf"stage {stage} is on rank|and {stage} are of one rank and on unlike"):
            Plan.parse_json(json.dumps(file), source="here", error=PlanFileError)


def test_a_device_holds_all_chunks_and_what_a_process_has_once(plan):
    for rank in range(2):
        memory, stages = plan.rank_memory(rank), plan.stages[rank::2]
        assert memory.reserve == 1000
        assert memory.parameters == sum(
            16 * (1 + layer) for s in stages for layer in range(s.first_layer, s.stop_layer)
        )
        assert memory.transient in {stage.memory.transient for stage in stages}
        assert memory.activations < sum(stage.memory.activations for stage in stages)  # not all at one moment
        # seven micro-batches are three groups of 3, 2, 2; the inputs of the model count once
        inputs = 12 * 3
        assert memory.activations >= inputs
        assert stages[0].memory.reserve == 1000
        assert stages[1].memory.reserve == 0


@pytest.mark.parametrize("seed", range(20))
def test_of_messages_that_are_copied_or_read_a_rank_has_those_of_one_chunk(device, seed):
    """In memory that workers share each stage copies what it sends and reads what comes back, while it computes alone.

    Those of all chunks counted at once: 8 % too much of a GPT with three chunks a rank, all recomputed.
    """
    chance = random.Random(seed)
    ranks, chunks, size = chance.choice([2, 3]), chance.choice([2, 3]), chance.randint(1, 50)
    layers = ranks * chunks
    profile = build_profile(
        {("a", 1): [[*ROW[:5], *(2 * [size if layer + 1 < layers else 0])] for layer in range(layers)]},
        links=(Link(latency_s=0.01, bytes_per_s=1000.0),),
    )
    cores = [device(name=str(rank), threads=1) for rank in range(ranks)]
    plans = plans_of(problem_of(profile, cores, 8, recompute="always"), 8, ranks, chunks)
    plan = make_plan(plans.problem, plans.balance(plans.fitted((*range(1, layers + 1),), (0,) * ranks)))
    for rank in range(ranks):
        stages = range(rank, layers, ranks)
        copied = [size * (2 * (stage + 1 < layers) + (stage > 0)) for stage in stages]
        lasting = sum(plan.stages[stage].memory.receive_buffers for stage in stages) - sum(copied)
        assert plan.rank_memory(rank).receive_buffers in {lasting + one for one in copied}


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_the_plan_says_what_was_counted_while_it_was_sought(profiles, device, data):
    profile = data.draw(profiles(kinds=("a",)))
    layers = len(profile.layers)
    ranks, chunks = data.draw(st.sampled_from([(r, v) for r in (1, 2, 3) for v in (2, 3) if r * v <= max(2, layers)]))
    if ranks * chunks > layers:
        return
    batch, count = data.draw(st.sampled_from([(4, 4), (10, 7), (12, 12)]))
    problem = problem_of(profile, [device()] * ranks, batch)
    plans = plans_of(problem, count, ranks, chunks)
    inner = data.draw(
        st.lists(st.integers(1, layers - 1), unique=True, min_size=plans.stages - 1, max_size=plans.stages - 1)
    )
    stops = (*sorted(inner), layers)
    again = data.draw(st.lists(st.booleans(), min_size=plans.stages, max_size=plans.stages))
    choice = plans.fitted(stops, (0,) * ranks)
    assert choice is not None
    made = make_plan(problem, plans.balance(replace(choice, recompute=tuple(again))))
    for rank in range(ranks):
        chosen = frozenset(chunk for chunk in range(chunks) if again[chunk * ranks + rank])
        assert made.rank_memory(rank).total == plans.rank_bytes(rank, stops, (0,) * ranks, chosen)
        assert made.rank_memory(rank).total == most_of_all_actions(problem, plans.candidate, made, rank)
    timeline = simulate_plan(made)
    assert made.prediction.step_s == timeline.step_s
    assert plans.step_s(stops, (0,) * ranks, again) == pytest.approx(timeline.step_s, rel=1e-9)


def most_of_all_actions(problem, candidate, plan, rank):
    """The largest bytes of a rank on a walk through its list, all chunks counted anew at each pass."""
    flying = dict.fromkeys((stage for stage in range(plan.K) if stage % plan.ranks == rank), 0)
    needs = []
    for action in plan.actions()[rank]:
        flying[action.stage] += action.kind is ActionKind.F
        if action.kind in {ActionKind.F, ActionKind.B}:
            said = {stage: bytes_with(problem, candidate, plan, stage, many) for stage, many in flying.items()}
            needs.append(
                sum(memory.total - memory.transient for memory in said.values()) + said[action.stage].transient
            )
        flying[action.stage] -= action.kind is ActionKind.B
    return max(needs)


def bytes_with(problem, candidate, plan, stage, many):
    """Of a stage with so many micro-batches in flight."""
    return stage_memory(
        problem.costs,
        problem.parameters,
        plan.stages[stage].device,
        candidate.schedule,
        candidate.split,
        problem.costs.optimizer("a", problem.optimizer),
        number=plan.K - stage,
        first=plan.stages[stage].first_layer,
        stop=plan.stages[stage].stop_layer,
        segments=plan.stages[stage].recompute,
        ring=candidate.ring,
        held=(Held(many),),
    )


def test_what_does_not_fit_is_recomputed_and_no_more(device):
    row, light = (1.0, 1.0, 2.0, 100, 0, 1, 1), (1.0, 1.0, 2.0, 50, 0, 1, 1)
    heavy = (1.0, 0.25, 2.0, 100, 0, 1, 1)
    profile = build_profile(
        {("a", 1): [light, row, heavy, row]}, links=(Link(latency_s=0.0, bytes_per_s=1e9),), reserve_bytes=0
    )
    plans = plans_of(problem_of(profile, [device()] * 2, 4), 4, 2, 2)
    full = plans.rank_bytes(0, (1, 2, 3, 4), (0, 0), frozenset())
    tight = problem_of(profile, [device(memory_bytes=full - 1)] * 2, 4)
    choice = plans_of(tight, 4, 2, 2).fitted((1, 2, 3, 4), (0, 0))
    assert choice is not None
    assert choice.recompute == (False, False, True, False)  # the chunk of rank 0 that is cheap to recompute
    assert plans_of(tight, 4, 2, 2).fitted((1, 2, 3, 4), (0, 0), choice.step_s) is None
    never = problem_of(profile, [device(memory_bytes=full - 1)] * 2, 4, recompute="never")
    assert plans_of(never, 4, 2, 2).fitted((1, 2, 3, 4), (0, 0)) is None
    always = plans_of(problem_of(profile, [device()] * 2, 4, recompute="always"), 4, 2, 2).fitted((1, 2, 3, 4), (0, 0))
    assert always is not None
    assert always.recompute == (True,) * 4


def test_pictures_have_a_row_for_each_rank(plan, tmp_path):
    figure, (above, below) = pyplot.subplots(2)
    axes = plot_timeline(plan, above)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "link 0>1", "link 1>0", "rank 1"]
    assert "interleaved, K = 6, M = 7, 3 chunks a rank" in axes.get_title()
    ticks = [label.get_text() for label in plot_memory(plan, below).get_xticklabels()]
    assert ticks == ["rank 0\none", "rank 1\ntwo"]
    pyplot.close(figure)
    save_timeline_json(plan, tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        if record["ph"] == "X":
            lanes.setdefault(record["tid"], []).append((record["ts"], record["ts"] + record["dur"]))
    assert len(lanes) == 4
    for spans in lanes.values():  # a rank and a link do one thing at a time
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def test_reports_say_what_a_rank_holds(plan):
    text = repr(plan)
    assert "3 chunks on each of 2 ranks" in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert list(plan.to_frame()["rank"]) == [0, 1, 0, 1, 0, 1]
    frame = explain(plan)
    assert list(frame["busy"][:2]) == list(frame["busy"][2:4])
    assert list(frame["memory_share"][:2]) == list(frame["memory_share"][4:])
    assert compare(plan, plan).loc["chunks", "this"] == 3
    peaks = memory_over_time(plan).groupby("stage")["bytes"].max()
    assert list(peaks) == [stage.memory.total for stage in plan.stages]


def test_with_one_chunk_nothing_changes(plan, device):
    profile = build_profile({("a", size): [[value * size for value in ROW]] * 8 for size in (1, 2)})
    made = [
        plan_from_profile(profile, [device()] * 2, batch_size=16, stages=2, schedule=schedule)
        for schedule in ("1f1b", "interleaved")
    ]
    assert made[0].model_copy(update={"schedule": "interleaved"}) == made[1]
