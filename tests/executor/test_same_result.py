"""A few models of the tracer's list; all of them, and in processes, are in tests/benchmarks/test_same_result.py."""

import random

import pytest

from planner.plan.schedules import ScheduleName
from profiler import trace
from tests.coverage.model_list import BATCH_SIZE, BY_NAME
from tests.executor.conftest import _plan as plan_for
from tests.executor.same_result import DROPOUT, M, differing, random_plan, train


@pytest.mark.parametrize(("name", "schedule", "stages"), [("bert", "1f1b", 4)])
def test_random_cuts_train_the_same(name: str, schedule: ScheduleName, stages: int) -> None:
    case = BY_NAME[name].build(dropout=DROPOUT)
    sequence = trace(case.model, case.sample)
    chance = random.Random(name)
    whole = train(plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), name, 2)
    assert differing(train(random_plan(sequence, chance, stages, schedule=schedule), name, 2), whole) == []
