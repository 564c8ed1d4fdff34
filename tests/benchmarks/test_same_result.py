"""The same training for every cut, through the executor: all models of the tracer's list, both schedules, recompute.

    make bench

For each model with dropout, within each schedule: losses, gradients and parameters after 20 optimizer steps, for
K = 1, 2, 3, 4 at random cuts with random recomputed segments, bitwise against K = 1 without recompute; for a few models
the same in K processes. With dropout off: the gradients against the plain model's, accumulated over the same
micro-batches, within 1e-5 of their scale. Prints the rows of same_result.md.
"""

import copy
import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor import Pipeline, launch
from planner.plan.schedules import ScheduleName
from profiler import trace
from profiler.run.loss import loss_of
from profiler.tracing.sample import call_arguments
from tests.coverage.model_list import BATCH_SIZE, BY_NAME, MODELS, Case, Entry
from tests.executor.conftest import _plan as plan_for
from tests.executor.same_result import DROPOUT, M, differing, random_plan, train

STEPS = 20
WITHIN = 1e-5
SMALLEST_SCALE = 1e-4  # see tests.coverage.fidelity
NOTHING = 1e-6  # of the largest gradient: one below is 0 but for rounding, such as a bias's before batch normalization
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
IN_PROCESSES = ["gpt2", "t5", "AmoebaNet-D", "GNMT"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.benchmark
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_every_cut_trains_the_same_for_twenty_steps(entry: Entry) -> None:
    case = entry.build(dropout=DROPOUT)
    sequence = trace(case.model, case.sample)
    equal = []
    for schedule in SCHEDULES:
        chance = random.Random(f"{entry.name} {schedule}")
        whole = train(plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), entry.name, STEPS)
        assert all(math.isfinite(loss) for loss in whole.losses)
        for stages in (1, 2, 3, 4):
            plan = random_plan(sequence, chance, stages, schedule=schedule)
            again = sum(segment.stop - segment.first for stage in plan.stages for segment in stage.recompute)
            found = train(plan, entry.name, STEPS)
            assert differing(found, whole) == [], f"K = {stages}"
            equal.append(f"{again}/{len(sequence)}")
    print(f"\n| {entry.name} | {' | '.join(equal)} | {gradient_error(entry):.1e} |")


@pytest.mark.benchmark
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_train_the_same_for_twenty_steps(name: str, schedule: ScheduleName) -> None:
    case = BY_NAME[name].build(dropout=DROPOUT)
    sequence = trace(case.model, case.sample)
    chance = random.Random(f"{name} {schedule}")
    whole = train(plan_for(sequence, batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule), name, STEPS)
    for stages in (2, 3, 4):
        parts = launch(train, random_plan(sequence, chance, stages, schedule=schedule), (name, STEPS))
        for part in parts:
            assert differing(part, whole) == [], f"K = {stages}"
    print(f"\nin 2, 3 and 4 processes: {name}, {schedule}: equal in every bit")


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the plain model's
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_every_cut_evaluates_the_same(entry: Entry) -> None:
    """Outputs of the whole batch for K = 1, 2, 3, 4, against `model.eval()`; most models do other operations then."""
    case = entry.build(dropout=DROPOUT)
    args, kwargs = call_arguments(case.sample)
    with torch.no_grad():
        expected = _tensors(copy.deepcopy(case.model).eval()(*args, **kwargs))
    sequence = trace(case.model, case.sample)
    chance = random.Random(entry.name)
    whole: list[Tensor] = []
    for stages in (1, 2, 3, 4):
        cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
        plan = plan_for(sequence, cuts, batch_size=BATCH_SIZE, micro_batches=1)
        found = _tensors(Pipeline(case.model, plan).predict(*args, **kwargs))
        whole = whole or found
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True)), f"K = {stages}"
    for one, other in zip(whole, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def gradient_error(entry: Entry) -> float:
    """Largest difference to the gradients of plain accumulation, dropout off, relative to the gradient's largest."""
    case = entry.build()
    expected = accumulated(copy.deepcopy(case))
    sequence = trace(case.model, case.sample)
    plan = random_plan(sequence, random.Random(entry.name), 3, schedule="gpipe")
    pipe = Pipeline(case.model, plan, loss_fn=case.loss_fn)
    args, kwargs = call_arguments(case.sample)
    pipe.step(*args, target=case.target, **kwargs)
    found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = {
        name: float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), SMALLEST_SCALE * largest)
        for name, gradient in expected.items()
        if max(float(gradient.abs().max()), float(found[name].abs().max())) > NOTHING * largest
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= WITHIN, worst
    return errors[worst]


def accumulated(case: Case) -> dict[str, Tensor]:
    """Gradients of the plain model over the micro-batches, in the order of GPipe's backward passes."""
    size = BATCH_SIZE // M
    for first in reversed(range(0, BATCH_SIZE, size)):
        part = slice(first, first + size)
        sample, target = pytree.tree_map_only(Tensor, partial(_samples, part), (case.sample, case.target))
        args, kwargs = call_arguments(sample)
        (loss_of(case.model(*args, **kwargs), target, case.loss_fn) / M).backward()
    return {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}


def _samples(part: slice, tensor: Tensor) -> Tensor:
    return tensor[part]
