"""Regions without gradient or under autocast whose writes concern others are written out, and compute the same."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from profiler import trace
from profiler.observe.named_functions import name_in_file
from tests.coverage.fidelity import difference, eager, run, same_bits, some_cuts
from tests.coverage.model_list import Case

STATEMENTS = ("move", "norm", "write", "read", "autocast", "inner", "count")


class Random(nn.Module):
    """Some statements, each in a region or not."""

    mean: Tensor
    calls: Tensor

    def __init__(self, statements: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.statements = statements
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in statements)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for (statement, trained), linear in zip(self.statements, self.linears, strict=True):
            y = linear(x).clone()
            part = y[:, :2]
            with torch.set_grad_enabled(trained):
                z = getattr(self, "_" + statement)(y, part)
            x = torch.tanh(y + z)
        return x

    def _move(self, y: Tensor, part: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y * self.mean.clone()

    def _norm(self, y: Tensor, part: Tensor) -> Tensor:
        z: Tensor = self.norm(y)
        return z

    def _write(self, y: Tensor, part: Tensor) -> Tensor:
        part.mul_(1.5)
        return part.sum(1, keepdim=True)

    def _read(self, y: Tensor, part: Tensor) -> Tensor:
        return y * self.mean.clone() + self.calls

    def _autocast(self, y: Tensor, part: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            self.mean[:2] = part.detach().mean(0)
            return y * 2

    def _inner(self, y: Tensor, part: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(self.norm(y).mean(0))
        return part.sum(1, keepdim=True)

    def _count(self, y: Tensor, part: Tensor) -> Tensor:
        self.calls.add_(1)
        return y / self.calls.clone()


def same(statements: list[tuple[str, bool]]) -> None:
    torch.manual_seed(0)
    case = Case(Random(statements), torch.randn(4, 4), nn.functional.mse_loss, torch.randn(4, 4))
    sequence = trace(case.model, case.sample)
    assert not sequence.sample.called_as_is, "nothing has to be called as it is"
    whole = run(sequence, case)
    assert difference(whole, eager(sequence, case)) < 1e-5
    assert all(same_bits(run(sequence, case, cuts), whole) for cuts in some_cuts(sequence))


@pytest.mark.parametrize("statement", STATEMENTS)
def test_each_without_gradient(statement: str) -> None:
    same([(statement, False), ("read", True)])


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STATEMENTS), st.booleans()), min_size=2, max_size=4))
def test_any_together(statements: list[tuple[str, bool]]) -> None:
    same(statements)


def test_a_file_is_looked_for_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports another when it is asked for anything ended a trace with that one's error."""

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"there is no {name}")

    lazy = Lazy("lazy")
    del lazy.__dict__["__loader__"]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert name_in_file(__file__, "same") is not None
