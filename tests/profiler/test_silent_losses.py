"""What a graph would lose without a word is refused, each with what to do instead."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiler import NotTraceableError, trace
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.model_list import Case

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


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
            self.linear.bias.copy_(y.mean(0))
        return y


class BufferWithoutGradient(Base):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.mean.copy_(y.mean(0))
        return y * self.mean


class TensorHook(Base):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: -gradient)
        return y


register_hook = Tensor.register_hook


class HookByAnotherName(Base):
    def forward(self, x):
        y = self.linear(x)
        register_hook(y, lambda gradient: -gradient)
        return y


class HookOnANode(Base):
    def forward(self, x):
        y = self.linear(x).tanh()
        y.grad_fn.register_hook(lambda entering, leaving: (-entering[0],))
        return y


class HookBeforeANode(Base):
    def forward(self, x):
        y = self.linear(x).tanh()
        y.grad_fn.register_prehook(lambda leaving: (-leaving[0],))
        return y


class HookOnSeveral(Base):
    def forward(self, x):
        y = self.linear(x)
        torch.autograd.graph.register_multi_grad_hook([y], lambda gradients: None)
        return y


class HookOnAModule(Base):
    def forward(self, x):
        self.linear.register_full_backward_hook(lambda *_: None)
        return self.linear(x)


class SavedTensorHooks(Base):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y / 2, lambda y: y):
            return self.linear(x).tanh()


class GradientInside(Base):
    def forward(self, x):
        y = self.linear(x)
        return y + torch.autograd.grad(y.tanh().sum(), y, create_graph=True)[0]


class BackwardInside(Base):
    def forward(self, x):
        y = self.linear(x).detach().requires_grad_()
        y.tanh().sum().backward()
        return self.linear(x) + y.grad


class FunctionTransform(Base):
    def forward(self, x):
        return self.linear(x) + torch.func.grad(lambda y: y.tanh().sum())(x)


class DataDependentShape(Base):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Reentrant, "use use_reentrant=False"),
        (PythonRandom, r"test_silent_losses\.py:\d+ .*random\(\).*Python's or numpy's random generator"),
        (NumpyRandom, r"test_silent_losses\.py:\d+ .*uniform\(\).*Python's or numpy's random generator"),
        (HiddenWrite, r"test_silent_losses\.py:\d+ .*aten\.copy_\.default inside a region without gradient"),
        (TensorHook, r"test_silent_losses\.py:\d+ .*registers a hook on a gradient"),
        (HookByAnotherName, "registers a hook on a gradient"),
        (HookOnANode, "registers a hook on a gradient"),
        (HookBeforeANode, "registers a hook on a gradient"),
        (HookOnSeveral, "registers a hook on a gradient"),
        (HookOnAModule, "registers a hook on a gradient"),
        (SavedTensorHooks, r"test_silent_losses\.py:\d+ .*hooks on tensors saved for the backward pass"),
        (GradientInside, r"test_silent_losses\.py:\d+ .*runs a backward pass \(torch.autograd.grad, backward\)"),
        (BackwardInside, r"runs a backward pass \(torch.autograd.grad, backward\)"),
        (FunctionTransform, r"runs a backward pass \(torch.autograd.grad, backward\)"),
        (DataDependentShape, "test_silent_losses.py.*aten.index.Tensor.*depends on data"),
    ],
)
def test_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(NotTraceableError, match=f"(?s){message}"):
        trace(model(), X)


def test_a_backward_hook_is_refused() -> None:
    model = nn.Sequential()
    model.linear = nn.Linear(16, 16)
    model.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(NotTraceableError, match="'linear' has a backward hook"):
        trace(model, X)


@pytest.mark.parametrize("register", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook])
def test_a_backward_hook_of_the_model_itself_is_refused(register: Callable[..., object]) -> None:
    """Also where `fx.symbolic_trace` could serve, which calls the model's forward without its hooks."""
    model = Base()
    register(model, lambda *_: None)
    with pytest.raises(NotTraceableError, match="the model itself has a backward hook"):
        trace(model, X)


def test_a_hook_on_a_gradient_in_a_forward_hook_of_the_model_itself_is_refused() -> None:
    model = Base()
    model.register_forward_hook(lambda _, args, output: output.register_hook(lambda gradient: gradient * 5) and None)
    with pytest.raises(NotTraceableError, match="registers a hook on a gradient"):
        trace(model, X)


def test_a_hook_that_steps_in_the_backward_pass_is_refused() -> None:
    """It belongs to the user's parameter; a stage's own would never call it."""
    model = Base()
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(NotTraceableError, match=r"'linear\.weight' has a backward hook"):
        trace(model, X)


def test_a_backward_hook_of_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(NotTraceableError, match="backward hook of all modules"):
            trace(Base(), X)
    finally:
        handle.remove()


@torch.library.custom_op("gpipe_autoplan_tests::reversed", mutates_args=())
def backwards(x: Tensor) -> Tensor:
    return x.clone()


backwards.register_fake(torch.empty_like)
backwards.register_autograd(lambda _, gradient: -gradient)


class InferenceMode(Base):
    """Export knew no region of inference mode, and gave what it computes a gradient."""

    def forward(self, x):
        x = self.linear(x)
        with torch.inference_mode():
            y = x.tanh()
        return x + y.clone()


class CustomOperation(Base):
    def forward(self, x):
        return backwards(self.linear(x))


class SavedOnTheCpu(Base):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x).tanh()


class DetachedInPlace(Base):
    def forward(self, x):
        y = self.linear(x).tanh()
        return self.linear(x) * y.detach_()


class ForwardHook(Base):
    def forward(self, x):
        with self.linear.register_forward_hook(lambda _module, _args, output: output * 3):
            return self.linear(x)


@pytest.mark.parametrize(
    "kind", [InferenceMode, CustomOperation, SavedOnTheCpu, DetachedInPlace, ForwardHook, BufferWithoutGradient]
)
def test_what_only_looks_so_is_kept(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    sequence = trace(model, X)
    case = Case(model, X, nn.functional.mse_loss, torch.zeros(4, 16))
    assert sequence.sample.front_end == "export"
    assert difference(run(sequence, case), eager(sequence, case)) == 0


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
        passes: list[KeptPass] = []
        values: dict[str, Tensor] = {}
        for first, stop in ((0, cut), (cut, len(sequence))):
            stage = StageFunction(sequence, first, stop, own)
            leaves = leaves_of(values, stage.entering)
            values = stage.forward(leaves, {sequence.inputs[0]: X}, sequence.buffers).values
            passes.append(KeptPass(leaves, roots_of(values)))
        gradients = {name: torch.ones_like(value) for name, value in values.items()}
        for kept in reversed(passes):
            gradients = {name: g for name, g in run_backward(kept, gradients).items() if g is not None}
        for (_, name), parameter in own.items():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, msg=f"{name}, cut {cut}")
