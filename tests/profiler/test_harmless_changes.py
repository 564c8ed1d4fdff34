"""Python attributes that a forward pass changes: refused where results depend on them, and only there."""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import NotTraceableError, trace
from profiler.observe.python_state import attributes_of
from tests.coverage.fidelity import difference, eager, run, same_bits, some_cuts
from tests.coverage.model_list import Case


class Base(nn.Module):
    """Multiplies by what `table` makes or remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.kept: Any = None
        self.calls = 0
        self.frequency = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def table(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x * self.table(x))


def angles(length: int) -> Tensor:
    return torch.arange(length).float().cos()


class InAnAttribute(Base):
    def table(self, x: Tensor) -> Any:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = angles(x.shape[1])
        return self.kept[: x.shape[1]]


class InADict(Base):
    """It was refused: an export runs the model twice, and the second run found the tensors of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def table(self, x: Tensor) -> Any:
        if x.shape[1] not in self.kept:
            self.kept[x.shape[1]] = angles(x.shape[1])
        return self.kept[x.shape[1]]


class InANewBuffer(Base):
    def table(self, x: Tensor) -> Any:
        if not hasattr(self, "angles"):
            self.register_buffer("angles", angles(x.shape[1]), persistent=False)
        return self.angles


class InAnEmptyBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        del self.kept
        self.register_buffer("kept", None, persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def table(self, x: Tensor) -> Any:
        if self.kept is None:
            self.register_buffer("kept", angles(x.shape[1]), persistent=False)
        return self.kept * self.scale


class CountsOnly(Base):
    def table(self, x: Tensor) -> Any:
        self.calls += 1
        return 1.5


class CountsInADict(InADict):
    def table(self, x: Tensor) -> Any:
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        return super().table(x)


class OfAParameter(InADict):
    """Out of date after the first step."""

    def table(self, x: Tensor) -> Any:
        if x.shape[1] not in self.kept:
            self.kept[x.shape[1]] = self.frequency.detach().cos()
        return self.kept[x.shape[1]] * self.frequency


class OfAFrozenParameter(OfAParameter):
    """As rotary embeddings keep their tables; it was refused, for the proof had another parameter in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency.requires_grad_(False)


class Averages(InAnAttribute):
    """It was refused: the second of two calls that were compared found the average that the first had left."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def table(self, x: Tensor) -> Any:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().table(x) + self.average


HARMLESS = [
    InAnAttribute,
    InADict,
    InANewBuffer,
    InAnEmptyBuffer,
    CountsOnly,
    CountsInADict,
    OfAFrozenParameter,
    Averages,
]


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_no_result_depends_on_is_harmless(kind: Callable[[], Base]) -> None:
    torch.manual_seed(0)
    model = kind()
    before, names = attributes_of(model), set(model.state_dict())
    of = Case(model, torch.randn(4, 8), functional.cross_entropy, torch.randint(3, (4,)))
    sequence = trace(model, of.sample)
    assert sequence.sample.front_end == "export"
    assert {name: value.key for name, value in attributes_of(model).items()} == {n: v.key for n, v in before.items()}
    assert set(model.state_dict()) == names
    found = run(sequence, of)
    assert difference(found, eager(sequence, of)) == 0
    assert all(same_bits(run(sequence, of, cuts), found) for cuts in some_cuts(sequence))


class WarmsUp(Base):
    """The same in the first calls, which a second trace shows, and another thing in a later one."""

    def table(self, x: Tensor) -> Any:
        self.calls += 1
        return 1.0 if self.calls < 50 else 2.0


class OfThePreviousBatch(Base):
    def table(self, x: Tensor) -> Any:
        kept, self.kept = self.kept, x.detach()
        return 1.0 if kept is None else kept.mean()


class OfTheFirstBatch(InADict):
    def table(self, x: Tensor) -> Any:
        if x.shape[1] not in self.kept:
            self.kept[x.shape[1]] = x.detach().mean(0)
        return self.kept[x.shape[1]]


class OfTheFirstBatchInAnEmptyBuffer(InAnEmptyBuffer):
    """Export took it for what each call computes anew: from the second step on nothing was right, without a word."""

    def table(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = x.detach().mean(0)
        return self.kept


class OfAWrittenBuffer(Averages):
    """Out of date after the first call, which writes the buffer."""

    def table(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = self.average.clone()
        return super().table(x)


class BeginsWithTheData(Averages):
    """The first call alone writes the buffer, which training does not read."""

    def table(self, x: Tensor) -> Any:
        if self.kept is None:
            self.average.copy_(x.detach().mean(0))
            self.kept = angles(x.shape[1])
        return self.kept if self.training else self.average


class AveragesAfterSomeCalls(Averages):
    """What is written depends on the number of calls, and what is returned in training does not."""

    def table(self, x: Tensor) -> Any:
        self.calls += 1
        self.average.lerp_(x.detach().mean(0), 1 / self.calls)
        return 1.0 if self.training else self.average


class LossesInAList(Base):
    """What is done with them, no graph knows."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def table(self, x: Tensor) -> Any:
        self.kept.append(x.square().mean())
        return 1.0


KEPT_WITH_RESULTS = [
    WarmsUp, OfThePreviousBatch, OfTheFirstBatch, OfTheFirstBatchInAnEmptyBuffer, OfAParameter, LossesInAList,
    OfAWrittenBuffer, BeginsWithTheData, AveragesAfterSomeCalls,
]  # fmt: skip


@pytest.mark.parametrize("kind", KEPT_WITH_RESULTS)
def test_what_a_result_depends_on_is_refused(kind: Callable[[], Base]) -> None:
    model = kind()
    with pytest.raises(NotTraceableError, match=r"its Python attribute '(calls|kept)', which a graph would hold as"):
        trace(model, torch.randn(4, 8))
    assert model.calls == 0
    assert not model.kept


class MakesAParameter(Base):
    """It was traced, with the parameter as a constant that is never trained."""

    def table(self, x: Tensor) -> Any:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(8))
        return self.gain


class ReplacesAParameter(Base):
    def table(self, x: Tensor) -> Any:
        self.frequency = nn.Parameter(self.frequency.clamp(0, 1))
        return self.frequency


class TakesABufferAway(Base):
    """symbolic_trace went on with the buffer, which the model has in its first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any
        self.register_buffer("scale", torch.full((8,), 2.0))

    def table(self, x: Tensor) -> Any:
        scale = self.scale if self.scale is not None else 1.0
        self.scale = None
        return scale


@pytest.mark.parametrize(
    ("kind", "name"), [(MakesAParameter, "gain"), (ReplacesAParameter, "frequency"), (TakesABufferAway, "scale")]
)
def test_parameters_and_buffers_stay(kind: Callable[[], Base], name: str) -> None:
    model = kind()
    names = set(model.state_dict())
    with pytest.raises(NotTraceableError, match=rf"takes away its parameter or buffer '{name}'|self\.{name} = None"):
        trace(model, torch.randn(4, 8))
    assert set(model.state_dict()) == names


class WithAnotherHead(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def table(self, x: Tensor) -> Any:
        return 1.0


def test_a_backward_hook_of_a_module_that_is_not_called_is_harmless() -> None:
    model = WithAnotherHead()
    model.other.register_full_backward_hook(lambda *_: None)
    assert trace(model, torch.randn(4, 8)).sample.front_end == "export"
    model.last.register_full_backward_hook(lambda *_: None)
    with pytest.raises(NotTraceableError, match="'last' has a backward hook"):
        trace(model, torch.randn(4, 8))
    assert not model.last._forward_pre_hooks


KEEPS_BY_CLASS = """
KNOWN = {}

def halved(x):
    return x / KNOWN.setdefault(type(x), 2)
"""


@pytest.mark.parametrize(("package", "traces"), [("einops.made_up", 1), ("another.made_up", 2)])
def test_what_einops_keeps_needs_no_proof(package: str, traces: int) -> None:
    """It keeps its ways by the tensor's class, so that each model which uses it was traced twice."""
    file = ModuleType(package)
    exec(KEEPS_BY_CLASS, file.__dict__)
    halved = file.halved

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return halved(self.linear(x))

    with mock.patch.object(torch.export, "export", side_effect=torch.export.export) as export:
        trace(Halving(), torch.randn(4, 8))
    assert export.call_count == traces
