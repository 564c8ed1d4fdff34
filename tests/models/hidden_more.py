"""Bodies for `hidden_state`: what people write that nobody had listed, from hooks to functional transforms."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, rnn

from tests.models.hidden_state import FEATURES, OFTEN, hides

F64 = torch.float64


def linear() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES, dtype=F64)


# Hooks and calls.


def _buffer_hook(part: Any) -> None:
    part.register_buffer("passes", torch.zeros((), dtype=F64))

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        part.passes += 1
        return output * part.passes

    part.linear.register_forward_hook(hook)


@hides("a buffer counted by a hook", _buffer_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _mean_hook(part: Any) -> None:
    part.register_buffer("mean", torch.zeros(FEATURES, dtype=F64))

    def hook(module: Any, args: Any) -> None:
        part.mean.lerp_(args[0].detach().mean(0), 0.1)

    part.linear.register_forward_pre_hook(hook)


@hides("a mean moved by a hook before", _mean_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) - part.mean


def _once_hook(part: Any) -> None:
    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * 2

    handle = part.linear.register_forward_hook(hook)


@hides("a hook that removes itself", _once_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _two(part: Any) -> None:
    part.second = linear()


@hides("submodules that swap", _two)
def _(part: Any, x: Tensor) -> Tensor:
    part.linear, part.second = part.second, part.linear
    return part.linear(x)


@hides("a submodule chosen by the training mode", _two)
def _(part: Any, x: Tensor) -> Tensor:
    part.chosen = part.second if part.training else part.linear
    return part.chosen(x)


class Called(nn.Linear):
    """Counts by its own way to be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Doubled from some call on."""
        self.times = getattr(self, "times", 0) + 1
        return super().__call__(*args, **kwargs) * (2 if self.times > OFTEN else 1)


def _called(part: Any) -> None:
    part.own = Called(FEATURES, FEATURES, dtype=F64)


@hides("a way to be called of its own", _called)
def _(part: Any, x: Tensor) -> Tensor:
    return part.own(x)


# Attributes by other means.


class Counting:
    """A descriptor that counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __get__(self, owner: Any, kind: Any) -> float:
        self.reads += 1
        return 2.0 if self.reads > 2 * OFTEN else 1.0


class Described(nn.Module):
    """Has one."""

    factor = Counting()

    def __init__(self) -> None:
        super().__init__()
        type(self).__dict__["factor"].reads = 0

    def forward(self, x: Tensor) -> Tensor:
        """Times the factor."""
        return x * self.factor


def _described(part: Any) -> None:
    part.inner = Described()


@hides("a descriptor that counts", _described)
def _(part: Any, x: Tensor) -> Tensor:
    return part.inner(x)


class Proper(nn.Module):
    """A property that changes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    @property
    def factor(self) -> float:
        """Grows."""
        self._step += 1
        return 1 + self._step / 10

    def forward(self, x: Tensor) -> Tensor:
        """Times the factor."""
        return x * self.factor


def _proper(part: Any) -> None:
    part.inner = Proper()


@hides("a property that counts", _proper)
def _(part: Any, x: Tensor) -> Tensor:
    return part.inner(x)


class Wrapping(nn.Module):
    """Hands all on to what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """Of what it wraps, counted."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            self.seen[name] = self.seen.get(name, 0) + 1
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        """By the inner weight, doubled after many reads."""
        return functional.linear(x, self.weight) * (2 if self.seen["weight"] > 3 * OFTEN else 1)


def _wrapping(part: Any) -> None:
    part.outer = Wrapping(linear())


@hides("attributes of what it wraps", _wrapping)
def _(part: Any, x: Tensor) -> Tensor:
    return part.outer(x)


class Node:
    """Something to be referred to."""

    factor = 1.0


def _weak(part: Any) -> None:
    part.node = Node()
    part.weak = weakref.ref(part.node)


@hides("a weak reference", _weak)
def _(part: Any, x: Tensor) -> Tensor:
    part.weak().factor += 0.25
    return x * part.weak().factor


def _weak_owner(part: Any) -> None:
    part.table_of = weakref.WeakKeyDictionary({part.linear: 0})


@hides("a counter in a weak dictionary", _weak_owner)
def _(part: Any, x: Tensor) -> Tensor:
    part.table_of[part.linear] += 1
    return x * (2 if part.table_of[part.linear] > OFTEN else 1)


class Grows(dict):  # type: ignore[type-arg]
    """A dict of somebody's."""


def _grows(part: Any) -> None:
    part.memory = Grows(calls=0)


@hides("a counter in a dict of its own class", _grows)
def _(part: Any, x: Tensor) -> Tensor:
    part.memory["calls"] += 1
    return x * (2 if part.memory["calls"] > OFTEN else 1)


class Stack(list):  # type: ignore[type-arg]
    """A list of somebody's."""


def _stack(part: Any) -> None:
    part.stack = Stack([1.0])


@hides("a list of its own class that grows", _stack)
def _(part: Any, x: Tensor) -> Tensor:
    part.stack.append(part.stack[-1] + 0.1)
    return x * part.stack[-1]


class Makes(OrderedDict):  # type: ignore[type-arg]
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def _registry(part: Any) -> None:
    part.registry = Makes(tanh=nn.Tanh, broken=_cannot_be_made)


def _cannot_be_made() -> Any:
    raise AssertionError("nobody asked for it")


@hides("a registry that makes what it is asked for", _registry)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = part.registry["tanh"](x)
    return result


# Caches.


@functools.lru_cache
def mask_of(size: int) -> Tensor:
    """By a shape."""
    return torch.ones(size, dtype=F64).cumsum(0)


@hides("a cache by shapes")
def _(part: Any, x: Tensor) -> Tensor:
    return x * mask_of(x.shape[-1])


@functools.lru_cache
def doubled(x: Tensor) -> Tensor:
    """By a tensor's identity."""
    return x * 2


@hides("a cache by tensors")
def _(part: Any, x: Tensor) -> Tensor:
    return doubled(part.table) + x


@functools.lru_cache
def scaled(value: float) -> float:
    """By a value."""
    return value * 3


@hides("a cache by a rounded value")
def _(part: Any, x: Tensor) -> Tensor:
    return x * scaled(round(float(x.detach().abs().mean()), 1))


class Lazily(nn.Module):
    """A cached property made of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    @functools.cached_property
    def norm(self) -> Tensor:
        """Of the weights at the first call."""
        return self.linear.weight.detach().norm()

    def forward(self, x: Tensor) -> Tensor:
        """Divided by it."""
        return self.linear(x) / self.norm


def _lazily(part: Any) -> None:
    part.inner = Lazily()


@hides("a property cached from weights", _lazily)
def _(part: Any, x: Tensor) -> Tensor:
    return part.inner(x)


# Functional transforms.


@hides("vmap")
def _(part: Any, x: Tensor) -> Tensor:
    return torch.vmap(part.linear)(x)


@hides("vmap with random numbers", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: functional.dropout(part.linear(row), 0.3), randomness="different")(x)


@hides("a gradient by torch.func")
def _(part: Any, x: Tensor) -> Tensor:
    return x - 0.1 * torch.func.grad(lambda value: part.linear(value).square().sum())(x)


@hides("a Jacobian's product")
def _(part: Any, x: Tensor) -> Tensor:
    value, change, *_ = torch.func.jvp(part.linear, (x,), (torch.ones_like(x),))
    return value + change


@hides("called with other parameters")
def _(part: Any, x: Tensor) -> Tensor:
    others = {name: parameter * 0.5 for name, parameter in part.linear.named_parameters()}
    return torch.func.functional_call(part.linear, others, (x,))


@hides("an ensemble stacked", _two)
def _(part: Any, x: Tensor) -> Tensor:
    stacked = torch.stack([part.linear.weight, part.second.weight])
    return torch.einsum("kij,nj->kni", stacked, x).mean(0)


@hides("a penalty on gradients")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        value = part.linear(y)
        (gradient,) = torch.autograd.grad(value.sum(), y, create_graph=True)
    return value + gradient.square().sum(-1, keepdim=True)


@hides("a step inside", _two)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = part.second.weight.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(functional.linear(x.detach(), weight).square().mean(), weight)
    return functional.linear(x, part.second.weight - 0.1 * gradient)


# Parametrizations, lazy and normalized weights.


class Halved(nn.Module):
    """A parametrization that counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=F64))

    def forward(self, weight: Tensor) -> Tensor:
        """Less with each call."""
        if self.training:
            self.calls += 1
        return weight / self.calls.clamp(min=1)


def _halved(part: Any) -> None:
    parametrize.register_parametrization(part.linear, "weight", Halved())


@hides("a parametrization that counts", _halved)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _spectral(part: Any) -> None:
    parametrizations.spectral_norm(part.linear)


@hides("spectral norm while it trains", _spectral)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _orthogonal(part: Any) -> None:
    parametrizations.orthogonal(part.linear)


@hides("orthogonal weights", _orthogonal)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


@hides("parametrized and cached", _halved)
def _(part: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return part.linear(x) + part.linear(x * 2)


def _lazy(part: Any) -> None:
    part.inner = nn.LazyLinear(FEATURES, dtype=F64)


@hides("a lazy layer", _lazy)
def _(part: Any, x: Tensor) -> Tensor:
    return part.inner(x)


def _clamped(part: Any) -> None:
    part.scale = nn.Parameter(torch.full((FEATURES,), 2.0, dtype=F64))


@hides("a parameter clamped in the call", _clamped)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.scale.clamp_(0.5, 1.5)
    return x * part.scale


@hides("a weight tied through a buffer")
def _(part: Any, x: Tensor) -> Tensor:
    part.table = part.linear.weight.detach().mean(0)
    return part.linear(x) + part.table


@hides("weights averaged in the call", _two)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, fast in zip(part.second.parameters(), part.linear.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return part.linear(x) + part.second(x).detach()


def _average(part: Any) -> None:
    part.register_buffer("slow", part.linear.weight.detach().clone())


@hides("a buffer that averages weights", _average)
def _(part: Any, x: Tensor) -> Tensor:
    if part.training:
        part.slow.lerp_(part.linear.weight.detach(), 0.1)
    return part.linear(x) + functional.linear(x, part.slow)


# Layers of torch.


def _attention(part: Any) -> None:
    part.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True, dropout=0.0, dtype=F64)


@hides("attention with masks", _attention)
def _(part: Any, x: Tensor) -> Tensor:
    tokens = x.unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype).view(1, 3, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
    padding = torch.zeros(len(x), 3, dtype=torch.bool)
    padding[:, -1] = True
    y, weights = part.attention(tokens, tokens, tokens, attn_mask=causal, key_padding_mask=padding)
    return torch.tanh(y.sum(1)) + weights.sum()


@hides("attention masked by values", _attention)
def _(part: Any, x: Tensor) -> Tensor:
    tokens = x.unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype).view(1, 3, 1)
    padding = torch.stack([torch.zeros(len(x), dtype=torch.bool), x[:, 0] > 0, x[:, 1] > 0], 1)
    return part.attention(tokens, tokens, tokens, key_padding_mask=padding)[0].mean(1)


def _gru(part: Any) -> None:
    part.gru = nn.GRU(FEATURES, FEATURES, batch_first=True, dtype=F64)


@hides("packed sequences", _gru)
def _(part: Any, x: Tensor) -> Tensor:
    tokens = x.unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype).view(1, 3, 1)
    lengths = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    packed = rnn.pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False)
    y, _ = rnn.pad_packed_sequence(part.gru(packed)[0], batch_first=True, total_length=3)
    return y.sum(1)


@hides("a hidden state carried on", _gru)
def _(part: Any, x: Tensor) -> Tensor:
    y, state = part.gru(x.unsqueeze(1), getattr(part, "state", None))
    part.state = state.detach()
    return y.squeeze(1)


def _instance(part: Any) -> None:
    part.norm = nn.InstanceNorm1d(2, track_running_stats=True, affine=True, dtype=F64)


@hides("instance normalization that tracks", _instance)
def _(part: Any, x: Tensor) -> Tensor:
    return part.norm(x.view(-1, 2, 3)).reshape(-1, FEATURES)


@hides("alpha dropout", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return functional.alpha_dropout(part.linear(x), 0.2, training=True)


@hides("gumbel softmax", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return functional.gumbel_softmax(part.linear(x), hard=True)


@hides("a permutation", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)[:, torch.randperm(FEATURES)]


@hides("a sample of a distribution", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(part.linear(x), 0.5).rsample()


@hides("random leaky rectifier", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return functional.rrelu(part.linear(x), training=True)


# Custom functions.


class Twice(torch.autograd.Function):
    """Asks which gradients are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """A product."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Only those."""
        x, weight = ctx.saved_tensors
        first = gradients[0] @ weight.T if ctx.needs_input_grad[0] else None
        return first, x.T @ gradients[0] * 2 if ctx.needs_input_grad[1] else None


@hides("a function that asks what is needed")
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Twice.apply(x, part.linear.weight)
    return result


class Keeps(torch.autograd.Function):
    """Keeps something on the class from one call to the next."""

    last = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Plus the mean of the gradient before."""
        found = gradients[0] + Keeps.last
        Keeps.last = float(gradients[0].mean())
        return found


def _keeps(part: Any) -> None:
    Keeps.last = 0.0


@hides("a function that keeps something in its backward pass", _keeps)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Keeps.apply(part.linear(x))
    return result


class Adds(torch.autograd.Function):
    """Writes a buffer in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        """The same."""
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """And counts."""
        ctx.seen.add_(gradients[0].abs().mean())
        return gradients[0] * (1 + ctx.seen), None


def _adds(part: Any) -> None:
    part.register_buffer("seen", torch.zeros((), dtype=F64))


@hides("a buffer written in a backward pass", _adds)
def _(part: Any, x: Tensor) -> Tensor:
    result: Tensor = Adds.apply(part.linear(x), part.seen)
    return result


class Marked(torch.autograd.Function):
    """Returns a value and a mask without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """Both."""
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Through the mask."""
        return gradients[0] * ctx.saved_tensors[0]


@hides("a function with a mask")
def _(part: Any, x: Tensor) -> Tensor:
    y, mask = Marked.apply(part.linear(x))
    return y + mask.to(y.dtype)


# Values.


@hides("written through views")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    y[:, ::2].mul_(2)
    y.view(-1)[:3].add_(1)
    y.t()[0].tanh_()
    return y


@hides("a view written after its base")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    half = y[:, :3]
    y.mul_(2)
    half.add_(1)
    return y * half.sum()


@hides("complex numbers")
def _(part: Any, x: Tensor) -> Tensor:
    z = torch.complex(part.linear(x), x)
    return torch.fft.ifft(torch.fft.fft(z) * 0.5).abs()


@hides("complex pairs")
def _(part: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(part.linear(x).view(-1, 3, 2).contiguous())
    return torch.view_as_real(z * z.conj().exp()).flatten(1)


@hides("a sparse product")
def _(part: Any, x: Tensor) -> Tensor:
    eye = torch.eye(FEATURES, dtype=x.dtype).to_sparse()
    return torch.sparse.mm(eye, part.linear(x).t()).t()


@hides("nested tensors")
def _(part: Any, x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor([row[: 1 + i % 3] for i, row in enumerate(part.linear(x))])
    return nested.to_padded_tensor(0.0, (len(x), FEATURES))


@dataclass
class Pair:
    """Two values."""

    first: Tensor
    second: Tensor


@hides("a dataclass inside")
def _(part: Any, x: Tensor) -> Tensor:
    pair = Pair(part.linear(x), x)
    pair.first = pair.first * 2
    return pair.first + pair.second


Named = namedtuple("Named", "first second")


@hides("a named tuple that is kept")
def _(part: Any, x: Tensor) -> Tensor:
    before = getattr(part, "pair", None)
    part.pair = Named(x.detach().mean(), 1)
    return x if before is None else x + before.first


def parts_of(part: Any) -> Iterator[nn.Module]:
    """A generator of modules."""
    yield part.linear
    yield part.second


@hides("modules from a generator", _two)
def _(part: Any, x: Tensor) -> Tensor:
    for module in parts_of(part):
        x = module(x)
    return x


@hides("a module made in the call")
def _(part: Any, x: Tensor) -> Tensor:
    norm = nn.LayerNorm(FEATURES, dtype=x.dtype)
    return norm(part.linear(x))


@hides("a random module made in the call", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return nn.Linear(FEATURES, FEATURES, dtype=x.dtype)(x) + part.linear(x)


@hides("an index of values")
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)[:, x.detach().mean(0).argsort()]


@hides("a mask that selects")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    kept = y[y > 0]
    return y + kept.sum() / max(len(kept), 1)


@hides("numbers formatted")
def _(part: Any, x: Tensor) -> Tensor:
    return x * float(f"{x.detach().abs().mean().item():.1f}")


@hides("an array as a buffer")
def _(part: Any, x: Tensor) -> Tensor:
    part.array = np.append(getattr(part, "array", np.zeros(1)), 1.0)
    return x * float(part.array.sum())


@hides("an optimizer inside", _two)
def _(part: Any, x: Tensor) -> Tensor:
    if not hasattr(part, "inner"):
        part.inner = [torch.optim.SGD(part.second.parameters(), lr=0.1)]
    with torch.enable_grad():
        part.second(x.detach()).square().mean().backward()
    part.inner[0].step()
    part.inner[0].zero_grad()
    return part.linear(x) + part.second(x).detach()


@hides("the gradient's mode kept")
def _(part: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = part.linear(x)
    torch.set_grad_enabled(True)
    return x + y


@hides("a default type that changes")
def _(part: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    y = x + torch.ones(FEATURES)
    torch.set_default_dtype(torch.float32)
    return y


@hides("a grown batch")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(torch.cat([x, x.flip(0)]))
    return y[: len(x)] + y[len(x) :]


@hides("samples mixed", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample().to(x.dtype)
    return part.linear(share * x + (1 - share) * x[torch.randperm(len(x))])


@hides("sums over the batch")
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) - x.mean(0, keepdim=True)
