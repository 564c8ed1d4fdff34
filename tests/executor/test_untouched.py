"""A model is left as it was by `trace`, `autoplan` and `Pipeline`: every attribute, identity, hook, mode and bit."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from executor import Pipeline
from planner import NotTraceableError, Plan, autoplan
from profiler import trace
from profiler.errors import UserFunctionError
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.model_list import BATCH_SIZE, BY_NAME, Case
from tests.snapshot import differences, snapshot

CLOSE = 1e-5


class Shared(nn.Module):
    """A module under two names, a weight under three, and a question about the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.also = self.emb
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.also(ids)
        if x.shape[0] != 1:
            x = x.contiguous()
        return self.head(torch.tanh(self.middle(x)))


IDS, NEXT = torch.arange(8) % 16, (torch.arange(8) + 1) % 16


@pytest.mark.usefixtures("nothing_beside")
def test_a_module_under_two_names_stays_one(plan_for: Callable[..., Plan]) -> None:
    """The question about the batch made us call the model on stand-ins, which torch puts back by name.

    It took the stand-in of the second name for the original of the first, left a fake tensor in the user's embedding,
    and the step ended with a bare AssertionError.
    """
    torch.manual_seed(0)
    model = Shared()
    plain = copy.deepcopy(model)
    before = snapshot(model)
    quick: dict[str, Any] = {"time_budget_s": 0, "progress": False, "cache": False}
    autoplan(model, IDS, 2, loss_fn=functional.cross_entropy, target=NEXT, **quick)
    assert differences(before, snapshot(model)) == []
    sequence = trace(model, IDS)
    plan = plan_for(sequence, [len(sequence) // 2], batch_size=8, micro_batches=2)
    pipe = Pipeline(model, plan, loss_fn=functional.cross_entropy)
    assert differences(before, snapshot(model)) == []
    pipe.step(IDS, target=NEXT)
    functional.cross_entropy(plain(IDS), NEXT).backward()
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, msg=name)


class Recurrent(nn.Module):
    """Its LSTM holds each weight twice, by name and in a list that is to hold the same objects."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.1)
        self.head = nn.Linear(6, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids).unsqueeze(0))[0]).squeeze(0)


def test_a_recurrent_model_is_left_as_it_was(plan_for: Callable[..., Plan]) -> None:
    model = Recurrent()
    before = snapshot(model)
    sequence = trace(model, IDS)
    assert differences(before, snapshot(model)) == []
    plan = plan_for(sequence, [len(sequence) // 2], batch_size=8, micro_batches=2)
    Pipeline(model, plan, loss_fn=functional.cross_entropy)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("name", ["resnet", "GPT with tied weights", "branch on a shape"])
def test_models_of_the_list_are_left_as_they_were(name: str, plan_for: Callable[..., Plan]) -> None:
    """By `Pipeline`; by `trace` all of them in tests/coverage, and all by `Pipeline` in tests/benchmarks."""
    case = BY_NAME[name].build(dropout=0.1)
    before = snapshot(case.model)
    sequence = trace(case.model, case.sample)
    assert differences(before, snapshot(case.model)) == []
    plan = plan_for(sequence, [len(sequence) // 2], batch_size=BATCH_SIZE, micro_batches=2)
    Pipeline(case.model, plan, loss_fn=case.loss_fn)
    assert differences(before, snapshot(case.model)) == []


def test_a_model_on_the_meta_device_stays_there(plan_for: Callable[..., Plan]) -> None:
    with torch.device("meta"):
        model = Shared()
    before = snapshot(model)
    sequence = trace(model, IDS)
    Pipeline(model, plan_for(sequence, [1], batch_size=8, micro_batches=2), loss_fn=functional.cross_entropy)
    assert differences(before, snapshot(model)) == []


class Keeps(Shared):
    """Keeps what it computes with, in every way that there is, and asks for what ends the trace."""

    scale: Tensor

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end
        self.kept: dict[str, Any] = {"steps": [0]}
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        self.cache = x
        self.kept["x"] = x
        self.kept["steps"][0] = x
        self.scale = self.scale * 2
        self.middle.eval()
        self.emb.weight.requires_grad_(False)
        self.extra = nn.Linear(8, 8)
        self.register_forward_hook(lambda *_: None)
        del self.also
        random.random()
        torch.rand(8, generator=self.generator)
        self.end(x)
        return self.head(x)


def interrupted(_: Tensor) -> None:
    raise KeyboardInterrupt


def failing(_: Tensor) -> None:
    raise ValueError("no words")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda x: bool(x.sum() > 0), NotTraceableError),
        (failing, UserFunctionError),
        (interrupted, KeyboardInterrupt),
        (lambda _: None, NotTraceableError),  # of the changed attributes
    ],
)
def test_a_trace_that_ends_early_leaves_nothing_behind(
    end: Callable[[Tensor], Any], error: type[BaseException]
) -> None:
    """What the forward pass kept of a trace was left in the model: fake tensors, without data."""
    model = Keeps(end)
    before = snapshot(model)
    with pytest.raises(error):
        trace(model, IDS)
    assert differences(before, snapshot(model)) == []


class Caches(nn.Module):
    """Makes a table in its first call; called as it is, for it branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        return self.linear(x) * self.table if x.sum() < 1e9 else x


class AroundCaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.caches = nn.Linear(8, 8), Caches()
        self.same = self.caches

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.caches(self.first(x)))


def test_a_cache_of_a_module_that_is_called_as_it_is_is_made_when_it_trains() -> None:
    torch.manual_seed(0)
    model, x = AroundCaches(), torch.randn(4, 8)
    before = snapshot(model)
    sequence = trace(model, x, keep_together=["caches"])
    assert differences(before, snapshot(model)) == []
    case = Case(model, x, functional.mse_loss, torch.randn(4, 8))
    assert sequence.sample.called_as_is == ("caches",)
    assert difference(run(sequence, case), eager(sequence, case)) <= CLOSE
    assert model.same is model.caches


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Remembers(nn.Module):
    """Called as it is; replaces a buffer that is held under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counter()
        self.twin = self.inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner.count = self.inner.count + 1
        return x * self.twin.count if x.sum() < 1e9 else x


def test_a_buffer_that_is_replaced_under_two_names_is_written() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Remembers()), torch.randn(4, 8)
    sequence = trace(model, x, keep_together=["1"])
    found = run(sequence, Case(model, x, functional.mse_loss, torch.randn(4, 8)))
    assert [float(value) for value in found.buffers.values()] == [1.0]
    assert model.get_buffer("1.inner.count") == 0


class Made(nn.Module):
    """Modules in a row, some of them the same, with a question about the batch between them."""

    def __init__(self, parts: list[nn.Module], asks: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.asks = asks
        self.by_name = {"first": parts[0], "all": [*parts]}

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) + x
            if self.asks and x.shape[0] != 1:
                x = x.contiguous()
        return x


class Buffers(nn.Module):
    """Reads a buffer that is not saved and a tensor that is none."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4), persistent=False)
        self.constant = torch.rand(4)
        self.settings = {"shift": [0.5]}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.constant * self.settings["shift"][0]


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _module, _args, output: output * 2)
    module.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    return module


KINDS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(4, 4),
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: hooked(nn.Linear(4, 4)),
    lambda: nn.Linear(4, 4).requires_grad_(False),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(),
    lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm1d(4).eval(),
    Buffers,
    lambda: nn.GRUCell(4, 4),
)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Modules of several kinds; some stand in several places, also inside another; some share a weight or bias."""
    torch.manual_seed(0)
    made = [nn.Linear(4, 4), *(kind() for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)))]
    parts = list(made)
    for _ in range(draw(st.integers(0, 2))):
        parts.append(nn.Sequential(*draw(st.lists(st.sampled_from(parts), min_size=1, max_size=2))))
    parts += draw(st.lists(st.sampled_from(parts), max_size=2))
    linear = [part for part in made if type(part) is nn.Linear]
    for one, other in itertools.pairwise(linear):
        if draw(st.booleans()):
            other.weight = one.weight
        if draw(st.booleans()):
            other.bias = one.bias
    model = Made(parts, asks=draw(st.booleans()))
    if draw(st.booleans()):
        model.register_module("also", parts[-1])
    return model


@given(models())
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_model_is_left_as_it_was_and_trains_right(model: nn.Module) -> None:
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    before = snapshot(model)
    sequence = trace(model, x)
    assert differences(before, snapshot(model)) == []
    case = Case(model, x, functional.mse_loss, torch.zeros(6, 4))
    cuts = list(range(1, len(sequence)))
    assert difference(run(sequence, case, cuts), eager(sequence, case)) <= CLOSE
