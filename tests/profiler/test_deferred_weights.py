"""Orders of sums, gradients that are none, and memory of a backward pass in two."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import trace
from profiler.run.split_backward import DeferredWeights, deferred_parameters, deferring, separated
from profiler.run.stage_function import Pass, StageFunction, leaves_of, roots_of, run_backward
from profiler.torch_private import allocations_in, use_count

_aten = torch.ops.aten


def gradients_of(model: nn.Module, x: Tensor, *, splits: bool, **settings: Any) -> dict[str, Tensor | None]:
    """By the parameter's name, of the sum of what the model returns; all layers in one stage."""
    sequence = trace(model, x, **settings)
    copies = {
        (layer.index, name): sequence.parameters[name].detach().requires_grad_()
        for layer in sequence.layers
        for name in layer.parameters
    }
    deferred = deferred_parameters(sequence.layers, copies) if splits else frozenset()
    assert bool(deferred) is splits
    stage = StageFunction(sequence, 0, len(sequence), copies, deferred=deferred)
    store = DeferredWeights() if splits else None
    leaves = leaves_of({}, stage.entering)
    values = stage.forward(leaves, dict.fromkeys(sequence.inputs, x), {}, store=store).values
    run_backward(Pass(leaves, roots_of(values)), {name: value.detach() for name, value in values.items()})
    if store is not None:
        store.run()
    return {name: copy.grad for (_, name), copy in copies.items()}


class Block(nn.Module):
    """One layer, when kept together, that uses one weight five times, as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x, self.weight, self.bias).tanh()
        h = (h @ self.weight.t()).tanh()
        h = functional.linear(h, self.weight, self.bias).tanh()
        h = (h @ self.weight.t()).tanh()
        return functional.linear(h, self.weight).tanh()


def test_uses_of_unlike_kinds_are_added_in_the_order_of_a_whole_pass() -> None:
    """Gradients that reached the weight directly were added before those that came through a transpose."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Block()), torch.randn(8, 16)
    whole, split = (gradients_of(model, x, splits=splits, keep_together=["1"]) for splits in (False, True))
    for name, expected in whole.items():
        found = split[name]
        assert expected is not None
        assert found is not None
        assert torch.equal(found, expected), name


class Stopped(torch.autograd.Function):
    """Gives back no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unseen = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x) + Stopped.apply(self.unseen(x))


def test_a_parameter_that_no_gradient_reaches_has_none() -> None:
    """It was zero, with which an optimizer moves what it leaves alone otherwise."""
    for splits in (False, True):
        found = gradients_of(Behind(), torch.randn(2, 4), splits=splits)
        assert {name for name, gradient in found.items() if gradient is None} == {"unseen.weight", "unseen.bias"}


def test_an_operand_that_the_operation_does_not_save_is_not_kept() -> None:
    """Autocast saves a copy of half its bytes; the operand itself lived until W, as a leaf of the operation's graph."""
    weight, source = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    store = DeferredWeights()
    with torch.autocast("cpu", torch.bfloat16), deferring(store):
        x = source * 2
        memory = x.untyped_storage()
        y = separated(_aten.linear.default, (1,), x, weight)
        assert y.dtype is torch.bfloat16
        del x
    assert use_count(memory._cdata) == 1  # this handle
    y.sum().backward()
    store.run()
    assert weight.grad is not None
    assert source.grad is not None


@pytest.mark.parametrize("uses", [1, 3])
def test_w_holds_the_gradients_of_one_parameter_at_a_time(uses: int) -> None:
    """All of a stage's were there at once, as much as its parameters take."""
    count, extent = 8, 64
    weights = [torch.randn(extent, extent, requires_grad=True) for _ in range(count)]
    store = DeferredWeights()
    with deferring(store):
        y = torch.randn(2, extent)
        for weight in weights:
            for _ in range(uses):
                y = separated(_aten.linear.default, (1,), y, weight)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    y.sum().backward()
    peak = _peak_bytes(store.run)
    assert peak <= (uses + 1) * extent * extent * 4
    assert store.entries == []


def _peak_bytes(call: Callable[[], None]) -> int:
    _, changes = allocations_in(call)
    return max(accumulate(changes))
