"""Calls that lack arguments: predictions need no labels, and whatever else is missing is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import ArgumentError, NotTraceableError, Plan, PlanError, automatic, autoplan
from profiler import trace

X, Y = torch.linspace(-1, 1, 8 * 6).reshape(8, 6), torch.arange(8) % 5


class Labelled(nn.Module):
    """Computes its loss where it is given labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.dropout, self.head = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.body(x))))
        if mask is not None:
            logits = logits * mask
        return {"logits": logits} | ({} if labels is None else {"loss": functional.cross_entropy(logits, labels)})


class Demanding(Labelled):
    """Cannot do without."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x, labels=labels)


def expected(x: Tensor) -> Tensor:
    with torch.no_grad():
        return Labelled().eval()(x)["logits"]


def by_keyword(plan_for: Callable[..., Plan], model: nn.Module, *, stages: int = 2) -> Plan:
    sequence = trace(model, {"x": X, "labels": Y})
    return plan_for(sequence, [2] if stages > 1 else [], batch_size=8, micro_batches=4)


def test_predictions_need_no_labels(plan_for: Callable[..., Plan]) -> None:
    """By keyword and by position, also for a batch of another size; training goes on as before."""
    pipe = Pipeline(Labelled(), by_keyword(plan_for, Labelled()))
    before = pipe.step(x=X, labels=Y)
    for samples in (8, 3):
        torch.testing.assert_close(pipe.predict(x=X[:samples])["logits"], expected(X[:samples]))
    assert {"logits", "loss"} == set(pipe.predict(x=X, labels=Y))
    assert pipe.step(x=X, labels=Y) != before  # another step has other dropout
    sequence = trace(Labelled(), (X, torch.ones(8, 1), Y))
    pipe = Pipeline(Labelled(), plan_for(sequence, [2], batch_size=8, micro_batches=4))
    for given in ((X,), (X, torch.ones(8, 1))):
        torch.testing.assert_close(pipe.predict(*given)["logits"], expected(X))


def predicted(plan: Plan) -> list[Any]:
    """Once with rank 0's data and once with everyone's would be two ways of `predict`; these are rank 0's."""
    pipe = Pipeline(Labelled(), plan)
    loss = pipe.step(x=X, labels=Y, accumulate=2)
    found = pipe.predict(**({"x": X} if pipe.rank == 0 else {}))
    return [loss.item(), None if found is None else found["logits"]]


def test_processes_that_bring_no_data_need_no_labels(plan_for: Callable[..., Plan]) -> None:
    plan = by_keyword(plan_for, Labelled())
    (first, nothing), (second, logits) = launch(predicted, plan)
    assert first == second
    assert nothing is None
    torch.testing.assert_close(logits, expected(X))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"x": X}, "the argument 'labels' is missing; the model was traced with labels, x: pass all of them"),
        ((), {"x": X, "labels": Y, "more": Y}, "the argument 'more' is not one that the model was traced with"),
        ((X, Y), {}, r"traced with arguments by keyword \(labels, x\)"),
        ((), {"x": X.double(), "labels": Y}, "argument 'x' has dtype torch.float64"),
        ((), {"x": (X, X), "labels": Y}, "argument 'x' holds a tuple of 2; the model was traced with a tensor"),
    ],
)
def test_what_is_missing_is_named(
    plan_for: Callable[..., Plan], args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    """Before, the message held torch's description of the whole tree."""
    pipe = Pipeline(Labelled(), by_keyword(plan_for, Labelled()))
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(ArgumentError, match=message):
            call(*args, **kwargs)


def test_by_position_the_number_is_named(plan_for: Callable[..., Plan]) -> None:
    sequence = trace(Labelled(), (X, torch.ones(8, 1), Y))
    pipe = Pipeline(Labelled(), plan_for(sequence, batch_size=8, micro_batches=4))
    with pytest.raises(ArgumentError, match="1 argument is given, and the model was traced with 3: argument 1 is m"):
        pipe.step(X)
    with pytest.raises(ArgumentError, match="traced with arguments by position; pass them so"):
        pipe.step(x=X)


class Tuned(nn.Module):
    """Takes numbers, some inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor, alpha: float, more: dict[str, Any]) -> Tensor:
        return self.last(x * alpha + more["shift"][0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": 0.7}, "argument 'alpha' is 0.7; the model was traced with 0.5, and a plan is for this value"),
        ({"more": {"shift": (0.2, 1)}}, r"argument 'more'\['shift'\]\[0\] is 0.2; the model was traced with 0.1"),
        ({"more": {"shift": [0.1, 1]}}, r"argument 'more'\['shift'\] holds a list of 2; .* with a tuple of 2"),
        ({"alpha": X}, r"argument 'alpha' is a tensor of shape \[8, 6\]; the model was traced with 0.5"),
    ],
)
def test_what_differs_is_named_with_its_place(
    plan_for: Callable[..., Plan], changed: dict[str, Any], message: str
) -> None:
    """It was argument 0, or a dict of 'shift' and not a dict of 'shift'."""
    sample: dict[str, Any] = {"x": X, "alpha": 0.5, "more": {"shift": (0.1, 1)}}
    pipe = Pipeline(Tuned(), plan_for(trace(Tuned(), sample), [], batch_size=8, micro_batches=4), loss_fn=mean_square)
    pipe.step(**sample, target=Y)
    with pytest.raises(ArgumentError, match=message):
        pipe.step(**{**sample, **changed}, target=Y)


def mean_square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def test_a_model_that_cannot_do_without_says_so(plan_for: Callable[..., Plan]) -> None:
    pipe = Pipeline(Demanding(), by_keyword(plan_for, Demanding()))
    with pytest.raises(PlanError, match="labels"):
        pipe.predict(x=X)


def test_a_forgotten_target_is_named(plan_for: Callable[..., Plan]) -> None:
    """The first cause that was told was that 'NoneType' object has no attribute 'flatten'."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.flatten())

    pipe = Pipeline(model, plan_for(trace(model, X), [2], batch_size=8, micro_batches=4), loss_fn=loss_fn)
    with pytest.raises(PlanError, match=r"no target was given: pass target="):
        pipe.step(X)
    with pytest.raises(ArgumentError, match=r"'targets' is given by keyword and 1 argument by position; .* as target="):
        pipe.step(X, targets=Y)
    with pytest.raises(ArgumentError, match="traced with float32: convert it, or plan with a sample of this dtype"):
        pipe.step(X.double(), target=Y)
    assert pipe.step(X, target=Y) > 0


def test_a_plan_of_a_model_that_is_called_otherwise_is_told(plan_for: Callable[..., Plan]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    plan = plan_for(trace(model, X), [2], batch_size=8, micro_batches=4)
    assert Pipeline(model, plan).plan == plan
    with pytest.raises(NotTraceableError, match=r"may be of another model, then plan again for this .*: cannot trace"):
        Pipeline(nn.Linear(3, 3), plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_fn": functional.cross_entropy, "target": Y[:5]}, "the target holds 5 samples, the sample 8; give"),
        ({"loss_fn": functional.cross_entropy}, "loss_fn without target"),
        ({"target": Y}, "target without loss_fn"),
        (
            {"target": Y, "los_fn": functional.cross_entropy},
            "takes no argument 'los_fn'; did you mean loss_fn",
        ),
    ],
)
def test_what_does_not_belong_together_is_noticed_before_the_model_is_traced(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of fewer samples made a plan, whose first step was refused; that one was missing, the trace hid."""
    monkeypatch.setattr(automatic, "trace", None)
    with pytest.raises(ArgumentError, match=message):
        autoplan(nn.Linear(6, 5), X, 1, progress=False, **given)


def test_a_model_that_no_step_could_be_called_with_is_noticed_before_it_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`autoplan plan` made a plan, and `autoplan run` refused the model."""
    monkeypatch.setattr(automatic, "trace", None)
    sample = {"source": X, "target": X}
    with pytest.raises(ArgumentError, match=r"an argument 'target' by keyword, .* by position"):
        autoplan(nn.Linear(6, 5), sample, 1, loss_fn=functional.cross_entropy, target=Y, progress=False)
