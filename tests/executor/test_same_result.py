"""A few models of the tracer's list; all of them, and in processes, are in tests/benchmarks/test_same_result.py."""

import random

import pytest

from planner.plan.schedules import ScheduleName
from profiler import trace
from tests.coverage.model_list import BATCH_SIZE, BY_NAME
from tests.executor.conftest import _plan as plan_for
from tests.executor.same_result import DROPOUT, M, differing, random_plan, train


@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "1f1b"), ("bert", "gpipe")])
def test_every_cut_trains_the_same(name: str, schedule: ScheduleName) -> None:
    case = BY_NAME[name].build(dropout=DROPOUT)
    sequence = trace(case.model, case.sample)
    chance = random.Random(name)
    whole = train(plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), name, 2)
    for stages in (3, 4):
        assert differing(train(random_plan(sequence, chance, stages, schedule=schedule), name, 2), whole) == []
