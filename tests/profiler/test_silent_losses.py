"""What a graph would lose without a word is refused, each with what to do instead."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiler import NotTraceableError, trace
from profiler.stage_function import Pass, StageFunction, leaves_of, roots_of, run_backward

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))


class OwnBackward(Base):
    def forward(self, x):
        return Straight.apply(self.linear(x))


class Angle(torch.autograd.Function):
    """Another gradient than that of its forward pass, which is no number for most values, and 0 where the mask is."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(x)
        return torch.acos(x @ x.T) * mask

    @staticmethod
    def backward(ctx, gradient):
        return -(gradient + gradient.T) @ ctx.saved_tensors[0], None


class OwnBackwardOfSmallValues(Base):
    def forward(self, x):
        return Angle.apply(self.linear(x) / 100, torch.ones(4, 4, dtype=torch.int64))


class Reentrant(Base):
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=True)


class PythonRandom(Base):
    def forward(self, x):
        return self.linear(x) * random.random()


class NumpyRandom(Base):
    def forward(self, x):
        return self.linear(x) * np.random.uniform()


class HiddenWrite(Base):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.mean.copy_(y.mean(0))
        return y


class TensorHook(Base):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: -gradient)
        return y


class DataDependentShape(Base):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OwnBackward, "own backward pass a graph would lose"),
        (OwnBackwardOfSmallValues, "own backward pass a graph would lose"),
        (Reentrant, "use use_reentrant=False"),
        (PythonRandom, r"test_silent_losses\.py:\d+ .*random\(\).*Python's or numpy's random generator"),
        (NumpyRandom, r"test_silent_losses\.py:\d+ .*uniform\(\).*Python's or numpy's random generator"),
        (HiddenWrite, r"test_silent_losses\.py:\d+ .*aten\.copy_\.default inside a region without gradient"),
        (TensorHook, "registers a hook"),
        (DataDependentShape, "test_silent_losses.py.*aten.index.Tensor.*depends on data"),
    ],
)
def test_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(NotTraceableError, match=f"(?s){message}"):
        trace(model(), X)


def test_a_backward_hook_is_refused() -> None:
    model = Base()
    model.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(NotTraceableError, match="'linear' has a backward hook"):
        trace(model, X)


class WrittenLater(nn.Module):
    """A value made without gradient comes to carry one where slices of it are written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x):
        y = torch.zeros(x.shape[0], 16)
        y[:, :8] = self.a(x)
        y[:, 8:] = self.b(x).tanh()
        return self.c(y)


def test_gradients_reach_what_was_written_before_a_cut() -> None:
    torch.manual_seed(0)
    model = WrittenLater()
    sequence = trace(model, X)
    model(X).sum().backward()
    for cut in range(1, len(sequence)):
        own = {
            (layer.index, name): sequence.parameters[name].detach().requires_grad_()
            for layer in sequence.layers
            for name in layer.parameters
        }
        passes: list[Pass] = []
        values: dict[str, Tensor] = {}
        for first, stop in ((0, cut), (cut, len(sequence))):
            stage = StageFunction(sequence, first, stop, own)
            leaves = leaves_of(values, stage.entering)
            values = stage.forward(leaves, {sequence.inputs[0]: X}, sequence.buffers).values
            passes.append(Pass(leaves, roots_of(values)))
        gradients = {name: torch.ones_like(value) for name, value in values.items()}
        for kept in reversed(passes):
            gradients = {name: g for name, g in run_backward(kept, gradients).items() if g is not None}
        for (_, name), parameter in own.items():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, msg=f"{name}, cut {cut}")
