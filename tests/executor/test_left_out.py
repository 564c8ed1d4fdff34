"""What a model returns and no layer can: it is left out, and whoever reads it is told so."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import Plan
from profiler import ArgumentError, LayerSequence, NotTraceableError, trace
from profiler.tracing.left_out import LeftOut

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


class Cache:
    """Of keys, as transformers return one unless they are told not to; pytree does not know it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(nn.Module):
    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.alone = alone

    def forward(self, x: Tensor) -> Any:
        cache = Cache()
        x = self.first(x).tanh()
        cache.keys.append(x)
        return cache if self.alone else {"cache": cache, "logits": self.last(x + cache.keys[0]), "mode": "lm"}


def loss_fn(output: dict[str, Any], target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"], target)


@pytest.fixture(scope="module")
def sequence() -> LayerSequence:
    torch.manual_seed(0)
    return trace(Caching(), X)


KIND = f"{Cache.__module__}.Cache"


def test_it_trains_as_the_model_and_predicts_the_rest(sequence: LayerSequence, plan_for: Callable[..., Plan]) -> None:
    """It was refused: every causal language model of transformers with its configuration as it comes."""
    torch.manual_seed(0)
    plain = Caching()
    loss = loss_fn(plain(X), Y)
    loss.backward()
    gradients = []
    for cuts in ([], [1, 2]):
        torch.manual_seed(0)
        model = Caching()
        pipe = Pipeline(model, plan_for(sequence, cuts, batch_size=8, micro_batches=2), loss_fn=loss_fn)
        assert pipe.step(X, target=Y).item() == pytest.approx(loss.item(), rel=1e-6)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        for micro_batches in (X, X[:1]):
            output = pipe.predict(micro_batches)
            assert list(output) == ["cache", "logits", "mode"]
            assert output["cache"] == LeftOut(KIND)
            assert output["mode"] == "lm"
            torch.testing.assert_close(output["logits"], model(micro_batches)["logits"])
    for name, parameter in plain.named_parameters():
        first, second = gradients[0][name], gradients[1][name]
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
        torch.testing.assert_close(first, parameter.grad)


def test_a_loss_that_reads_it_is_told(sequence: LayerSequence, plan_for: Callable[..., Plan]) -> None:
    def reading(output: dict[str, Any], target: Tensor) -> Tensor:
        return output["cache"].keys[0].sum() + target.sum()

    pipe = Pipeline(Caching(), plan_for(sequence, [1], batch_size=8, micro_batches=2), loss_fn=reading)
    with pytest.raises(Exception, match=r"this part of the model's output is a .*Cache, which layers cannot return"):
        pipe.step(X, target=Y)


def test_a_model_that_returns_nothing_else_is_refused() -> None:
    with pytest.raises(NotTraceableError, match=r"it returns a .*Cache, and layers return tensors in tuples"):
        trace(Caching(alone=True), X)


def test_the_model_keeps_its_forward_pass() -> None:
    """Also one of its own, and after an error."""
    for model in (Caching(), Caching(alone=True)):
        own = model.forward
        for forward in (None, own):
            if forward is not None:
                model.__dict__["forward"] = forward
            before = dict(model.__dict__)
            try:
                trace(model, X)
            except NotTraceableError:
                assert model.alone
            assert model.__dict__ == before


def test_it_can_be_handed_on_and_not_read() -> None:
    stands = LeftOut("a.Cache")
    assert repr(stands) == "<left out: a.Cache>"
    assert pickle.loads(pickle.dumps(stands)) == copy.deepcopy(stands) == stands != LeftOut("b.Cache")
    assert len({stands, LeftOut("a.Cache")}) == 1
    reads: list[Callable[[], Any]] = [
        lambda: stands.keys,
        lambda: stands[0],
        lambda: list(stands),
    ]
    for read in reads:
        with pytest.raises(ArgumentError, match=r"is a a\.Cache, which layers cannot return"):
            read()


def test_it_is_told_of_the_layers(sequence: LayerSequence) -> None:
    assert f"left out of its output: {KIND}" in repr(sequence)
