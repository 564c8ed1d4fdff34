"""The first step is compared with the model as it is: what a graph loses without a word ends with an error."""

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner.plan.plan import Plan
from profiler import trace
from profiler.errors import ArgumentError, UnfaithfulTraceError
from profiler.run.against_eager import Trial
from profiler.tracing.sequence import LayerSequence
from tests.torch_here import needs_lstm_in_bfloat16

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.ones(8, 4)
OUTSIDE = {"factor": 2.0, "limit": 100.0}  # where a graph does not look


class Middle(nn.Module):
    """Computes with a number that lies outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if OUTSIDE["factor"] > OUTSIDE["limit"]:
            raise ValueError("the factor is too large")
        return functional.dropout(self.norm(x) * OUTSIDE["factor"], 0.25)


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), Middle(), nn.Linear(4, 4))


@pytest.fixture(scope="module")
def sequence() -> LayerSequence:
    return trace(model_of(), X)


def pipeline_of(plan_for: Callable[..., Plan], sequence: LayerSequence, **settings: Any) -> Pipeline:
    plan = plan_for(sequence, [1], batch_size=8, micro_batches=4)
    return Pipeline(model_of(), plan, loss_fn=functional.mse_loss, **settings)


def test_a_number_that_changed_since_the_trace(
    plan_for: Callable[..., Plan], sequence: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained on with the old number, without a word."""
    pipe = pipeline_of(plan_for, sequence)
    monkeypatch.setitem(OUTSIDE, "factor", 2.1)
    with pytest.raises(
        UnfaithfulTraceError, match=r"differ from the model by .* they part in layer \d+, .*1.*keep_tog"
    ):
        pipe.step(X, target=Y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_an_assertion_that_no_graph_holds(
    plan_for: Callable[..., Plan], sequence: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline_of(plan_for, sequence)
    monkeypatch.setitem(OUTSIDE, "limit", 1.0)
    with pytest.raises(
        UnfaithfulTraceError, match=r"the model raises ValueError: the factor is too large; its layers do"
    ):
        pipe.step(X, target=Y)


class Count:
    """Not a module, and nothing in it is a tensor."""

    calls = 0

    def __call__(self) -> int:
        type(self).calls += 1
        return type(self).calls


def test_a_model_that_counts_its_calls(
    plan_for: Callable[..., Plan], sequence: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers computed every step as the first, each time anew when it is traced."""
    pipe = pipeline_of(plan_for, sequence)
    forward, count = Middle.forward, Count()
    monkeypatch.setattr(Middle, "forward", lambda self, x: forward(self, x) * count())
    with pytest.raises(UnfaithfulTraceError, match=r"called twice with the same data .* gives another result"):
        pipe.step(X, target=Y)


def test_whoever_wants_may_train_the_layers_as_they_are(
    plan_for: Callable[..., Plan], sequence: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline_of(plan_for, sequence, compare_first_step=False)
    monkeypatch.setitem(OUTSIDE, "factor", 2.1)
    pipe.step(X, target=Y)
    assert not pipe.first_step


def test_nothing_else_changes(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    """Gradients, also those from before, statistics and random states are the same in every bit as without."""
    found = []
    for compares in (False, True):
        pipe = pipeline_of(plan_for, sequence, compare_first_step=compares)
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        for _ in range(2):
            loss = pipe.step(X, target=Y)
        gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        drawn = torch.tensor([torch.rand(1).item(), random.random(), np.random.random()])
        found.append([loss, *gradients, *pipe.state_dict().values(), drawn])
        assert pipe.first_step.startswith("as the model computes it" if compares else "")
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_raises_in_both_is_told_by_the_step(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    plan = plan_for(sequence, [1], batch_size=8, micro_batches=4)
    pipe = Pipeline(model_of(), plan, loss_fn=_raising)
    with pytest.raises(Exception, match=r"1F0: ZeroDivisionError"):
        pipe.step(X, target=Y)
    assert pipe.first_step.endswith("both raise ZeroDivisionError")


def test_after_a_step_that_failed_the_next_is_compared(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    """Whoever forgot the target once trained without a comparison."""
    pipe = pipeline_of(plan_for, sequence)
    with pytest.raises(ArgumentError, match="no target"):
        pipe.step(X)
    assert not pipe.first_step.startswith("as the model computes it")
    pipe.step(X, target=Y)
    assert pipe.first_step.startswith("as the model computes it")


def test_what_the_comparison_alone_raises_is_told_once(
    plan_for: Callable[..., Plan], sequence: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of its own was taken for one that the step would meet, and nobody heard of it."""

    def compare(trial: Trial) -> None:
        raise RuntimeError("of its own")

    monkeypatch.setattr(Trial, "compare", compare)
    pipe = pipeline_of(plan_for, sequence)
    with pytest.warns(UserWarning, match="both raise RuntimeError, which the step does not"):
        pipe.step(X, target=Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(X, target=Y)


def _raising(output: Tensor, target: Tensor) -> Tensor:
    raise ZeroDivisionError("loss")


def test_what_does_not_fit_is_not_compared(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    plan = plan_for(sequence, [1], batch_size=8, micro_batches=4)
    total = sum(stage.memory.total for stage in plan.stages)
    device = plan.stages[0].device.model_copy(update={"memory_bytes": total - 1})
    small = plan.stages[0].model_copy(update={"devices": (device,)})
    pipe = Pipeline(
        model_of(), plan.model_copy(update={"stages": (small, plan.stages[1])}), loss_fn=functional.mse_loss
    )
    pipe.step(X, target=Y)
    assert pipe.first_step.startswith("not compared with the model as it is: its stages need ")


def test_hooks_of_the_user_are_not_called_for_it(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    """An optimizer in a hook would take a step."""
    pipe = pipeline_of(plan_for, sequence)
    calls: list[int] = []
    next(iter(pipe.parameters())).register_post_accumulate_grad_hook(lambda _: calls.append(1))
    pipe.step(X, target=Y)
    assert pipe.first_step.endswith("its parameters have hooks")
    assert calls


def train(plan: Plan) -> str:
    pipe = Pipeline(model_of(), plan, loss_fn=functional.mse_loss)
    if pipe.rank == 0:
        pipe.step(X, target=Y)
    else:
        pipe.step()
    return pipe.first_step


def test_the_first_of_several_processes_compares(plan_for: Callable[..., Plan], sequence: LayerSequence) -> None:
    plan = plan_for(sequence, [1], batch_size=8, micro_batches=4)
    first, second = launch(train, plan)
    assert first.startswith("as the model computes it")
    assert second == ""


class Chaotic(nn.Module):
    """A last bit of its parameter becomes 1e-2 and more."""

    def __init__(self, move: float, rounds: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(3.9))
        self.move = move
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(x) + self.move
        for _ in range(self.rounds):
            x = self.rate * x * (1 - x)
        return x


@pytest.mark.parametrize(("move", "rounds", "alike"), [(1e-7, 24, True), (1e-2, 8, False), (1e-3, 1, False)])
def test_rounding_is_told_from_a_difference(move: float, rounds: int, *, alike: bool) -> None:
    """The same difference is rounding in one model and a defect in another: what a last bit changes decides."""
    model = Chaotic(0.0, rounds)
    sequence = replace(trace(Chaotic(move, rounds), X), parameters={"rate": model.rate})
    before = copy.deepcopy(model.state_dict())
    trial = Trial(model, [True], sequence, dict(zip(sequence.inputs, [X], strict=True)), Y, functional.mse_loss)
    if alike:
        assert trial.compare().relative > 1e-4
    else:
        with pytest.raises(UnfaithfulTraceError, match="differ from the model"):
            trial.compare()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Warming:
    """A loss whose weight grows from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(output, target) * min(1.0, self.calls / 100)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_that_counts_is_called_once_or_refused(plan_for: Callable[..., Plan], *, recompute: bool) -> None:
    """A recomputed last stage called it twice for each micro-batch, and the comparison three times more."""
    rows = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss_fn = Warming()
    plan = plan_for(trace(rows, X), [1], batch_size=8, micro_batches=4, recompute=recompute)
    pipe = Pipeline(rows, plan, loss_fn=loss_fn)
    if recompute:
        with pytest.raises(UnfaithfulTraceError, match=r"loss_fn changes 'calls' .* recomputed; count steps outside"):
            pipe.step(X, target=Y)
        return
    pipe.step(X, target=Y)
    assert loss_fn.calls == 4


class OwnRegion(nn.Module):
    """Computes in bfloat16 between two layers in float32, with the weights of one module more than once."""

    def __init__(self, middle: nn.Module, move: float = 0.0, cache: bool | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.middle = middle
        self.leave = nn.Linear(4, 4)
        self.move = move
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)[:, None].repeat(1, 6, 1)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cache):
            for _ in range(2):
                x = self.middle(x)
                x = torch.tanh(x[0] if isinstance(x, tuple) else x)
        return self.leave(x.float().mean(1) * (1 + self.move))


class Branches(nn.Module):
    """Reads what it is given three times, in a region of its own; only called as it is, as it looks at values."""

    def __init__(self, cache: bool | None = None) -> None:
        super().__init__()
        self.cache = cache
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cache):
            found = sum(part(x) for part in self.parts)
        return found.float() if bool(x.isfinite().all()) else x


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "gru": lambda: nn.GRU(4, 4, num_layers=2, batch_first=True),
    "rnn": lambda: nn.RNN(4, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
    "branches": Branches,
}


class Read(nn.Module):
    """Reads one value three times."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x) * self.parts[1](x) + self.parts[2](x)


MIDDLES["read"] = Read


@pytest.mark.parametrize(
    ("middle", "cache"),
    [
        *((middle, None) for middle in MIDDLES if middle != "lstm"),
        pytest.param("lstm", None, marks=needs_lstm_in_bfloat16),
        *(("read", True), ("gru", True), ("branches", True)),
    ],
)
def test_an_autocast_region_of_the_models_own_is_no_difference(
    plan_for: Callable[..., Plan], middle: str, *, cache: bool | None
) -> None:
    """Torch kept the casts of leaves in it, and added gradients up in bfloat16: 3e-3 to 8e-2 off, and by the cut.

    Where a region said so itself (`cache_enabled=True`), it went on to: what comes from another stage is a leaf.
    """
    torch.manual_seed(2)
    model = OwnRegion(Branches(cache) if middle == "branches" else MIDDLES[middle](), cache=cache)
    keep = ["middle"] if middle == "branches" else []
    sequence = trace(model, X[:2], keep_together=keep)
    found = []
    for cuts in ([], *([cut] for cut in range(1, len(sequence)))):
        plan = plan_for(sequence, cuts, batch_size=8, micro_batches=4)
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
        pipe.step(X, target=Y)
        assert pipe.first_step.startswith("as the model computes it; the largest difference is 0.0e+00")
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    for gradients in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0], strict=True))
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(("move", "alike"), [(1e-3, True), (5e-2, False), (1.0, False)])
def test_a_difference_is_noticed_around_an_autocast_region(move: float, *, alike: bool) -> None:
    """What a last bit of the region's precision changes may be rounding; several times as much is not."""
    torch.manual_seed(2)
    model = OwnRegion(nn.Linear(4, 4))
    parameters = dict(model.named_parameters())
    sequence = replace(trace(OwnRegion(nn.Linear(4, 4), move), X), parameters=parameters)
    modes = [True for _ in model.modules()]
    trial = Trial(model, modes, sequence, dict(zip(sequence.inputs, [X], strict=True)), Y, functional.mse_loss)
    if alike:
        assert trial.compare().relative > 1e-4
    else:
        with pytest.raises(UnfaithfulTraceError, match="differ from the model"):
            trial.compare()


def test_a_model_in_evaluation_mode_is_told_to_be_put_in_training_mode(plan_for: Callable[..., Plan]) -> None:
    """As `from_pretrained` leaves it: it was called unfaithful, with advice that did not help."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    x, target = torch.randn(8, 4), torch.randn(8, 2)
    plan = plan_for(trace(model, x), batch_size=8, micro_batches=2)
    for compares in (True, False):
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, compare_first_step=compares)
        with pytest.raises(ArgumentError, match=r"the model is in evaluation mode, .*; call model\.train\(\) before"):
            pipe.step(x, target=target)
        assert pipe.predict(x).shape == (8, 2)
    model.train()
    model[2].eval()
    Pipeline(model, plan_for(trace(model, x), batch_size=8, micro_batches=2), loss_fn=functional.mse_loss).step(
        x, target=target
    )
