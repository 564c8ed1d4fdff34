"""Parameters and buffers that a model reads from somewhere else than the module that has them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from profiler import NotTraceableError, trace
from tests.coverage.fidelity import eager_difference, run, same_bits, some_cuts
from tests.coverage.model_list import Case
from tests.executor.conftest import _plan as plan_by_hand

X, TARGET = torch.linspace(-1, 1, 32).reshape(8, 4), torch.tensor([0, 1, 2, 3] * 2)


class Helper:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Holding(nn.Module):
    """Two weights and a scale, which `read` gets from where it likes."""

    def __init__(self, read: Callable[["Holding", Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.held: dict[str, Any] = {"weight": self.weight, "list": [self.other], "scale": self.scale}
        self.helper = Helper(self.other)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.first(x)).tanh() @ self.other


def from_a_dict(model: Holding, x: Tensor) -> Tensor:
    """As the cells of `ncps` do."""
    return x @ model.held["weight"]


def from_a_list(model: Holding, x: Tensor) -> Tensor:
    return x @ model.held["list"][0] + x @ model.weight


def from_a_helper(model: Holding, x: Tensor) -> Tensor:
    return model.helper(x)


def a_buffer(model: Holding, x: Tensor) -> Tensor:
    return x @ model.weight * model.held["scale"]


def in_a_region(model: Holding, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x @ model.held["weight"]
    return x @ model.weight + y


class Recurrent(nn.Module):
    """Its first state is made where its input is."""

    def __init__(self, network: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.network, self.last = network(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.network(x[None])[0][0])
        return y


KINDS = [from_a_dict, from_a_list, from_a_helper, a_buffer, in_a_region]


@pytest.mark.parametrize("read", KINDS, ids=lambda read: read.__name__)
def test_they_are_the_models_own(read: Callable[[Holding, Tensor], Tensor]) -> None:
    """They were constants of the graph, which no optimizer moved; the first step's comparison alone said so."""
    torch.manual_seed(0)
    model = Holding(read)
    sequence = trace(model, X)
    case = Case(model, X, functional.cross_entropy, TARGET)
    assert eager_difference(sequence, case, 0) <= 1e-6
    whole = run(sequence, case)
    assert all(same_bits(run(sequence, case, cuts), whole) for cuts in some_cuts(sequence))
    assert not [name for layer in sequence.layers for name in layer.buffers if name != "scale"]
    with torch.device("meta"):
        on_meta = trace(Holding(read), X.to("meta"))
    assert on_meta.fingerprint == sequence.fingerprint


class Sparse(nn.Module):
    """Like Whisper, which keeps the heads that it aligns by in a sparse buffer."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)
        self.held = {"weight": self.second.weight}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = torch.sparse.mm(self.heads, x.T).T if self.used else x
        return x @ self.held["weight"]


@pytest.mark.parametrize("used", [False, True])
def test_sparse_buffers(used: bool) -> None:
    """One that no graph reads ended the trace with a NotImplementedError; one that is read may be refused by name."""
    model = Sparse(used)
    try:
        sequence = trace(model, X)
    except NotTraceableError as problem:
        assert used
        assert "heads" in str(problem) or "test_held_elsewhere.py" in str(problem)
        return
    case = Case(model, X, functional.cross_entropy, TARGET)
    assert eager_difference(sequence, case, 0) <= 1e-6
    plan = plan_by_hand(sequence, (1,), batch_size=8, micro_batches=2)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    pipe.step(X, target=TARGET)
    assert model.second.weight.grad is not None


class Making(nn.Module):
    """It makes a tensor where its input is, in a region of the forward pass or not."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.region():
            made = torch.ones(x.shape[0], 4, device=x.device) * 2
        y: Tensor = self.last(x + made)
        return y


REGIONS: list[Callable[[], Any]] = [
    nullcontext,
    torch.no_grad,
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    torch.enable_grad,
]


@pytest.mark.parametrize("build", [*(partial(Making, region) for region in REGIONS), partial(Recurrent, nn.GRU)])
def test_a_plan_belongs_to_a_model_on_any_device(build: Callable[[], nn.Module]) -> None:
    """What made a tensor named its device, so that a plan of a model on the meta device was no plan of the real one."""
    with torch.device("meta"):
        on_meta = trace(build(), X.to("meta"))
    assert on_meta.fingerprint == trace(build(), X).fingerprint
