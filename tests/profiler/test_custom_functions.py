"""A function with a backward pass of its own is kept exactly, by whatever name it is reached, or refused."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from profiler import NotTraceableError, trace
from profiler.memory.in_stage import layer_memory
from profiler.run.inputs import fake_runner, micro_batch, real_runner
from profiler.run.parameter_pool import ParameterPool
from tests.coverage.fidelity import by_one, difference, eager, run, same_bits, some_cuts
from tests.coverage.model_list import Case


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class SetUp(torch.autograd.Function):
    """In torch's newer form, with a default and with the same tensor twice."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return x * y * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return -gradients[0] * y, 3 * gradients[0] * x, None


class OwnApply(Reverse):
    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return super().apply(x) * 2


class Clipped(torch.autograd.Function):
    """The gradient of its forward pass but for large ones, which no probe with small ones tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].clamp(-ctx.most, ctx.most), None


class Several(torch.autograd.Function):
    """Returns its argument, a tensor without gradient, an integer one, and what is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        rounded, positive = x.round(), (x > 0).long()
        ctx.mark_non_differentiable(rounded, positive)
        return x, rounded, positive, 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 5 * gradients[0]


class OfAList(torch.autograd.Function):
    """Autograd does not see tensors in a list: eagerly no gradient passes, in a graph of its operations one would."""

    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor]) -> Tensor:
        return tensors[0] * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class PerSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: int, device: torch.device) -> Tensor:
        ctx.samples = samples
        return x / samples + torch.tensor(1.0, device=device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return -gradients[0] / ctx.samples, None, None


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0] * ctx.saved_tensors[0]


class InAutocast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return -(gradients[0] @ weight.T), x.T @ gradients[0]


bound = Reverse.apply
LABELS = torch.arange(8) % 3


class Way(nn.Module):
    """Calls a function between two layers."""

    stored = (Reverse.apply,)
    own = staticmethod(Reverse.apply)

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, self.first(x)))


def by_default(x: Tensor, function: Callable[[Tensor], Tensor] = Reverse.apply) -> Tensor:
    return function(x)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = bound(x)
    return x * y


def several(x: Tensor) -> Tensor:
    y, rounded, positive, half = Several.apply(x)
    assert y.requires_grad
    assert not rounded.requires_grad
    return y * half + rounded * x + positive


def asking(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        x = x.expand(1, 8)
    return PerSample.apply(x, x.shape[0], x.device)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "full name": lambda _, x: Reverse.apply(x),
    "bound at import": lambda _, x: bound(x),
    "partial": lambda _, x: functools.partial(bound)(x),
    "stored": lambda self, x: self.stored[0](x),
    "default of an argument": lambda _, x: by_default(x),
    "static method": lambda self, x: self.own(x),
    "called by another function": lambda _, x: functools.reduce(lambda y, f: f(y), [bound, bound, bound], x),
    "method of an operator": lambda _, x: operator.methodcaller("apply", x)(Reverse),
    "apply of its own": lambda _, x: OwnApply.apply(x),
    "set-up apart": lambda _, x: SetUp.apply(x, x),
    "set-up apart, other constant": lambda _, x: SetUp.apply(x, x, 3.0) + SetUp.apply(x, x, scale=4.0),
    "inside a checkpoint": lambda _, x: checkpoint(lambda y: bound(y).tanh(), x, use_reentrant=False),
    "large gradients": lambda _, x: 1000 * Clipped.apply(x, 100.0),
    "several results": lambda _, x: several(x),
    "a list": lambda _, x: OfAList.apply([x]) + x,
    "without gradient": lambda _, x: without_gradient(x),
    "result unused": lambda _, x: (bound(x), x)[1],
    "weight as an argument": lambda self, x: InAutocast.apply(x, self.first.weight),
    "asks for the batch": lambda _, x: asking(x),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def case(way: Callable[[Any, Tensor], Tensor], rows: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(Way(way), torch.randn(rows, 8), functional.cross_entropy, LABELS[:rows])


@pytest.mark.parametrize("way", WAYS)
def test_it_is_kept_exactly(way: str) -> None:
    """Only calls by the full name were noticed: `f = Reverse.apply`, as in torch's tutorial, trained backwards."""
    of = case(WAYS[way])
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "export"
    whole = run(sequence, of)
    assert difference(whole, eager(sequence, of)) == 0
    assert all(same_bits(run(sequence, of, cuts), whole) for cuts in some_cuts(sequence))
    for rows in (1, 3):
        part = Case(of.model, of.sample[:rows], of.loss_fn, LABELS[:rows])
        assert difference(run(sequence, part), eager(sequence, part)) == 0


def test_its_random_numbers_are_the_layers() -> None:
    of = case(lambda _, x: Dropped.apply(x))
    sequence = trace(of.model, of.sample)
    assert any(layer.draws for layer in sequence.layers)
    torch.manual_seed(1)
    expected = eager(sequence, of)
    torch.manual_seed(1)
    assert difference(run(sequence, of, seeded=False), expected) == 0
    whole = run(sequence, of)
    assert all(same_bits(run(sequence, of, cuts), whole) for cuts in some_cuts(sequence))


def test_under_autocast_it_computes_in_half_precision() -> None:
    of = case(lambda self, x: InAutocast.apply(x, self.first.weight))
    sequence = trace(of.model, of.sample, autocast=torch.bfloat16)
    crossing = [value.dtype for boundary in sequence.boundaries for value in boundary]
    assert torch.bfloat16 in crossing


def test_equal_calls_make_equal_layers() -> None:
    """Layers that call it are measured once for all of their kind, and are the same in every process."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Way(WAYS["partial"]), nn.Linear(3, 8)) for _ in range(3)))
    x = torch.randn(4, 8)
    sequence = trace(model, x)
    calling = [layer for layer in sequence.layers if any("custom_function" in name for name in layer.operations)]
    assert len({layer.signature for layer in calling}) < len(calling)
    assert trace(model, x).fingerprint == sequence.fingerprint


def test_it_works_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = Way(WAYS["weight as an argument"])
    sequence = trace(model, torch.zeros(4, 8))
    assert sum(layer.flops for layer in sequence.layers) == 2 * 4 * 8 * (8 + 8 + 3)


def test_memory_is_what_it_keeps() -> None:
    of = case(WAYS["set-up apart"], rows=6)
    sequence = trace(of.model, of.sample)
    cpu = torch.device("cpu")
    inputs = micro_batch(sequence, of.sample, 6, cpu)
    about: dict[str, Any] = {"loss_fn": None, "target": None, "has_loss": False, "device": cpu}
    with fake_runner(sequence, inputs, **about) as runner:
        imitated = layer_memory(sequence, runner)
    real = layer_memory(sequence, real_runner(sequence, ParameterPool(sequence, cpu), inputs, **about))
    assert [entry.kept_bytes for entry in imitated] == [entry.kept_bytes for entry in real]


@fx.wrap
def halved(x: Tensor) -> Tensor:
    return x / 2 if x.sum() > 0 else x


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.way = Way(WAYS["bound at import"])

    def forward(self, x: Tensor) -> Tensor:
        return halved(self.way(x))


def test_symbolic_trace_keeps_it_too() -> None:
    """It follows the forward pass as export does, and comes next where export stumbles, over `halved`."""
    of = case(WAYS["bound at import"])
    of = Case(Wrapped(), of.sample, of.loss_fn, of.target)
    sequence = trace(of.model, of.sample)
    assert sequence.sample.front_end == "symbolic_trace"
    assert difference(run(sequence, of), eager(sequence, of)) == 0


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class OfAModule(torch.autograd.Function):
    """Trains the module behind autograd's back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        return x @ module.weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -gradients[0], None


def of_a_closure(x: Tensor, module: nn.Linear) -> Tensor:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ module.weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return -gradients[0]

    return Local.apply(x)


class Inner(nn.Module):
    def __init__(self, way: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.linear(x), self.linear)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


REFUSED: dict[str, tuple[Callable[[Tensor, nn.Linear], Tensor], str]] = {
    "writes": (lambda x, _: Writing.apply(x * 1), "Writing is .* it writes one of its arguments in place"),
    "numpy": (lambda x, _: ByNumpy.apply(x), "ByNumpy is .* it cannot run on tensors without data"),
    "module": (OfAModule.apply, "OfAModule is .* it takes a Linear"),
    "closure": (of_a_closure, "Local is .* reads a tensor that is not among its arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_operation_may_do_is_refused_and_kept_in_its_module(name: str) -> None:
    way, message = REFUSED[name]
    torch.manual_seed(0)
    model = Around(Inner(way))
    of = Case(model, torch.randn(4, 8), functional.cross_entropy, LABELS[:4])
    with pytest.raises(NotTraceableError, match=rf"(?s)in module 'inner', .*{message}.*keep_together=\['inner'\]"):
        trace(model, by_one("export", of.sample))
    sequence = trace(model, of.sample)
    assert sequence.sample.called_as_is == ("inner",)
    assert difference(run(sequence, of), eager(sequence, of)) == 0
