"""Orders of sums, gradients that are none, and memory of a backward pass in two."""

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import trace
from profiler.run.separable import SEPARABLE, deferred_parameters
from profiler.run.split_backward import DeferredWeights, deferring, separated
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
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
    run_backward(KeptPass(leaves, roots_of(values)), {name: value.detach() for name, value in values.items()})
    if store is not None:
        store.run()
    return {name: copy.grad for (_, name), copy in copies.items()}


def image(channels: int, extents: int) -> Tensor:
    return torch.randn(2, channels, *[5] * extents)


OPERATIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "linear": lambda: (torch.randn(3, 5, 4), torch.randn(6, 4), torch.randn(6)),
    "mm": lambda: (torch.randn(5, 4), torch.randn(4, 6)),
    "addmm": lambda: (torch.randn(6), torch.randn(5, 4), torch.randn(4, 6)),
    "bmm": lambda: (torch.randn(3, 5, 4), torch.randn(3, 4, 6)),
    "baddbmm": lambda: (torch.randn(3, 5, 6), torch.randn(3, 5, 4), torch.randn(3, 4, 6)),
    "matmul": lambda: (torch.randn(2, 3, 5, 4), torch.randn(4, 6)),
    "bilinear": lambda: (torch.randn(3, 4), torch.randn(3, 5), torch.randn(6, 4, 5), torch.randn(6)),
    "conv1d": lambda: (image(4, 1), torch.randn(6, 4, 3), torch.randn(6)),
    "conv1d.padding": lambda: (image(4, 1), torch.randn(6, 4, 3), torch.randn(6), [1], "same"),
    "conv2d": lambda: (image(4, 2), torch.randn(6, 2, 3, 3), torch.randn(6), [1, 1], [1, 1], [1, 1], 2),
    "conv2d.padding": lambda: (image(4, 2), torch.randn(6, 4, 3, 3), torch.randn(6), [1, 1], "same"),
    "conv3d": lambda: (image(4, 3), torch.randn(6, 4, 3, 3, 3), torch.randn(6)),
    "conv3d.padding": lambda: (image(4, 3), torch.randn(6, 4, 3, 3, 3), torch.randn(6), [1, 1, 1], "same"),
    "conv_transpose1d": lambda: (image(4, 1), torch.randn(4, 6, 3), torch.randn(6)),
    "conv_transpose2d.input": lambda: (image(4, 2), torch.randn(4, 6, 3, 3), torch.randn(6)),
    "conv_transpose3d.input": lambda: (image(4, 3), torch.randn(4, 6, 3, 3, 3), torch.randn(6)),
    "convolution": lambda: (
        image(4, 2), torch.randn(6, 4, 3, 3), torch.randn(6), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "embedding": lambda: (torch.randn(7, 4), torch.randint(7, (3, 5))),
    "layer_norm": lambda: (torch.randn(3, 5, 4), [4], torch.randn(4), torch.randn(4)),
    "group_norm": lambda: (image(4, 2), 2, torch.randn(4), torch.randn(4)),
}  # fmt: skip
WEIGHTS = {
    "addmm": (2,),
    "baddbmm": (2,),
    "bilinear": (2, 3),
    "embedding": (0,),
    "bmm": (1,),
    "mm": (1,),
    "matmul": (1,),
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda value: value.clone(),
    "innermost first": lambda value: value.movedim(-1, 0).contiguous().movedim(0, -1),
    "channels last": lambda value: (
        value.movedim(1, -1).contiguous().movedim(-1, 1) if value.dim() > 2 else value.clone()
    ),
    "one for all": lambda value: value.flatten()[:1].expand_as(value),
}


def test_every_operation_has_a_case() -> None:
    assert set(map(operation_named, OPERATIONS)) == SEPARABLE


def operation_named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_gradients_of_a_whole_pass(name: str) -> None:
    """For values and gradients in any order in memory; of a group normalization in channels-last order W ended the
    process."""
    torch.manual_seed(0)
    operation, plain = operation_named(name), OPERATIONS[name]()
    tensors = [place for place, value in enumerate(plain) if isinstance(value, Tensor)]
    places = WEIGHTS.get(name.partition(".")[0], tuple(tensors[1:]))
    for of_value, of_gradient in itertools.product(ORDERS, repeat=2):
        args = [
            (value if place in places else ORDERS[of_value](value)).detach() if place in tensors else value
            for place, value in enumerate(plain)
        ]
        leaves = [args[place].requires_grad_() for place in tensors if args[place].is_floating_point()]
        expected_output = operation(*args)
        gradient = ORDERS[of_gradient](torch.randn_like(expected_output))
        expected = torch.autograd.grad(expected_output, leaves, gradient)
        store = DeferredWeights()
        with deferring(store):
            output = separated(operation, places, *args)
        assert torch.equal(output, expected_output)
        output.backward(gradient)
        assert all(args[place].grad is None for place in places)
        store.run()
        for leaf, whole in zip(leaves, expected, strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, whole), (of_value, of_gradient)
            leaf.grad = None


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "embedding"])  # of numbers, without gradient
@pytest.mark.parametrize("order", ORDERS)
def test_what_enters_a_stage_does_not_live_until_w(name: str, order: str) -> None:
    """An operand that lay in another order held the graph before it, and so what enters and the gradient of that: eight
    values of a stage with a transposed convolution, 6 to 9 % of what its rank held."""
    operation, args = operation_named(name), [*OPERATIONS[name]()]
    tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
    places = WEIGHTS.get(name.partition(".")[0], tuple(tensors[1:]))
    for place in places:
        args[place].requires_grad_()
    entering = []
    for place in tensors:
        if place not in places and args[place].is_floating_point():
            leaf = args[place].requires_grad_()
            entering.append(weakref.ref(leaf))
            args[place] = ORDERS[order](leaf * 2)
    store = DeferredWeights()
    with deferring(store):
        output = separated(operation, places, *args)
    output.backward(torch.ones_like(output))
    assert len(store.entries) == 1
    del args, output, leaf
    assert [enters() for enters in entering] == [None] * len(entering)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_other_uses_are_added_in_the_order_of_a_whole_pass(name: str) -> None:
    """Of a root mean square normalization, which reads its input twice, 8 of 13 gradients had another last bit."""
    torch.manual_seed(0)
    operation, plain = operation_named(name), OPERATIONS[name]()
    tensors = [place for place, value in enumerate(plain) if isinstance(value, Tensor)]
    places = WEIGHTS.get(name.partition(".")[0], tuple(tensors[1:]))
    values = [place for place in tensors if place not in places and plain[place].is_floating_point()]
    found = []
    for called in (operation, partial(separated, operation, places)):
        store, args = DeferredWeights(), list(plain)
        for place in places:
            args[place] = plain[place].detach().requires_grad_()
        leaves = [plain[place].detach().requires_grad_() for place in values]
        for place, leaf in zip(values, leaves, strict=True):
            args[place] = leaf.tanh()
        with deferring(store):
            before = sum((args[place] / 3).sum() for place in values)
            output = called(*args)
            after = sum((args[place] / 7).sum() for place in values)
        (before + (output * output.detach()).sum() + after).backward()
        store.run()
        found.append([value.grad for value in (*leaves, *(args[place] for place in places))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Doubled(nn.Module):
    """One value at two places of an operation, and used besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pairs = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.pairs(x, x)


class Normalized(nn.Module):
    """A residual branch with a root mean square normalization, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.inner(self.norm(x))


@pytest.mark.parametrize("kind", [Doubled, Normalized])
def test_an_operation_that_reads_a_value_twice_stays_in_i(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 8)
    whole, split = (gradients_of(model, x, splits=splits) for splits in (False, True))
    for name, gradient in whole.items():
        found = split[name]
        assert gradient is not None
        assert found is not None
        assert torch.equal(gradient, found), name


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
