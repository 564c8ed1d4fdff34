"""What the search counts for a stage is what the report says and the simulator's memory peaks at, byte for byte."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from planner.cost.ledger import ROWS, rows_of
from planner.cost.ledger_rows import Counts, Form, Of, RangeRow, Row, When
from planner.cost.stage_memory import stage_memory, stage_moments, together
from planner.from_profile import make_problem
from planner.kernel.least_overflow import least_bad
from planner.kernel.segments import INSIDE, KEPT, START, pattern_costs
from planner.kernel.tables import segment_costs, stage_needs
from planner.keywords import SettingKeywords
from planner.plan.actions import ActionKind
from planner.plan.held import Held
from planner.plan.micro_batches import MicroBatches
from planner.plan.orders import PassKind
from planner.plan.schedules import Ring, split_schedules
from planner.plan.stage import Segment, StageMemory
from planner.solve.balance import Balance, StageChoice, evaluate_s
from planner.solve.build_plan import make_plan
from planner.solve.chunk_candidates import plans_of
from planner.solve.infeasible import _memory
from planner.solve.own_order_plans import OwnOrderPlans
from planner.solve.problem import Candidate, Problem
from planner.solve.segment_choices import segments_of
from planner.solve.tables import make_tables
from profiler.record import InStage, LayerCost, Profile
from tests.planner.conftest import WHOLE
from tests.planner.made_up import build_profile

SIZES = (1, 5, 14)


def with_details(data: Any, profile: Profile) -> Profile:
    """The profile with what layers have in a stage: shared storages, kernels' room, what stays until the end."""
    number = st.integers(0, 9)
    layers = len(profile.layers)

    def towards(others: range) -> tuple[tuple[int, int], ...]:
        return tuple((other, data.draw(number)) for other in others if data.draw(st.booleans()))

    def detailed(cost: LayerCost) -> LayerCost:
        carried, repeated = towards(range(cost.layer + 1, layers)), towards(range(cost.layer))
        held = data.draw(number)
        return cost.model_copy(
            update={
                "kept_bytes": held + data.draw(number) + sum(size for _, size in carried + repeated),
                "in_stage": InStage(
                    carried_bytes=carried,
                    repeated_bytes=repeated,
                    held_bytes=held,
                    forward_bytes=data.draw(number),
                    backward_bytes=data.draw(number),
                    last_backward_bytes=data.draw(number),
                    workspace_bytes=data.draw(number),
                ),
            }
        )

    return profile.model_copy(update={"costs": tuple(map(detailed, profile.costs))})


@st.composite
def patterns(draw: st.DrawFn, length: int) -> np.ndarray:
    """What a stage does about recompute: nothing, everything at once, or any segments."""
    form = draw(st.sampled_from(Form))
    if form is Form.KEPT:
        return np.full(length, KEPT, dtype=np.uint8)
    if form is Form.AS_ONE:
        return np.array([START] + [INSIDE] * (length - 1), dtype=np.uint8)
    marks = [draw(st.sampled_from((KEPT, START))) for _ in range(length)]
    for layer in range(1, length):
        if marks[layer] == START and marks[layer - 1] != KEPT and draw(st.booleans()):
            marks[layer] = INSIDE
    return np.array(marks, dtype=np.uint8)


def counted_bytes(
    problem: Problem, candidate: Candidate, number: int, stage: StageChoice, pattern: np.ndarray
) -> float:
    """The bytes of a stage, as the compiled search adds them up."""
    tables = make_tables(problem, candidate)
    device, first, stop = stage.device_class, stage.first, stage.stop
    variant = number - 1 if tables.by_number else 0
    needs = stage_needs(tables, device, variant, first, stop)
    if not stage.segments:
        over = needs.over_kept[0]
    elif (stage.segments[0].first, stage.segments[0].stop) == (first, stop):
        over = needs.over_as_one[0]
    else:
        over = pattern_costs(segment_costs(tables, device, variant), first, stop, False, pattern)[0] - needs.room[0]
        kind = tables.memory.range_of[device]
        at_end = tables.memory.ranges[kind, first, stop] + tables.memory.ends[kind, first, stop]
        over = max(over, at_end - tables.limit[device, variant])
    return over + problem.classes[device].device.memory_bytes


def check_that_all_count_alike(profiles: Any, device: Any, data: Any) -> None:
    """On a random profile, schedule, M, cuts and segments: the search, the report and the peak over time."""
    profile = data.draw(profiles(sizes=SIZES))
    if data.draw(st.booleans()):
        profile = with_details(data, profile)
    layers = len(profile.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    ranges = list(itertools.pairwise((0, *cuts, layers)))
    batch_size = data.draw(st.integers(len(ranges), 14))
    kinds = [data.draw(st.sampled_from(("a", "b"))) for _ in ranges]
    asked: SettingKeywords = {
        "micro_batches_per_stage": 1,
        "micro_batches": data.draw(st.integers(len(ranges), batch_size)),
        "schedule": data.draw(st.sampled_from(WHOLE)),
    }
    replicas = data.draw(st.integers(1, 3))
    asked |= {"replicas": replicas, "shard_optimizer": data.draw(st.booleans())}
    devices = [device(kind) for kind in kinds] * replicas
    problem = make_problem(profile, devices, batch_size=replicas * batch_size, optimizer=None, settings=asked)
    (candidate,) = problem.candidates()
    place = {group.device.kind: number for number, group in enumerate(problem.classes)}
    marks = [data.draw(patterns(stop - first)) for first, stop in ranges]
    stages = tuple(
        StageChoice(first, stop, place[kind], segments_of(pattern, first))
        for (first, stop), kind, pattern in zip(ranges, kinds, marks, strict=True)
    )
    plan = make_plan(problem, Balance(candidate, stages, evaluate_s(problem, candidate, stages), 1e-9))
    over_time = plan.memory_over_time()
    for index, (stage, pattern) in enumerate(zip(stages, marks, strict=True)):
        said = plan.stages[index].memory.total
        assert counted_bytes(problem, candidate, len(stages) - index, stage, pattern) == said
        assert over_time[over_time["stage"] == index]["bytes"].max() == said


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_search_report_and_simulator_count_the_same_bytes(profiles, device, data):
    check_that_all_count_alike(profiles, device, data)


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_what_overflows_the_least_overflows_by_what_the_report_says(profiles, device, data):
    """A message that names bytes too many has them from the report; the plan it is about, from the search."""
    profile = with_details(data, data.draw(profiles(kinds=("a",), sizes=SIZES)))
    schedule, recompute = (
        data.draw(st.sampled_from(WHOLE)),
        data.draw(st.sampled_from(["auto", "always", "never"])),
    )
    problem = make_problem(
        profile,
        [device("a", 50)] * 2,
        batch_size=9,
        optimizer=None,
        settings={"micro_batches": 4, "micro_batches_per_stage": 1, "schedule": schedule, "recompute": recompute},
    )
    candidate = next(problem.candidates())
    worst = least_bad(make_tables(problem, candidate))
    said = [_memory(problem, candidate, worst, stage)[0].total - 50 for stage in range(len(worst.classes))]
    assert worst.over_bytes == max(said)


def test_every_class_of_memory_has_a_row_and_every_row_a_class():
    assert {row.memory_class for row in ROWS} == set(StageMemory.model_fields)


@pytest.mark.parametrize(
    ("of", "counts", "forms"),
    [
        (Of.WHOLE, Counts.IN_FLIGHT, Form.ANY),
        (Of.LAYERS, Counts.ONCE, Form.IN_PARTS),
        (Of.SEGMENT, Counts.IN_FLIGHT, Form.IN_PARTS),
        (Of.STAGE, Counts.TRANSIENT, Form.ANY),
    ],
)
def test_a_row_that_the_search_would_leave_out_is_refused(of, counts, forms):
    memory_class = "transient" if counts is Counts.TRANSIENT else "activations"
    with pytest.raises(ValueError, match="no sum is made of a row"):
        Row("new", memory_class, of, counts, lambda at: at.layers.kept_bytes, forms)


def test_a_fourth_row_of_the_whole_stage_is_refused(profiles, device, monkeypatch):
    """The search has the three written out: it left a fourth out, which the report counted."""
    row = Row("new", "activations", Of.WHOLE, Counts.IN_FLIGHT, lambda at: at.whole[1], Form.KEPT)
    monkeypatch.setattr("planner.cost.ledger.ROWS", (*ROWS, row))

    @given(st.data())
    @settings(max_examples=1, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def check(data):
        with pytest.raises(ValueError, match=r"has the 3 rows of a whole stage written out, and not \['new'\]"):
            check_that_all_count_alike(profiles, device, data)

    check()


@pytest.mark.parametrize(
    "row",
    [
        RangeRow("once for a range", "parameters", lambda at: np.ceil(at.parameters.unique[at.stage] / 3)),
        RangeRow("at the end", "gradients", lambda at: 2 * at.parameters.unique[at.stage], when=When.AT_END),
        Row("once", "reserve", Of.STAGE, Counts.ONCE, lambda at: 5.0),
        Row("once for each layer", "optimizer", Of.LAYERS, Counts.ONCE, lambda at: 0 * at.layers.kept_bytes + 3),
        Row("in flight", "activations", Of.LAYERS, Counts.IN_FLIGHT, lambda at: 0 * at.layers.kept_bytes + at.size),
        Row("in flight of a stage", "activations", Of.STAGE, Counts.IN_FLIGHT, lambda at: 7.0),
        Row("kept layers", "activations", Of.KEPT_LAYERS, Counts.IN_FLIGHT, lambda at: at.layers.output_bytes),
        Row("where it ends", "gradients", Of.LAST_BOUNDARY, Counts.IN_FLIGHT, lambda at: at.layers.output_bytes),
        Row("edges", "activations", Of.SEGMENT_EDGES, Counts.ONCE, lambda at: at.layers.output_gradient_bytes),
        Row("for a moment", "transient", Of.LAYERS, Counts.TRANSIENT, lambda at: at.layers.output_bytes + at.size),
    ],
    ids=lambda row: row.name,
)
def test_a_row_more_is_counted_everywhere(row, profiles, device, monkeypatch):
    """One row makes a term: the search, the report and the memory over time have it, and it makes a difference."""
    monkeypatch.setattr("planner.cost.ledger.ROWS", (*ROWS, row))
    monkeypatch.setattr("planner.cost.ledger.rows_of", rows_of.__wrapped__)
    for reader in ("stage_memory", "stage_sums"):
        monkeypatch.setattr(f"planner.cost.{reader}.rows_of", rows_of.__wrapped__)

    @given(st.data())
    @settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def check(data):
        check_that_all_count_alike(profiles, device, data)

    check()


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None, phases=[Phase.generate])
def test_of_split_backward_passes_all_count_the_same_bytes(profiles, device, data):
    """The search, the report, the peak over time, and the walk through the list of actions."""
    profile = split_profile(data, profiles(kinds=("a",), sizes=SIZES))
    layers = len(profile.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    stops, stages = (*cuts, layers), len(cuts) + 1
    batch_size = data.draw(st.integers(stages, 14))
    asked: SettingKeywords = {
        "micro_batches_per_stage": 1,
        "micro_batches": data.draw(st.integers(stages, batch_size)),
        "schedule": data.draw(st.sampled_from(split_schedules())),
    }
    problem = make_problem(profile, [device("a")] * stages, batch_size=batch_size, optimizer=None, settings=asked)
    (candidate,) = problem.candidates()
    plans = plans_of(problem, replace(candidate, ring=Ring(stages, 1)))
    flags = tuple(data.draw(st.booleans()) for _ in range(stages))
    choice = plans.fitted(stops, (0,) * stages)
    assert choice is not None
    if not choice.orders:
        choice = replace(choice, recompute=flags)
    plan = make_plan(problem, plans.balance(choice))
    over_time = plan.memory_over_time()
    for index, stage in enumerate(plan.stages):
        said = stage.memory
        assert over_time[over_time["stage"] == index]["bytes"].max() == said.total
        moments = held_in(plan, index)
        counted = [bytes_at(problem, candidate, index, stages, stage, held) for held in moments]
        assert max(memory.total for memory in counted) == said.total
        if isinstance(plans, OwnOrderPlans):
            room = plans.limited_room(index, 0, stops, (choice.recompute[index],))
            counted_by_search = device("a").memory_bytes + max(
                room.flying[0, many] + room.waiting[0, others] - room.free[kind, 0] for many, others, kind in moments
            )
            assert counted_by_search >= said.total or not candidate.split.equal
            if candidate.split.equal and not said.receive_buffers:  # fewer messages are posted where more is in flight
                assert counted_by_search == said.total
        else:
            recomputed = frozenset([0] if choice.recompute[index] else [])
            assert plans.rank_bytes(index, stops, (0,) * stages, recomputed) == said.total


def split_profile(data, drawn):
    """A profile whose backward passes are split; of half of them layers have more in a stage."""
    profile = data.draw(drawn)
    if data.draw(st.booleans()):
        profile = with_details(data, profile)
    kept = [data.draw(st.integers(0, 50)) for _ in profile.layers]
    costs = [
        cost.model_copy(
            update={"weight_s": cost.backward_s / 2, "weight_kept_bytes": kept[cost.layer] * cost.micro_batch_size}
        )
        for cost in profile.costs
    ]
    return profile.model_copy(update={"costs": tuple(costs)})


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None, phases=[Phase.generate])
def test_of_two_chunks_in_a_v_all_count_the_same_bytes(profiles, device, data):
    """The search, the report, and the walk through the list of actions of each rank, whatever it recomputes."""
    profile = split_profile(data, profiles(kinds=("a",), sizes=SIZES, fewest_layers=4, most_layers=8))
    layers = len(profile.layers)
    ranks = data.draw(st.integers(2, min(4, layers // 2)))
    ring = Ring(ranks, 2, folds=True)
    cuts = data.draw(st.permutations(range(1, layers)))[: ring.stages - 1]
    stops = (*sorted(cuts), layers)
    batch_size = data.draw(st.integers(ranks, 14))
    asked: SettingKeywords = {
        "micro_batches_per_stage": 1,
        "micro_batches": data.draw(st.integers(ranks, batch_size)),
        "schedule": "zb-v",
        "recompute": data.draw(st.sampled_from(["always", "never", "auto"])),
    }

    def planned(devices):
        problem = make_problem(profile, devices, batch_size=batch_size, optimizer=None, settings=asked)
        (candidate,) = problem.candidates()
        plans = plans_of(problem, replace(candidate, ring=ring))
        return problem, candidate, plans, plans.fitted(stops, (0,) * ranks)

    problem, candidate, plans, choice = planned([device("a")] * ranks)
    if data.draw(st.booleans()):  # an order that memory binds
        plan = make_plan(problem, plans.balance(choice))
        most = max(memory.total for memory in plan.rank_memories)
        limited = planned([device("a", int(data.draw(st.sampled_from([0.8, 0.9, 0.97])) * most))] * ranks)
        problem, candidate, plans, choice = limited if limited[3] is not None else (problem, candidate, plans, choice)
    plan = make_plan(problem, plans.balance(choice))
    for rank, said in enumerate(plan.rank_memories):
        own, limit = ring.stages_of(rank), plan.stages[rank].device.memory_bytes
        moments = chunks_held_in(plan, rank, own)
        flags = tuple(choice.recompute[stage] for stage in own)
        chunks = [
            plans._moments(stage, 0, stops, flag, [held[chunk] for _, held in moments])
            for chunk, (stage, flag) in enumerate(zip(own, flags, strict=True))
        ]
        assert together(chunks, [computing for computing, _ in moments]).largest.total == said.total <= limit
        room = plans.limited_room(rank, 0, stops, flags)
        counted = [
            limit
            - room.free[held[computing].kind, computing]
            + sum(room.flying[c, one.flying] + room.waiting[c, one.waiting] for c, one in enumerate(held))
            for computing, held in moments
        ]
        assert max(counted) == said.total


KINDS = {
    ActionKind.F: PassKind.FORWARD,
    ActionKind.I: PassKind.BACKWARD,
    ActionKind.W: PassKind.WEIGHTS,
}


def chunks_held_in(plan, rank, own):
    """Which chunk computes, and what each has in flight and waiting, whenever one does."""
    held = {stage: [0, 0] for stage in own}  # in flight and waiting
    seen = set()
    for action in plan.actions()[rank]:
        of_stage = held[action.stage]
        of_stage[0] += action.kind is ActionKind.F
        if action.kind in KINDS:
            each = tuple(Held(flying, waiting, KINDS[action.kind]) for flying, waiting in held.values())
            seen.add((own.index(action.stage), each))
        of_stage[0] -= action.kind is ActionKind.I
        of_stage[1] += (action.kind is ActionKind.I) - (action.kind is ActionKind.W)
    assert not any(map(any, held.values()))
    return sorted(seen)


def held_in(plan, stage):
    """Micro-batches in flight and waiting, whenever a pass is under way."""
    flying = waiting = 0
    seen = set()
    for action in plan.actions()[stage]:
        flying += action.kind is ActionKind.F
        if action.kind in KINDS:
            seen.add(Held(flying, waiting, KINDS[action.kind]))
        flying -= action.kind is ActionKind.I
        waiting += (action.kind is ActionKind.I) - (action.kind is ActionKind.W)
    assert flying == waiting == 0
    return seen


def bytes_at(problem, candidate, index, stages, stage, held):
    return stage_memory(
        problem.costs,
        problem.parameters,
        stage.device,
        candidate.schedule,
        candidate.split,
        problem.costs.optimizer("a", problem.optimizer),
        number=stages - index,
        first=stage.first_layer,
        stop=stage.stop_layer,
        segments=stage.recompute,
        ring=Ring(stages, 1),
        held=(held,),
    )


def that_waits(device, rows, schedule, workspaces=(), **parameters):
    """A problem of layers with these kept, temporary, sent on, and waiting bytes, and such inside kernels."""
    profile = build_profile(
        {("a", 1): [(1.0, 1.0, 2.0, kept, moment, sent, sent) for kept, moment, sent, _ in rows]}, **parameters
    )
    waits = [
        cost.model_copy(update={"weight_s": 1.0, "weight_kept_bytes": rows[cost.layer][3]}) for cost in profile.costs
    ]
    asked: SettingKeywords = {"schedule": schedule, "micro_batches_per_stage": 1}
    if workspaces:
        for number, (cost, inside) in enumerate(zip(waits, workspaces, strict=False)):
            most = cost.transient_bytes
            whole = InStage(forward_bytes=most, backward_bytes=most, last_backward_bytes=most, workspace_bytes=inside)
            waits[number] = cost.model_copy(update={"in_stage": whole})
    profile = profile.model_copy(update={"costs": tuple(waits)})
    return make_problem(profile, [device], batch_size=1, optimizer=None, settings=asked)


@given(rows=st.lists(st.tuples(*[st.integers(0, 20)] * 4), min_size=1, max_size=6), again=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_micro_batch_that_goes_back_layer_by_layer_never_needs_more(device, rows, again, data):
    """Kept, temporary, sent on, and waiting bytes of each layer: in layer i it has what layers up to i kept, that
    layer's temporaries and the gradients that enter it, and what waits of the layers from i on.

    What waits of all layers used to count as if all of it were new, 15 % of a stage; and where it was less than what
    the layers kept, their temporaries came on top of it uncounted.
    """
    layers = len(rows)
    stop = data.draw(st.integers(1, layers))
    first = data.draw(st.integers(0, stop - 1))
    assume(any(waiting for *_, waiting in rows[first:stop]))  # where nothing waits what was measured says it all
    problem = that_waits(device("a"), rows, "zb-h1")
    said = stage_memory(
        problem.costs,
        problem.parameters,
        problem.devices[0],
        "zb-h1",
        MicroBatches(1, 1),
        problem.costs.optimizer("a", problem.optimizer),
        number=1,
        first=first,
        stop=stop,
        segments=[Segment(first=first, stop=stop)] if again else [],
        held=[Held(1)],
    )
    kept, moments, sent, waiting = zip(*rows, strict=True)
    walked = [
        sum(kept[first : i + 1]) + moments[i] + (sent[i] if i < stop - 1 else 0) + sum(waiting[i:stop])
        for i in range(first, stop)
    ]
    counted = said.transient + (0 if again else sum(kept[first:stop]))
    assert max(walked) <= counted <= max(walked) + max(moments[first:stop])


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 20)] * 4), min_size=1, max_size=6),
    moments=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from(PassKind)), min_size=1, max_size=4
    ),
    extent=st.integers(1, 9),
    kernels=st.sampled_from([(), (3, 0, 7, 1, 30, 2)]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_going_forward_a_recomputed_micro_batch_has_one_layer_at_a_time(device, rows, moments, extent, kernels, data):
    """Kept, temporary, sent on, and waiting bytes of each layer: in layer i it has what came into it, what that layer
    has by itself, and nothing of the others. A stage that keeps all of it has no less going forward than going back.
    A pass of weights has the gradient of one parameter, and what a kernel has inside.

    All that its recompute has used to count in forward passes, too, 6 to 19 % of what a GPT's ranks held in a V.
    """
    layers = len(rows)
    stop = data.draw(st.integers(1, layers))
    first = data.draw(st.integers(0, stop - 1))
    read = {"parameters": [(4, True), (4 * extent, True), (400, False)], "readers": [[0, 1, 2]] * layers}
    problem = that_waits(device("a"), rows, "zb", kernels, **read)

    def passing(segments, moments):
        return stage_moments(
            problem.costs,
            problem.parameters,
            problem.devices[0],
            "zb",
            MicroBatches(3, 3),
            problem.costs.optimizer("a", problem.optimizer),
            number=1,
            first=first,
            stop=stop,
            segments=segments,
            held=[Held(*moment) for moment in moments],
        ).classes["transient"]

    kept, temporary, sent, waiting = zip(*rows, strict=True)
    kinds = [kind for *_, kind in moments]
    back = passing([Segment(first=first, stop=stop)], [(1, 0, PassKind.BACKWARD)]).max()
    inside = kernels or (0,) * 6
    walked = max(kept[i] + temporary[i] + inside[i] + (sent[i - 1] if i > first else 0) for i in range(first, stop))
    found = np.broadcast_to(passing([Segment(first=first, stop=stop)], moments), len(moments))
    waits = [inside[i] for i in range(first, stop) if waiting[i]]
    by_kind = [min(back, walked), back, 4 * extent + max(waits) if waits else 0]
    assert found.tolist() == [by_kind[kind] for kind in kinds]
    kept_all = passing([], [(1, 0, kind) for kind in PassKind])
    assert kept_all[PassKind.FORWARD] == kept_all[PassKind.BACKWARD]
