"""`Pipeline.predict`: the model's own output for the whole batch, whatever the cuts, sizes, replicas and processes."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from executor import Pipeline, launch
from planner import ArgumentError, ExecutionError, Plan, PlanError
from profiler import trace
from tests.coverage.model_list import transformers

pytestmark = pytest.mark.usefixtures("traced_once")

X = torch.linspace(-1, 1, 10 * 12).reshape(10, 3, 4)  # with M = 4: micro-batches of 3, 3, 2, 2
Y = torch.arange(10) % 5


class Normalized(nn.Module):
    """Batch normalization and dropout between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv1d(8, 8, 1)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(-1))


class Everything(nn.Module):
    """Returns what layers of all stages compute, and a parameter, an input, constants and a second batch order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = torch.tanh(self.first(x))
        late = torch.tanh(self.second(self.dropout(early)))
        logits = self.last(late) * self.scale
        return {
            "logits": (logits.sum(1), [late.transpose(0, 1), early]),
            "scale": self.scale,
            "bias": self.last.bias,
            "input": x,
            "mask": x > 0,
            "constants": (None, 3, "text"),
        }


class OtherInEvaluation(nn.Module):
    """Stochastic depth, and in evaluation fewer operations with a constant of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            if self.training:
                kept = torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.8)) / torch.tensor(0.8)
                x = x + torch.tanh(branch(x)) * kept
            else:
                x = x + torch.tanh(branch(x)) * torch.tensor(0.9)
        return self.norm(x) if self.training else self.norm(x) * 2


class WithLoss(nn.Module):
    """Takes labels and returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(x.flatten(1))))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def trained(model: nn.Module) -> nn.Module:
    """Batch normalization has other running statistics than at first, and than a batch has."""
    torch.manual_seed(1)
    for buffer in model.buffers():
        buffer.copy_(buffer + torch.rand(buffer.shape) if buffer.is_floating_point() else buffer)
    return model


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return trained(kind())


def plain(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*args, **kwargs)


def assert_close(found: Any, expected: Any) -> None:
    """The same structure, whatever the classes in it, and leaves that are equal but for rounding."""
    ours, tree = pytree.tree_flatten(found)
    theirs, expected_tree = pytree.tree_flatten(expected)
    assert tree == expected_tree
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor):
            assert not one.requires_grad
            torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-6)
        else:
            assert one == other


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every bit."""
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("kind", [Normalized, Everything, OtherInEvaluation])
def test_the_models_own_output_for_every_cut_and_size(kind: type[nn.Module], plan_for: Callable[..., Plan]) -> None:
    """No loss_fn, no target; a smaller last batch and a batch of one, which is a micro-batch alone."""
    model = made(kind)
    sequence = trace(model, X)
    whole: dict[int, Any] = {}
    for cuts in ([], [2], [1, len(sequence) - 1]):
        pipe = Pipeline(model, plan_for(sequence, cuts, batch_size=10, micro_batches=4))
        for samples in (10, 7, 3, 1):
            found = pipe.predict(X[:samples])
            assert_close(found, plain(model, X[:samples]))
            assert_same(found, whole.setdefault(samples, found))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_batch_dimensions(plan_for: Callable[..., Plan]) -> None:
    """Sequence first, as recurrent networks take and return it, with a square batch: sizes alone would not tell."""
    model = made(Recurrent)
    x = torch.randn(5, 5, 6)
    sequence = trace(model, x, batch_dims={0: 1})
    pipe = Pipeline(model, plan_for(sequence, batch_size=5, micro_batches=2))
    assert_close(pipe.predict(x), plain(model, x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])


def twice(plan: Plan) -> tuple[int, list[Any]]:
    pipe = Pipeline(made(OtherInEvaluation), plan)
    return pipe.rank, [pipe.predict(x) for x in (X, X[:1].flip(2), X[:3], X)]


def test_the_process_of_the_last_stage_gets_it(plan_for: Callable[..., Plan]) -> None:
    """Bit for bit that of one process; what it got stays as it is in later calls."""
    sequence = trace(made(OtherInEvaluation), X)
    _, whole = twice(plan_for(sequence, batch_size=10, micro_batches=4))
    plan = plan_for(sequence, [2, 4], batch_size=10, micro_batches=4, ranks=[0, 1, 0])
    for rank, found in launch(twice, plan):
        if rank == 0:
            assert_same(found, whole)
        else:
            assert found == [None] * 4


def replicated(plan: Plan) -> list[Any]:
    pipe = Pipeline(made(Everything), plan)
    return [pipe.predict(X[:samples]) for samples in (10, 7, 2)]


def test_each_replica_has_its_part_of_the_batch(plan_for: Callable[..., Plan]) -> None:
    model = made(Everything)
    sequence = trace(model, X)
    plan = plan_for(sequence, [3], batch_size=10, micro_batches=2, replicas=2)
    for whole, samples in zip(replicated(plan), (10, 7, 2), strict=True):
        assert_close(whole, plain(model, X[:samples]))
    parts = launch(replicated, plan)
    assert parts[0] == parts[2] == [None] * 3
    for replica in (0, 1):
        for found, samples in zip(parts[1 + 2 * replica], (10, 7, 2), strict=True):
            assert_close(found, plain(model, X[:samples].tensor_split(2)[replica]))


def test_a_loss_inside_is_the_mean_over_samples(plan_for: Callable[..., Plan]) -> None:
    model = made(WithLoss)
    sequence = trace(model, {"x": X, "labels": Y})
    for replicas in (1, 2):
        plan = plan_for(sequence, [1], batch_size=10, micro_batches=4 // replicas, replicas=replicas)
        pipe = Pipeline(model, plan)
        for samples in (10, 7):
            batch = {"x": X[:samples], "labels": Y[:samples]}
            found = pipe.predict(**batch)
            assert_close(found, plain(model, **batch))
            assert found["loss"].item() == pytest.approx(pipe.evaluate(**batch).item(), rel=1e-7)


def bert() -> nn.Module:
    torch.manual_seed(0)
    package = transformers()
    config = package.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
    )
    return package.BertForSequenceClassification(config)


IDS = torch.arange(10 * 6).reshape(10, 6) % 40


def test_a_model_of_transformers_returns_its_own_class(plan_for: Callable[..., Plan]) -> None:
    """The second batch is smaller, and its sequences are shorter than planned."""
    model = bert()
    sequence = trace(model, {"input_ids": IDS, "labels": Y, "output_hidden_states": True})
    plan = plan_for(sequence, [len(sequence) // 2], batch_size=10, micro_batches=3)
    pipe = Pipeline(model, plan)
    for ids in (IDS, IDS[:5, :4]):
        batch = {"input_ids": ids, "labels": Y[: len(ids)], "output_hidden_states": True}
        output, expected = pipe.predict(**batch), plain(model, **batch)
        assert type(output) is type(expected)
        assert_close(output, expected)
        assert_close(output.logits, expected.logits)
        assert len(output.hidden_states) == 2


def test_frozen_models_predict_and_training_goes_on_as_if_nothing_was(plan_for: Callable[..., Plan]) -> None:
    frozen = made(Normalized).requires_grad_(False)
    pipe = Pipeline(frozen, plan_for(trace(frozen, X), [2], batch_size=10, micro_batches=4))
    assert_close(pipe.predict(X), plain(frozen, X))
    states = []
    for predicts in (False, True):
        model = made(Normalized)
        plan = plan_for(trace(model, X), [2], batch_size=10, micro_batches=4, recompute=True)
        pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy, check_finite=True)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            if predicts:
                assert pipe.predict(X * torch.inf).isnan().any()  # there is no loss to be finite
            pipe.step(X, target=Y)
            optimizer.step()
        states.append([value.clone() for value in pipe.state_dict().values()])
    assert_same(*states)


class Returns(nn.Module):
    """Returns what `of` makes of inputs and hidden values."""

    def __init__(self, of: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.last = nn.Linear(6, 6)
        self.of = of

    def forward(self, x: Tensor) -> Any:
        return self.of(x, self.last(torch.tanh(self.linear(x))))


UNJOINABLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "samples beside samples": (lambda x, y: (y, y.sum(1) @ y.sum(1).T), r"output 1 .*has shape \[n, n\] for a micro-b"),
    "several rows a sample": (lambda x, y: y.flatten(0, 1), r"output 0 of the model has shape \[3\*n, 6\] for a micro"),
    "the batch size": (lambda x, y: {"a": y, "b": x.shape[0]}, r"output 1 of the model is a number for a micro-batch"),
}


@pytest.mark.parametrize("name", UNJOINABLE)
def test_what_cannot_be_joined_is_refused_before_anything_runs(name: str, plan_for: Callable[..., Plan]) -> None:
    of, message = UNJOINABLE[name]
    model = Returns(of)
    pipe = Pipeline(model, plan_for(trace(model, X), [1], batch_size=10, micro_batches=4))
    with pytest.raises(ArgumentError, match=message):
        pipe.predict(X)
    assert_close(pipe.predict(X[:1]), plain(model, X[:1]))  # one micro-batch


def test_static_shapes_do_not_say_which_dimension_is_the_batch(plan_for: Callable[..., Plan]) -> None:
    model = Returns(lambda x, y: y.reshape(int(x.shape[0]) if x.shape[0] > 3 else 1, -1))
    sequence = trace(model, X[:4])
    assert sequence.sample.front_end == "static export"
    pipe = Pipeline(model, plan_for(sequence, [1], batch_size=8, micro_batches=2))
    with pytest.raises(ArgumentError, match=r"shape \[4, 18\], and which .* static shapes; pass 4 samples at a time"):
        pipe.predict(X[:8])
    assert_close(pipe.predict(X[:4]), plain(model, X[:4]))


def outcome(plan: Plan, model: nn.Module, call: str, args: Sequence[Tensor]) -> tuple[str, str]:
    pipe = Pipeline(model, plan, loss_fn=lambda output, _: output.mean())
    try:
        getattr(pipe, call)(*args)
    except PlanError as problem:
        return type(problem).__name__, str(problem)
    raise AssertionError("it should have failed")


def test_a_value_of_the_batch_as_a_whole_is_one_error_on_all_ranks(plan_for: Callable[..., Plan]) -> None:
    model = Returns(lambda x, y: y.mean(0))
    plan = plan_for(trace(model, X), [1], batch_size=10, micro_batches=4)
    text = (
        "rank 1 of 2 failed: output 0 of the model has shape [3, 6], and differs between micro-batches 0 and 1, so the "
        "batch has no one value of it; let the model return it for each sample, or not at all"
    )
    assert launch(outcome, plan, (model, "predict", [X])) == [("ArgumentError", text)] * 2


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.table = nn.Embedding(8, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) + self.table(ids)


GOOD = torch.zeros(10, 3, dtype=torch.int64)
WRONG: dict[str, list[Tensor]] = {
    "in the last stage": [X, torch.where(torch.arange(10)[:, None] == 7, 99, GOOD)],
    "shape": [X[:, :, :2], GOOD],
    "dtype": [X.double(), GOOD],
    "sizes": [X[:9], GOOD],
    "too few": [X],
    "none": [X[:0], GOOD[:0]],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_evaluate(wrong: str, plan_for: Callable[..., Plan]) -> None:
    sequence = trace(Table(), (X, GOOD))
    cut = next(layer.index for layer in sequence.layers if "table.weight" in layer.parameters)
    plan = plan_for(sequence, [cut], batch_size=10, micro_batches=4)
    evaluated, predicted = (outcome(plan, Table(), call, WRONG[wrong]) for call in ("evaluate", "predict"))
    assert predicted == evaluated
    if wrong == "in the last stage":
        error, text = predicted
        assert error == ExecutionError.__name__
        assert text.startswith("step 0, stage 1, micro-batch 2, action 1F2: IndexError")


def mixed(plan: Plan) -> tuple[str, str]:
    pipe = Pipeline(made(Normalized), plan, loss_fn=functional.cross_entropy)
    try:
        pipe.predict(X) if pipe.rank else pipe.evaluate(X, target=Y)
    except PlanError as problem:
        return type(problem).__name__, str(problem)
    raise AssertionError("the ranks make different calls")


def test_all_ranks_must_predict(plan_for: Callable[..., Plan]) -> None:
    first, second = launch(mixed, plan_for(trace(made(Normalized), X), [2], batch_size=10, micro_batches=4))
    assert first == second
    assert first[0] == ArgumentError.__name__
    assert first[1].startswith("the ranks differ in the call: rank 0 has evaluate, rank 1 has predict")
