"""What has come out in one process comes out in several: memory order, draws of evaluations; what cannot is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ArgumentError, Plan
from profiler import trace

LABELS = torch.arange(8) % 4
BATCH, WIDE = 8, 2048


class Images(nn.Module):
    """A sum over positions, whose order in memory is that of the images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x))
        return self.last(functional.dropout(torch.relu(hidden + self.other(x)).mean((2, 3)), 0.5, training=True))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def in_other_order() -> list[tuple[Tensor, Tensor]]:
    """Images by channel last, and labels that lie apart."""
    return [(images().to(memory_format=torch.channels_last), LABELS.repeat_interleave(2)[::2])] * 2


def all_that_comes_out(plan: Plan, who_reads: str) -> tuple[list[Any], Tensor]:
    """Losses of steps and evaluations, a prediction where there is one, and the caller's next random number."""
    pipe = Pipeline(Images(), plan, loss_fn=functional.cross_entropy, seed=3)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: list[Any] = []
    for x, y in in_other_order() if who_reads == "all" else pipe.batches(in_other_order()):
        found.append(pipe.step(x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
        found += [pipe.evaluate(x, target=y).item() for _ in range(2)]
        predicted = pipe.predict(x)
        found.append(predicted if predicted is None else predicted.sum().item())
    return found, torch.rand(1)


def planned(plan_for: Callable[..., Plan], cuts: list[int], **more: Any) -> Plan:
    return plan_for(trace(Images(), images()), cuts, batch_size=BATCH, micro_batches=4, **more)


@pytest.mark.parametrize("who_reads", ["all", "the first"])
@pytest.mark.parametrize("cuts", [[2], [4]])
def test_two_stages_compute_what_one_does(plan_for: Callable[..., Plan], cuts: list[int], who_reads: str) -> None:
    """Images by channel last were sent in another order; evaluations drew from the rank's own generator."""
    expected, drawn = all_that_comes_out(planned(plan_for, []), "all")
    found = launch(all_that_comes_out, planned(plan_for, cuts), (who_reads,))
    for results, after in found:
        assert torch.equal(after, drawn)
        assert [one for one in results if one is not None] == [
            one for one, other in zip(expected, results, strict=True) if other is not None
        ]
    losses = [one for one in expected if one is not None]
    assert len(set(losses)) == len(losses)  # each evaluation draws numbers of its own


def test_replicas_draw_what_one_process_draws(plan_for: Callable[..., Plan]) -> None:
    """Both drew the same numbers for unlike samples."""
    plan = planned(plan_for, [], replicas=2)
    expected, _ = all_that_comes_out(plan, "all")
    for results, _ in launch(all_that_comes_out, plan, ("all",)):
        for number, (one, other) in enumerate(zip(results, expected, strict=True)):
            assert one == other or number % 4 == 3  # a prediction is of the replica's samples


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Scaled(nn.Module):
    """A loss that learns a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output * self.scale, target)


X = torch.linspace(-1, 1, BATCH * 16).reshape(BATCH, 16)


def trained(plan: Plan, what: str) -> bool:
    """One step with a loss that has parameters, with an input that takes a gradient, or by LBFGS."""
    x = X.clone().requires_grad_(what == "an input of the model requires a gradient")
    loss_fn = Scaled() if what.startswith("loss_fn") else functional.cross_entropy
    pipe = Pipeline(Small(), plan, loss_fn=loss_fn)
    if what.startswith("LBFGS"):
        torch.optim.LBFGS(pipe.parameters()).step(lambda: pipe.step(x, target=LABELS))
    else:
        pipe.step(x, target=LABELS)
    return True


@pytest.mark.parametrize(
    "what",
    [
        "loss_fn depends on a trainable parameter of shape [4] by itself",
        "an input of the model requires a gradient",
        "LBFGS decides by sums over all parameters",
    ],
)
def test_what_other_processes_would_not_know_is_refused_there(plan_for: Callable[..., Plan], what: str) -> None:
    """Each process trained a copy of its own of the loss's scale, had a part of x.grad, or another line search."""
    plan = plan_for(trace(Small(), X), [1], batch_size=BATCH, micro_batches=4)
    with pytest.raises(ArgumentError, match=re.escape(what)):
        launch(trained, plan, (what,))
    assert trained(plan, what)


def stepped_by_line_search(plan: Plan) -> list[float]:
    """Losses of two steps of LBFGS."""
    pipe = Pipeline(Small(), plan, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.LBFGS(pipe.parameters(), lr=0.1, max_iter=3)

    def again() -> Tensor:
        optimizer.zero_grad()
        return pipe.step(X, target=LABELS)

    return [float(optimizer.step(again)) for _ in range(2)]


def test_a_process_with_all_stages_steps_by_line_search(plan_for: Callable[..., Plan]) -> None:
    """Refused was any process that is not alone."""
    plan = plan_for(trace(Small(), X), [], batch_size=BATCH, micro_batches=4, replicas=2)
    expected = stepped_by_line_search(plan)
    assert expected[0] > expected[1]
    for found in launch(stepped_by_line_search, plan):
        assert found == expected


class LaterPenalty:
    """It keeps weights small once it was called often enough."""

    def __init__(self, weight: Tensor, first: int) -> None:
        self.weight, self.first, self.calls = weight, first, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = functional.cross_entropy(output, target)
        return loss + self.weight.square().sum() if self.calls > self.first else loss


def with_a_later_penalty(plan: Plan) -> bool:
    """Steps until the penalty is asked for."""
    model = Small()
    pipe = Pipeline(model, plan, loss_fn=LaterPenalty(model.last.weight, 40), compare_first_step=False)
    for _ in range(20):
        pipe.step(X, target=LABELS)
    return True


def test_a_penalty_that_begins_later_is_refused_too(plan_for: Callable[..., Plan]) -> None:
    """The first micro-batch of all was looked at alone."""
    plan = plan_for(trace(Small(), X), [1], batch_size=BATCH, micro_batches=4)
    with pytest.raises(ArgumentError, match="by itself"):
        launch(with_a_later_penalty, plan)


def rates_after_loading(plan: Plan, folder: str) -> list[float]:
    """Of all groups, one of which has no parameter in the first process, after other ones were saved."""
    pipe = Pipeline(Small(), plan, loss_fn=functional.cross_entropy)
    groups = [
        {"params": [one for name, one in pipe.named_parameters() if name.startswith(part)], "lr": rate}
        for part, rate in (("first", 0.1), ("last", 0.2))
    ]
    optimizer = torch.optim.SGD(groups)
    pipe.step(X, target=LABELS)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    optimizer.step()
    save_checkpoint(folder, pipe, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    load_checkpoint(folder, pipe, optimizer)
    return [group["lr"] for group in optimizer.param_groups]


def test_groups_of_other_processes_get_their_options_too(plan_for: Callable[..., Plan], tmp_path: Any) -> None:
    """Of a group whose parameters were elsewhere a process logged the rate that it began with."""
    plan = plan_for(trace(Small(), X), [1], batch_size=BATCH, micro_batches=4)
    assert launch(rates_after_loading, plan, (str(tmp_path / "run"),)) == [[0.05, 0.1]] * 2


class Expanded(nn.Module):
    """Holds one number many times, before a normalization whose statistics move."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("scale", torch.tensor([0.5]).expand(16))
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x * self.scale))


def test_a_comparison_puts_back_what_a_buffer_holds_many_times(plan_for: Callable[..., Plan]) -> None:
    """It failed there, left statistics as they had become, and took the error for the model's own."""
    model = Expanded()
    plan = plan_for(trace(model, X), [], batch_size=BATCH, micro_batches=4)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(X, target=LABELS)
    assert pipe.first_step.startswith("as the model computes it")
    assert model.norm.num_batches_tracked == 1


def test_a_complex_loss_is_refused(plan_for: Callable[..., Plan]) -> None:
    """Its imaginary part was left out."""
    pipe = Pipeline(
        Small(),
        plan_for(trace(Small(), X), [], batch_size=BATCH, micro_batches=4),
        loss_fn=lambda output, target: functional.cross_entropy(output, target).to(torch.complex64),
    )
    with pytest.raises(ArgumentError, match=r"a number of type torch\.complex64, not a real scalar"):
        pipe.step(X, target=LABELS)


def test_what_is_conjugated_lazily_arrives_so(plan_for: Callable[..., Plan]) -> None:
    """Its bit does not travel."""
    x = torch.randn(BATCH, WIDE, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    plan = plan_for(trace(Turned(), x), [1], batch_size=BATCH, micro_batches=4)
    expected = of_conjugated(plan, x)
    assert launch(of_conjugated, plan, (x,)) == [expected] * 2


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.last = nn.Linear(WIDE, 16), nn.Linear(WIDE, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.real)) + self.other(x.imag))


def of_conjugated(plan: Plan, x: Tensor) -> float:
    pipe = Pipeline(Turned(), plan, loss_fn=functional.cross_entropy)
    ((mine, target),) = [(x.conj(), LABELS)] if pipe.rank == 0 else [(None, None)]
    return float(pipe.step(mine, target=target) if mine is not None else pipe.step())
