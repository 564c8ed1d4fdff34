"""Models that read and write the `.data` of tensors: what they do comes into the graph, or they are called as they are.

Export keeps what it held while the model was traced; the survey of libraries met codebooks that are written so
(vector-quantize-pytorch) and weights that are moved to where they are (pytorch-metric-learning).
"""

import re

import pytest
import torch
from torch import Tensor, nn

from profiler import LayerSequence, NotTraceableError, trace
from profiler.observe.source_place import explanation, place_of
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.library_parts import MINI_BATCH
from tests.coverage.model_list import Case
from tests.coverage.survey_models import mean_square

X = torch.linspace(-1, 1, MINI_BATCH * 4).reshape(MINI_BATCH, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(4))


class Reading(Base):
    """A penalty on weights that are to follow the others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.mean.data) + self.last.weight.data @ self.first.bias


class Averaging(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mean.data.lerp_(y.detach().mean(0), 0.1)
        return self.last(torch.tanh(y) - self.mean)


class InARegion(Base):
    """Its region without gradient writes a buffer, through `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.averaging = Held()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.averaging(torch.tanh(self.first(x))))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.data.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Moving(Base):
    """Moves its weight to where it is already."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.to(x.dtype)
        return self.last(torch.tanh(self.first(x)))


class Replacing(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.tanh()
        return self.last(self.first(x))


class Comparing(Base):
    """Tensors of different shapes are not equal, whatever they hold (gpytorch's kernels ask that)."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * (1 if self.mean.sum() > 0 else 2)
        return self.last(y if torch.equal(self.first.weight, self.mean) else torch.tanh(y))


def traced(model: nn.Module) -> tuple[LayerSequence, Case]:
    of = Case(model, X, mean_square, torch.zeros(MINI_BATCH))
    return trace(model, X), of


@pytest.mark.parametrize("kind", [Reading, Averaging, InARegion, Moving, Comparing])
def test_it_trains_as_the_model_does(kind: type[Base]) -> None:
    sequence, of = traced(kind())
    found, expected = run(sequence, of), eager(sequence, of)
    assert difference(found, expected) <= 1e-6
    assert not sequence.sample.called_as_is


@pytest.mark.parametrize(("kind", "name"), [(Averaging, "mean"), (InARegion, "averaging.mean")])
def test_the_buffer_that_it_writes_is_what_the_layer_returns(kind: type[Base], name: str) -> None:
    """In a region it was the model's own that was written, unnoticed, in every call of the layer."""
    model = kind()
    sequence, of = traced(model)
    found = run(sequence, of).buffers
    assert model.get_buffer(name).tolist() == [1.0] * 4
    model(X)
    assert torch.equal(found[name], model.get_buffer(name))


def test_what_export_tells_at_its_end_is_told_of_the_module_that_it_names() -> None:
    """It was told of the model, so that no module could be called as it is."""
    problem = RuntimeError(
        "We found a fake tensor in the exported program constant's list. For the potential source, you can refer to "
        "following model attribute: averaging.lifted_tensor_0. Please file an issue on github. "
    )
    model = InARegion()
    place = place_of(model, problem)
    assert place.modules == ("averaging",)
    text = explanation(model, problem, place)
    assert re.search(r"in module 'averaging', .*test_plain_data.py:\d+ .*keep_together=\['averaging'\]", text)


def test_other_memory_in_a_parameter_is_refused_where_it_is_put() -> None:
    with pytest.raises(NotTraceableError, match=r'test_plain_data.py:\d+ "self.first.weight.data = .*before planning'):
        trace(Replacing(), X)
