"""On a card, too, a model trains alike in every bit, whatever the cuts, the schedule and what is recomputed."""

import random
from itertools import pairwise

import pytest

from planner import Plan
from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler import LayerSequence, trace
from tests.benchmarks.stage_models import BATCH, UNLIKE, build
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import orders_for
from tests.executor.same_result import random_segments
from tests.gpu.on_a_card import equal_in_every_run, on_card, trained, unlike

M = 4
STEPS = 2


def random_plan(sequence: LayerSequence, schedule: ScheduleName, chance: random.Random) -> Plan:
    chunks = 2 if SCHEDULES[schedule].most_chunks > 1 else 1
    stages = chunks * chance.randint(2, 3)
    cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
    return plan_for(
        sequence,
        cuts,
        batch_size=BATCH,
        micro_batches=M,
        schedule=schedule,
        chunks=chunks,
        recompute=[random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, len(sequence)])],
        orders=orders_for(schedule, stages, M, chance, chunks),
    )


@pytest.mark.parametrize("name", UNLIKE)
def test_random_plans_train_the_same(name: str) -> None:
    model = build(name)
    sequence = trace(model.model, model.sample)
    chance = random.Random(name)
    wrong = {}
    with equal_in_every_run():
        whole = {  # by whether the last micro-batch is the first to go back
            schedule: trained(
                build(name), on_card(plan_for(sequence, batch_size=BATCH, micro_batches=M, schedule=schedule)), STEPS
            )
            for schedule in ("gpipe", "1f1b")
        }
        for schedule in SCHEDULES:
            plan = random_plan(sequence, schedule, chance)
            found = trained(build(name), on_card(plan), STEPS)
            assert found.said.startswith("as the model computes it"), found.said
            wrong[schedule] = unlike(found, whole["gpipe" if schedule == "gpipe" else "1f1b"])
    assert wrong == {schedule: [] for schedule in SCHEDULES}
