"""The same training for every cut, through the executor: all models of the tracer's list, all schedules, recompute.

    STEPS=20 ROWS=rows.jsonl python -m pytest -m benchmark tests/benchmarks/test_same_result.py -s

For each model with dropout, within each schedule: losses, gradients and parameters after 20 optimizer steps, for 1, 2,
3 and 4 ranks with 1 to 3 chunks each at random cuts with random recomputed segments (and for schedules zb and zb-v
random orders), bitwise against one stage without recompute; under any schedule but GPipe, which sums gradients in
another order, that is one stage under 1F1B. For a few models the same in processes. With dropout off: the gradients
against the plain model's, accumulated over the same micro-batches, within 1e-5 of their scale. Prints the rows of
same_result.md; a run that was interrupted goes on where it stopped, from what that file holds.
"""

import copy
import math
import os
import random
from collections.abc import Callable
from functools import cache, lru_cache, partial

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor import Pipeline, launch
from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler import LayerSequence, trace
from profiler.run.loss import loss_of
from profiler.tracing.sample import call_arguments
from tests.benchmarks.kept_rows import kept
from tests.coverage.model_list import BATCH_SIZE, BY_NAME, MODELS, Case, Entry
from tests.executor import known_traces
from tests.executor.conftest import _plan as plan_for
from tests.executor.conftest import inherited, traced_once  # noqa: F401 - fixtures
from tests.executor.same_result import DROPOUT, M, Trained, differing, random_plan, train

STEPS = int(os.environ.get("STEPS", "20"))
WITHIN = 1e-5
SMALLEST_SCALE = 1e-4  # see tests.coverage.fidelity
NOTHING = 1e-6  # of the largest gradient: one below is 0 but for rounding, such as a bias's before batch normalization
RANKS = (1, 2, 3, 4)
MORE_CHUNKS = (2, 3)
IN_PROCESSES = ["gpt2", "t5", "AmoebaNet-D", "GNMT"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.benchmark
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_every_cut_trains_the_same_for_twenty_steps(entry: Entry) -> None:
    cells = [
        kept(f"{entry.name} {STEPS} {schedule} {chunks}", partial(cell_of, entry.name, schedule, chunks))
        for schedule, chunks in kinds()
    ]
    error = kept(f"{entry.name} against plain", partial(gradient_error, entry))
    print(f"\n| {entry.name} | {' | '.join(cells)} | {error:.1e} |", flush=True)


def cell_of(name: str, schedule: ScheduleName, chunks: int) -> str:
    """How many plans of a schedule trained as one stage does, and the share of their layers that were recomputed."""
    sequence = remembered(name)
    known_traces.remember(sequence)
    chance = random.Random(f"{name} {schedule} {chunks}")
    whole = trained_whole(name, "gpipe" if schedule == "gpipe" else "1f1b")
    assert all(math.isfinite(loss) for loss in whole.losses)
    again = plans = 0
    for ranks in RANKS:
        if ranks * chunks > len(sequence):
            continue
        plan = random_plan(sequence, chance, ranks * chunks, schedule=schedule, chunks=chunks)
        again += sum(segment.stop - segment.first for stage in plan.stages for segment in stage.recompute)
        plans += 1
        assert differing(train(plan, name, STEPS), whole) == [], f"{schedule}, {ranks} ranks x {chunks}"
    known_traces.forget()
    return f"{plans} ({again / (plans * len(sequence)):.0%})"


def kinds() -> list[tuple[ScheduleName, int]]:
    """Each schedule with each number of chunks that it may have; one with a single chunk is 1F1B by another name."""
    return [
        (name, chunks)
        for name, record in SCHEDULES.items()
        for chunks in ((1,) if record.most_chunks == 1 else MORE_CHUNKS)
        if record.fewest_chunks <= chunks <= record.most_chunks
    ]


@cache
def remembered(name: str) -> LayerSequence:
    """The layers of a model with dropout, which pipelines need not trace again."""
    case = BY_NAME[name].build(dropout=DROPOUT)
    return trace(case.model, case.sample)


@lru_cache(maxsize=2)
def trained_whole(name: str, schedule: ScheduleName) -> Trained:
    """What one stage leaves, without recompute."""
    plan = plan_for(remembered(name), batch_size=BATCH_SIZE, micro_batches=M, schedule=schedule)
    return train(plan, name, STEPS)


@pytest.mark.benchmark
@pytest.mark.parametrize(("schedule", "chunks"), kinds())
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_train_the_same_for_twenty_steps(
    name: str,
    schedule: ScheduleName,
    chunks: int,
    inherited: Callable[..., LayerSequence],  # noqa: F811
) -> None:
    sequence = inherited(remembered, name)
    known_traces.remember(sequence)
    chance = random.Random(f"{name} {schedule} {chunks}")
    whole = trained_whole(name, "gpipe" if schedule == "gpipe" else "1f1b")
    for ranks in RANKS[1:]:
        plan = random_plan(sequence, chance, ranks * chunks, schedule=schedule, chunks=chunks)
        for part in launch(train, plan, (name, STEPS)):
            assert differing(part, whole) == [], f"{ranks} ranks"
    known_traces.forget()
    print(f"\nin 2, 3 and 4 processes: {name}, {schedule}, {chunks} chunks a rank: equal in every bit", flush=True)


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
