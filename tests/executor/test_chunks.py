"""Ranks with several chunks train as one stage does, in one process and in several."""

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import Pipeline, launch
from executor.world import check_world_size
from planner import Plan
from planner.plan.schedules import SCHEDULES, ScheduleName
from planner.plan.timeline import save_timeline_json
from profiler import ForeignPlanError, LayerSequence
from tests.executor.random_orders import orders_for
from tests.executor.rich_training import Training, X, plans_of, sequence
from tests.executor.test_checkpoint import load_and_go_on, save_after_two
from tests.executor.test_pipeline import report, tracks
from tests.executor.test_skips import BATCH, cuts_of, ladder
from tests.executor.test_skips import Y as LADDER_Y
from tests.executor.test_skips import traced as traced_ladder
from tests.executor.test_skips import train as train_ladder
from tests.executor.trained_cases import BATCH_SIZE, CASES, M, Trained, assert_same, case, random_segments, train
from tests.executor.trained_cases import traced as traced_case

INTERLEAVED = [name for name, record in SCHEDULES.items() if record.most_chunks > 1]


def random_cuts(chance: random.Random, layers: int, stages: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Cuts, and segments of each stage."""
    cuts = sorted(chance.sample(range(1, layers), stages - 1))
    return cuts, [random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, layers])]


def chunk_plan(
    plan_for: Callable[..., Plan], traced: LayerSequence, chance: random.Random, ranks: int, **settings: Any
) -> Plan:
    """At random cuts with random segments, and with random orders where each plan has its own."""
    stages = ranks * settings["chunks"]
    cuts, segments = random_cuts(chance, len(traced), stages)
    orders = orders_for(settings["schedule"], stages, settings["micro_batches"], chance, settings["chunks"])
    return plan_for(traced, cuts, **settings, recompute=segments, orders=orders)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("name", "schedule"), list(zip(CASES, cycle(INTERLEAVED), strict=False)))
def test_chunks_change_no_bit(name: str, schedule: ScheduleName, plan_for: Callable[..., Plan]) -> None:
    """Nor does the schedule, as long as gradients are summed in the order of the micro-batches."""
    current, traced = case(name), traced_case(name)
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "micro_batches": M}
    whole = train(plan_for(traced, **settings, schedule="1f1b"), current, evaluates=False)
    chance = random.Random(name)
    for ranks, chunks in ((2, 2), (3, 2), (2, 3)):
        if chunks > SCHEDULES[schedule].most_chunks:
            continue
        plan = chunk_plan(plan_for, traced, chance, ranks, schedule=schedule, chunks=chunks, **settings)
        assert_same(train(plan, current, evaluates=False), whole)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "schedule", "micro_batches"),
    [
        ("gpt", 2, 2, "interleaved", 4),
        ("cnn", 2, 3, "interleaved-lean", 5),
        ("shared", 3, 2, "interleaved", 4),
        ("layouts", 2, 2, "interleaved-lean", 10),
        ("gpt", 2, 2, "zb-v", 4),
        ("cnn", 3, 2, "zb-v", 5),
        ("layouts", 2, 2, "zb-v", 10),
        ("shared", 3, 2, "zb-v", 4),
    ],
)
def test_processes_with_chunks_train_as_one(
    name: str,
    ranks: int,
    chunks: int,
    schedule: ScheduleName,
    micro_batches: int,
    plan_for: Callable[..., Plan],
    inherited: Callable[..., LayerSequence],
) -> None:
    """Tied weights, buffers, dropout, values that are relayed from chunk to chunk, any M."""
    current, traced = case(name), inherited(traced_case, name)
    evaluates = name == "cnn"  # each process traces the model once more for it
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "micro_batches": micro_batches}
    whole = train(plan_for(traced, **settings, schedule="1f1b"), current, evaluates=evaluates)
    plan = chunk_plan(plan_for, traced, random.Random(7), ranks, schedule=schedule, chunks=chunks, **settings)
    parts: list[Trained] = launch(partial(train, evaluates=evaluates), plan, (current,))
    assert len(parts) == ranks
    for part in parts:
        assert_same(part, whole)
    assert set().union(*(part.state for part in parts)) == set(whole.state)
    assert set().union(*(part.gradients for part in parts)) == set(whole.gradients)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_each_process_walks_the_list_of_its_rank(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], schedule: ScheduleName
) -> None:
    traced = inherited(traced_ladder, "3")
    settings: dict[str, Any] = {"batch_size": BATCH, "micro_batches": M, "schedule": schedule, "chunks": 2}
    orders = orders_for(schedule, 4, M, random.Random(3), 2)
    plan = plan_for(traced, cuts_of(traced)[:3], **settings, orders=orders)
    whole = train_ladder(plan)
    for rank, (part, actions) in enumerate(launch(train_and_list, plan)):
        assert actions == [str(action) for action in plan.actions()[rank]]
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


def train_and_list(plan: Plan) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What is trained, and the actions of this process in order."""
    found = train_ladder(plan)
    pipe = Pipeline(ladder(), plan, loss_fn=torch.nn.functional.mse_loss)
    inputs = LADDER_Y  # any values of that shape
    call = pipe._feed.call("step", (inputs,), {}, LADDER_Y, training=True)
    return found, [str(instruction.action) for instruction in pipe._calls.program(call, call.own[0]).instructions]


def predictions(plan: Plan) -> list[torch.Tensor]:
    """For other numbers of samples than the plan's, so for other M."""
    training = Training(plan)
    training.steps(2)
    return [training.pipe.predict(x) for x in (X, X[:1], X[:3].flip(0), torch.cat((X, X)))]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_chunks_predict_for_any_number_of_samples(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], schedule: ScheduleName
) -> None:
    inherited(sequence)
    settings: dict[str, Any] = {"batch_size": 10, "micro_batches": 4}
    whole = predictions(plan_for(sequence(), **settings, schedule="1f1b"))
    orders = orders_for(schedule, 4, 4, random.Random(3), 2)
    folded = plan_for(sequence(), [1, 2, 3], **settings, schedule=schedule, chunks=2, orders=orders)
    parts = launch(predictions, folded)
    last = parts.pop(folded.stages[-1].rank)  # it has them
    assert all(value is None for part in parts for value in part)
    for part in (predictions(folded), last):
        assert all(torch.equal(one, other) for one, other in zip(part, whole, strict=True))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_steps_are_measured_in_a_row_for_each_rank(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], tmp_path: Path, schedule: ScheduleName
) -> None:
    current, traced = case("gpt"), inherited(traced_case, "gpt")
    cuts = [round(len(traced) * cut / 4) for cut in range(1, 4)]
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "micro_batches": M, "schedule": schedule, "chunks": 2}
    orders = orders_for(schedule, 4, M, random.Random(3), 2)
    plan = plan_for(traced, cuts, **settings, recompute=True, orders=orders)
    frame = launch(report, plan, (current, tmp_path))[0][0]
    measured = frame.set_index(["stage", "what"])["measured"]
    assert all(measured[stage, "forward_s"] > 0 for stage in range(4))
    for rank in range(2):
        assert 0 <= measured[rank, "idle_s"] < measured[-1, "makespan_s"]
        held = sum(parameter.nbytes for parameter in traced.parameters.values()) / 8
        assert measured[rank, "peak_bytes"] > held
    assert (2, "idle_s") not in measured.index
    save_timeline_json(plan, tmp_path / "predicted.json")
    real, predicted = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("real", "predicted"))
    assert tracks(real) == tracks(predicted)
    assert {"rank 0", "rank 1"} <= set(tracks(real))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_checkpoints_go_from_chunks_to_stages_and_back(
    plan_for: Callable[..., Plan], inherited: Callable[..., LayerSequence], tmp_path: Path, schedule: ScheduleName
) -> None:
    inherited(sequence)
    plans = plans_of(plan_for, schedule="interleaved")
    layers = len(sequence())
    cuts = [round(layers * cut / 4) for cut in range(1, 4)]
    orders = orders_for(schedule, 4, 4, random.Random(3), 2)
    folded = plan_for(sequence(), cuts, batch_size=10, micro_batches=4, schedule=schedule, chunks=2, orders=orders)
    expected = save_after_two(plans[1], tmp_path / "one")
    assert launch(save_after_two, folded, (tmp_path / "folded",)) == [expected] * 2
    for folder, plan in (("one", folded), ("folded", plans[1]), ("folded", plans[3])):
        assert load_and_go_on(plan, tmp_path / folder) == expected
    assert launch(load_and_go_on, folded, (tmp_path / "one",)) == [expected] * 2


def test_a_plan_with_chunks_needs_a_process_for_each_rank(plan_for: Callable[..., Plan]) -> None:
    folded = plan_for(sequence(), [1, 2, 3], batch_size=10, micro_batches=4, schedule="interleaved", chunks=2)
    check_world_size(folded, 1)
    check_world_size(folded, 2)
    with pytest.raises(ForeignPlanError, match="4 stages, 2 on each rank, but 4 processes run; start 2 processes"):
        check_world_size(folded, 4)
