"""More bodies for `hidden_state`: random numbers, hooks, parametrizations, and whatever else a graph may lose."""

from __future__ import annotations

import copy
import functools
import os
import random
import time
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.models import hidden_state
from tests.models.hidden_state import FEATURES, OUTSIDE, hides

# Random numbers.


def either(low: bool, x: Tensor) -> Tensor:
    """One of two results."""
    return x * 0.5 if low else x * 1.5


@hides("random.random", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(random.random() < 0.5, x)


@hides("a factor from random", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * random.choice([0.5, 1.5])


@hides("numpy.random", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(np.random.rand() < 0.5, x)


@hides("a permutation from numpy", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x[:, torch.from_numpy(np.random.permutation(FEATURES))]


@hides("a shuffled list", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    order = list(range(FEATURES))
    random.shuffle(order)
    return x[:, order]


def _own_random(part: Any) -> None:
    part.chance = random.Random(5)


@hides("a Random of the module", _own_random, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(part.chance.random() < 0.5, x)


@hides("a Random of the file", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(OUTSIDE.chance.random() < 0.5, x)


@hides("a numpy Generator of the file", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(OUTSIDE.numpy.random() < 0.5, x)


@hides("a RandomState of the file", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(OUTSIDE.legacy.rand() < 0.5, x)


@hides("a torch Generator of the file", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * torch.rand(FEATURES, generator=OUTSIDE.torch, dtype=x.dtype)


def _random_in_a_closure(part: Any) -> None:
    chance = random.Random(5)
    part.step = lambda x: either(chance.random() < 0.5, x)


@hides("a Random in a closure", _random_in_a_closure, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


def _bound_random(part: Any) -> None:
    part.draw = random.Random(5).random


@hides("a bound method of a Random", _bound_random, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(part.draw() < 0.5, x)


def _bound_global(part: Any) -> None:
    part.draw = functools.partial(random.uniform, 0.0, 1.0)


@hides("a partial of random.uniform", _bound_global, draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(part.draw() < 0.5, x)


@hides("the system's random numbers", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(os.urandom(1)[0] < 128, x)


@hides("the time", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * (1 + time.perf_counter_ns() % 1000 / 1000)


@hides("torch's random numbers", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3) + torch.rand_like(x) + torch.randn(FEATURES, dtype=x.dtype)


@hides("a branch on torch's random number", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return either(bool(torch.rand(()) < 0.5), x)


@hides("a number of torch's random number", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    return x * torch.rand(1).item()


@hides("a seed set inside", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return x * torch.rand(FEATURES, dtype=x.dtype)


@hides("a seed set inside and left", draws=True)
def _(part: Any, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand(FEATURES, dtype=x.dtype)


# Hooks.


def _forward_hook(part: Any) -> None:
    part.linear.register_forward_hook(lambda _m, _a, output: output * 2)


@hides("a forward hook", _forward_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _pre_hook(part: Any) -> None:
    part.linear.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))


@hides("a forward pre-hook", _pre_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _keeping_hook(part: Any) -> None:
    part.linear.register_forward_hook(lambda _m, _a, output: setattr(part, "kept", output))


@hides("a forward hook that keeps", _keeping_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x) + part.kept.tanh()


def _counting_hook(part: Any) -> None:
    calls: list[int] = []

    def count(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return hidden_state.late(len(calls), output)

    part.linear.register_forward_hook(count)


@hides("a forward hook that counts", _counting_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


@hides("a hook on a gradient")
def _(part: Any, x: Tensor) -> Tensor:
    y = part.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


def _backward_hook(part: Any) -> None:
    part.linear.register_full_backward_hook(lambda _m, entering, _l: (entering[0] * 2,))


@hides("a full backward hook", _backward_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _backward_pre_hook(part: Any) -> None:
    part.linear.register_full_backward_pre_hook(lambda _m, leaving: (leaving[0] * 2,))


@hides("a full backward pre-hook", _backward_pre_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _parameter_hook(part: Any) -> None:
    part.linear.weight.register_hook(lambda gradient: gradient * 2)


@hides("a hook on a parameter", _parameter_hook)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _state_hooks(part: Any) -> None:
    def rename(_m: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight of mine"] = state.pop(prefix + "linear.weight")

    part.register_state_dict_post_hook(rename)


@hides("a state-dict hook", _state_hooks)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _extra_state(part: Any) -> None:
    part.linear.get_extra_state = lambda: {"a": 1}
    part.linear.set_extra_state = lambda _: None


@hides("hooks for saved tensors")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y * 2, lambda y: y):
        return part.linear(x).tanh()


# Parametrizations.


class Symmetric(nn.Module):
    """A parametrization that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        """Symmetric."""
        return (weight.triu() + weight.triu(1).mT) * self.scale


@hides("weight norm", lambda part: parametrizations.weight_norm(part.linear))
@hides("spectral norm", lambda part: parametrizations.spectral_norm(part.linear))
@hides("orthogonal", lambda part: parametrizations.orthogonal(part.linear))
@hides("symmetric", lambda part: parametrize.register_parametrization(part.linear, "weight", Symmetric()))
@hides("spectral norm by hooks", lambda part: nn.utils.spectral_norm(part.linear))
@hides("pruned", lambda part: prune.l1_unstructured(part.linear, "weight", 0.3))
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


@hides("cached parametrizations", lambda part: parametrizations.weight_norm(part.linear))
def _(part: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return part.linear(x) + part.linear(x.tanh())


# Calls.


class Calling(nn.Linear):
    """A call of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class CountingCalls(nn.Linear):
    """Counts outside of forward."""

    seen = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.seen += 1
        return hidden_state.late(self.seen, super().__call__(x))


def _calling(part: Any) -> None:
    part.linear = Calling(FEATURES, FEATURES, dtype=torch.float64)


def _counting_calls(part: Any) -> None:
    part.linear = CountingCalls(FEATURES, FEATURES, dtype=torch.float64)


def _own_forward(part: Any) -> None:
    forward = part.linear.forward
    part.linear.forward = lambda x: forward(x) * 2


def _method(part: Any) -> None:
    part.linear.forward = types.MethodType(lambda linear, x: x @ linear.weight, part.linear)


def _compiled(part: Any) -> None:
    part.linear = torch.compile(nn.Sequential(part.linear, nn.Tanh()), backend="eager")


def _compiled_in_place(part: Any) -> None:
    part.linear.compile(backend="eager")


def _scripted(part: Any) -> None:
    part.linear = torch.jit.script(nn.Sequential(part.linear, nn.Tanh()))


def _traced(part: Any) -> None:
    part.linear = torch.jit.trace(part.linear, torch.ones(2, FEATURES, dtype=torch.float64), check_trace=False)


def _symbolic(part: Any) -> None:
    part.linear = torch.fx.symbolic_trace(nn.Sequential(part.linear, nn.Tanh()))


@hides("a call of its own", _calling)
@hides("a call that counts", _counting_calls)
@hides("a forward put on the object", _own_forward)
@hides("a method put on the object", _method)
@hides("a compiled module", _compiled)
@hides("a module compiled in place", _compiled_in_place)
@hides("a scripted module", _scripted)
@hides("a jit-traced module", _traced)
@hides("a symbolically traced module", _symbolic)
def _(part: Any, x: Tensor) -> Tensor:
    return part.linear(x)


def _doubled(x: Tensor) -> Tensor:
    return x.tanh() * 2


def _compiled_function(part: Any) -> None:
    part.step = torch.compile(_doubled, backend="eager")


@hides("a compiled function", _compiled_function)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(part.linear(x))


def _unregistered(part: Any) -> None:
    part.hidden = [nn.Linear(FEATURES, FEATURES, dtype=torch.float64)]


@hides("a module in a list", _unregistered)
def _(part: Any, x: Tensor) -> Tensor:
    return part.hidden[0](x)


def _bound_layer(part: Any) -> None:
    part.steps = [part.linear.forward, functools.partial(functional.linear, weight=part.linear.weight)]


@hides("a parameter in a bound method", _bound_layer)
def _(part: Any, x: Tensor) -> Tensor:
    return part.steps[1](part.steps[0](x))


def _parameter_in_a_closure(part: Any) -> None:
    weight = part.linear.weight
    part.step = lambda x: x @ weight


@hides("a parameter in a closure", _parameter_in_a_closure)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


@hides("a copy of a layer")
def _(part: Any, x: Tensor) -> Tensor:
    return copy.deepcopy(part.linear)(x) + part.linear(x)


@hides("a functional call")
def _(part: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(part.linear, {"weight": part.linear.weight * 2}, (x,))


@hides("a vectorized map")
def _(part: Any, x: Tensor) -> Tensor:
    mapped = torch.vmap(lambda row: row * row.sum())(x)
    assert isinstance(mapped, Tensor)
    return mapped


@hides("a checkpointed layer")
def _(part: Any, x: Tensor) -> Tensor:
    kept = checkpoint(lambda y: functional.dropout(part.linear(y), 0.0), x, use_reentrant=False)
    assert isinstance(kept, Tensor)
    return kept


@hides("another mode inside")
def _(part: Any, x: Tensor) -> Tensor:
    part.linear.train(not part.linear.training)
    return part.linear(x) * (2 if part.linear.training else 1)
