"""A model that branches on values trains along the sample's branch, and a batch that takes another is an error."""

import contextlib
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional

from executor import Pipeline, launch
from planner import ExecutionError, Plan
from profiler import trace
from profiler.tracing.sequence import LayerSequence
from tests.executor.conftest import PlanFor
from tests.models.branching import BODIES, branching, gradients

M = 4


def whole(name: str) -> dict[str, Tensor | None]:
    """Gradients of the eager model, micro-batch by micro-batch."""
    model, x, target, _ = branching(name)
    for part, aims in zip(x.chunk(M), target.chunk(M), strict=True):
        (functional.cross_entropy(model(part), aims) / M).backward()
    return gradients(model)


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, gradient in found.items():
        other = expected[name]
        same = gradient is other if gradient is None or other is None else torch.allclose(gradient, other, atol=1e-6)
        assert same, name


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("name", BODIES)
def test_the_other_branch_is_an_error(plan_for: PlanFor, name: str) -> None:
    model, x, target, other = branching(name)
    sequence = trace(model, x)
    assert sequence.sample.front_end == "export"
    assert sequence.sample.decisions
    pipe = Pipeline(
        model,
        plan_for(sequence, batch_size=8, micro_batches=M, recompute=True),
        loss_fn=functional.cross_entropy,
    )
    pipe.step(x, target=target)
    if name != "after_random_numbers":
        assert_close(gradients(model), whole(name))
    model.zero_grad()
    place = r"branching\.py:\d+ .*in this micro-batch and was .* for the sample"
    with pytest.raises(ExecutionError, match=place):
        pipe.step(other, target=target)
    assert all(gradient is None for gradient in gradients(model).values())
    assert torch.is_grad_enabled()  # torch's regions without gradient leave it off where something raises in them
    with pytest.raises(ExecutionError, match=place):
        pipe.evaluate(other, target=target)


def a_good_and_a_bad_step(name: str, plan: Plan) -> tuple[dict[str, Tensor | None], str]:
    """Gradients of the first, and what the second says."""
    model, x, target, other = branching(name)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(x, target=target)
    found = gradients(model)
    # A rank that fails ends the others wherever they are: here no more in the step before, though some in this barrier.
    with contextlib.suppress(RuntimeError):
        distributed.barrier()
    try:
        pipe.step(other, target=target)
    except ExecutionError as problem:
        return found, str(problem)
    return found, ""


def trace_of(name: str) -> LayerSequence:
    model, x, _, _ = branching(name)
    return trace(model, x, progress=False)


@pytest.mark.parametrize("name", BODIES)
def test_all_ranks_end_with_it(plan_for: PlanFor, inherited: Callable[..., LayerSequence], name: str) -> None:
    sequence = inherited(trace_of, name)
    stages = 2 + [*BODIES].index(name) % 2
    cuts = [round(len(sequence) * stage / stages) for stage in range(1, stages)]
    plan = plan_for(sequence, cuts, batch_size=8, micro_batches=M)
    parts = launch(partial(a_good_and_a_bad_step, name), plan)
    assert len(parts) == stages
    merged = {k: next((g[k] for g, _ in parts if g[k] is not None), None) for k in parts[0][0]}
    if name != "after_random_numbers":
        assert_close(merged, whole(name))
    for _, said in parts:  # condition, source line and both values
        assert re.match(r"rank \d", said)
        assert re.search(r"branching\.py:\d+ .* in this micro-batch and was .* for the sample", said), said


class OnAFlag(torch.nn.Module):
    """Cannot be traced, and takes a condition on values that the model has read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        many = int((x > 0).sum().item())
        y: Tensor = self.linear(x)
        return y * 2 + 0 * many if flag else y


class ReadsAFlag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = torch.nn.Linear(8, 8), OnAFlag(), torch.nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.last(self.kept(self.first(x), (mask > 0).any().item()))
        return y


@pytest.mark.usefixtures("traced_once")
def test_a_module_that_is_called_as_it_is_may_take_a_condition_on_values(plan_for: PlanFor) -> None:
    """It was planned and could not be trained: where the plan traced it again, the condition was a symbol."""
    torch.manual_seed(0)
    model, x, mask, target = ReadsAFlag(), torch.randn(8, 8), torch.ones(8), torch.randint(3, (8,))
    sequence = trace(model, (x, mask), keep_together=["kept"])
    pipe = Pipeline(model, plan_for(sequence, batch_size=8, micro_batches=M), loss_fn=functional.cross_entropy)
    assert pipe.step(x, mask, target=target).item() == pytest.approx(
        functional.cross_entropy(model(x, mask), target).item()
    )
    with pytest.raises(ExecutionError, match=r"in this micro-batch and was True for the sample"):
        pipe.step(x, 0 * mask, target=target)
