"""Bodies for `hidden_state`: tensors that are no buffers, buffers that are written, and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.models.hidden_state import FEATURES, OUTSIDE, helper, hides, kept_of_value

# Tensors that are no buffers.


def _tensor(part: Any) -> None:
    part.scale = torch.ones(FEATURES, dtype=torch.float64)


@hides("a tensor attribute that is written", _tensor)
def _(part: Any, x: Tensor) -> Tensor:
    part.scale.mul_(1.1)
    return x * part.scale


@hides("a tensor attribute that is replaced", _tensor)
def _(part: Any, x: Tensor) -> Tensor:
    part.scale = part.scale * 1.1
    return x * part.scale


@hides("a tensor attribute that follows the data", _tensor)
def _(part: Any, x: Tensor) -> Tensor:
    y = x * part.scale
    part.scale = 0.5 * part.scale + 0.5 * x.detach().abs().mean(0)
    return y


@hides("a tensor of a helper that is written", helper)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.tensor.mul_(1.1)
    return x * part.helper.tensor


@hides("a tensor of a helper that is replaced", helper)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.tensor = part.helper.tensor * 1.1
    return x * part.helper.tensor


@hides("a tensor of this file that is written")
def _(part: Any, x: Tensor) -> Tensor:
    OUTSIDE.tensor.mul_(1.1)
    return x * OUTSIDE.tensor


def _in_a_list(part: Any) -> None:
    part.tensors = [torch.ones(FEATURES, dtype=torch.float64)]


@hides("a tensor in a list that is written", _in_a_list)
def _(part: Any, x: Tensor) -> Tensor:
    part.tensors[0].mul_(1.1)
    return x * part.tensors[0]


@hides("a tensor in a list that is replaced", _in_a_list)
def _(part: Any, x: Tensor) -> Tensor:
    part.tensors[0] = part.tensors[0] * 1.1
    return x * part.tensors[0]


def _tensor_in_a_closure(part: Any) -> None:
    scale = torch.ones(FEATURES, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        scale.mul_(1.1)
        return x * scale

    part.step = step


@hides("a tensor in a closure that is written", _tensor_in_a_closure)
def _(part: Any, x: Tensor) -> Tensor:
    return part.step(x)


@hides("a buffer that is written")
def _(part: Any, x: Tensor) -> Tensor:
    part.table.mul_(1.01)
    return x * part.table


@hides("a buffer that is replaced")
def _(part: Any, x: Tensor) -> Tensor:
    part.table = part.table * 1.01
    return x * part.table


@hides("a buffer written without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.table.lerp_(x.abs().mean(0), 0.1)
    return x * part.table


@hides("a buffer written through data")
def _(part: Any, x: Tensor) -> Tensor:
    part.table.data.mul_(1.01)
    return x * part.table


@hides("a parameter clamped through data")
def _(part: Any, x: Tensor) -> Tensor:
    part.linear.weight.data.clamp_(-0.2, 0.2)
    return part.linear(x)


@hides("a parameter decayed without gradient")
def _(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.linear.weight.mul_(0.9)
    return part.linear(x)


@hides("the last output is remembered")
def _(part: Any, x: Tensor) -> Tensor:
    last = getattr(part, "last", None)
    y = x if last is None or len(last) != len(x) else x + 0.1 * last
    part.last = y.detach()
    return y


def _lazily(part: Any) -> None:
    part.initialized = False


@hides("scaled by the first data", _lazily)
def _(part: Any, x: Tensor) -> Tensor:
    if not part.initialized:
        part.factor = x.detach().std(0, correction=0) + 1
        part.initialized = True
    return x / part.factor


def _actnorm(part: Any) -> None:
    part.register_buffer("ready", torch.zeros((), dtype=torch.bool))
    part.register_buffer("factor", torch.ones(FEATURES, dtype=torch.float64))


@hides("a buffer set by the first data", _actnorm)
def _(part: Any, x: Tensor) -> Tensor:
    if not part.ready:
        part.factor.copy_(x.detach().abs().mean(0) + 1)
        part.ready.fill_(True)
    return x / part.factor


# Caches.


@hides("a cache by value")
def _(part: Any, x: Tensor) -> Tensor:
    return x * kept_of_value(float(x.detach().abs().sum() > 0.0))


def _cache(part: Any) -> None:
    part.cache = {}


@hides("a cache by shape", _cache)
def _(part: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in part.cache:
        part.cache[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
    return x + part.cache[x.shape[1]]


@hides("a cache of data by shape", _cache)
def _(part: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in part.cache:
        part.cache[x.shape[1]] = x.detach().mean(0)
    return x + part.cache[x.shape[1]]


@hides("a cache of a parameter", _cache)
def _(part: Any, x: Tensor) -> Tensor:
    if "weight" not in part.cache:
        part.cache["weight"] = part.linear.weight.detach().clone()
    return functional.linear(x, part.cache["weight"]) + part.linear(x)


@hides("a cache in a helper", helper)
def _(part: Any, x: Tensor) -> Tensor:
    if not part.helper.history:
        part.helper.history.append(x.detach().mean(0))
    return x + part.helper.history[0]


@hides("a largest number so far", _lazily)
def _(part: Any, x: Tensor) -> Tensor:
    part.most = max(getattr(part, "most", 0.0), float(x.detach().abs().max()))
    return x / (1 + part.most)


@hides("a history in a helper", helper)
def _(part: Any, x: Tensor) -> Tensor:
    part.helper.history.append(x.detach().abs().max().item())
    return x / (1 + sum(part.helper.history[-3:]))
