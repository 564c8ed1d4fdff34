"""Random small models by random plans: each gradient against the plain model, and every bit against K = 1.

    python -m pytest -m benchmark tests/benchmarks/test_adversary.py -s
    PYTHONPATH=notebooks/demo python -m tests.benchmarks.test_adversary --first 2500 --models 2500      # more of them

A case is one plan for one model: cuts, K = 1 to 4, M, micro-batches of one and uneven ones, any schedule with chunks or
random orders of its own, recompute, skips, replicas; one of each model's four is the planner's own. 2,510 models make
10,000 cases, though some models may be refused. Each prints its text if it is wrong, and the figures of adversary.md
come at the end. In processes, ranks sleep for random moments before and after their passes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from executor import launch
from executor.run.stage_runner import StageRunner
from planner import NotTraceableError, PlanError
from planner.plan.plan import Plan
from tests.executor.adversary import Case, Subject, Trained, differing, planned_case, random_case, wrong
from tests.models.random_models import random_recipe

MODELS = 2510
PLANS = 4  # for each model
IN_PROCESSES = 40
LATE_S = 0.02  # at most, at each pass of a rank


def adversary(first: int, models: int) -> tuple[int, list[str]]:
    """How many cases ran, and what was wrong, for models of the seeds from `first` on."""
    torch.set_num_threads(1)
    ran, refused, found = 0, 0, []
    seen: Counter[str] = Counter()
    begin_s = time.monotonic()
    for seed in range(first, first + models):
        chance = random.Random(seed)
        recipe = random_recipe(chance, chance.randint(5, 16))
        try:
            subject = Subject(str(recipe))
        except NotTraceableError as problem:
            refused += 1
            print(f"seed {seed} refused: {problem}: {recipe}", flush=True)
            continue
        seen.update(operation.name for operation in recipe.operations)
        for number in range(PLANS):
            case = None
            ran += 1
            try:
                planned = number == 0
                case = planned_case(subject, chance) if planned else random_case(recipe, len(subject.sequence), chance)
                faults: Any = wrong(case, subject)
            except PlanError as problem:
                faults = str(problem)
            if faults:
                found.append(f"seed {seed}: {faults}: {case or recipe!r}")
                print(found[-1], flush=True)
        if (seed - first) % 50 == 49:
            print(f"{ran} cases, {len(found)} wrong, {time.monotonic() - begin_s:.0f} s", flush=True)
    print(f"{ran} cases of {models} models (seeds from {first}), {refused} of them refused, {len(found)} wrong")
    print(f"operations: {dict(seen)}", flush=True)
    return ran, found


@pytest.mark.benchmark
def test_ten_thousand_cases() -> None:
    ran, found = adversary(0, MODELS)
    assert ran >= 10_000
    assert found == []


@pytest.mark.benchmark
@pytest.mark.parametrize("seed", range(IN_PROCESSES))
def test_late_ranks(seed: int) -> None:
    """The bits of one process, whichever rank is late."""
    chance = random.Random(10**6 + seed)
    while True:
        recipe = random_recipe(chance, chance.randint(6, 16))
        subject = Subject(str(recipe))
        if len(subject.sequence) > 1:
            break
    case = random_case(recipe, len(subject.sequence), chance)
    expected = subject.trained(case)
    for rank, part in enumerate(launch(partial(_late, case, seed), case.plan(subject.sequence))):
        assert differing(part, expected) == [], (rank, case)


def _late(case: Case, seed: int, plan: Plan) -> Trained:
    torch.set_num_threads(1)
    chance = random.Random(f"{seed} {torch.distributed.get_rank() if torch.distributed.is_initialized() else id(plan)}")

    def delayed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            time.sleep(chance.random() * LATE_S)
            result = method(*args, **kwargs)
            time.sleep(chance.random() * LATE_S)
            return result

        return run

    for name in ("forward", "backward"):
        setattr(StageRunner, name, delayed(getattr(StageRunner, name)))
    return Subject(case.recipe).trained(case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--models", type=int, default=MODELS)
    given = parser.parse_args()
    adversary(given.first, given.models)
