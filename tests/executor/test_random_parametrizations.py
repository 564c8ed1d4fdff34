"""Random parametrizations of random modules, with values and on the meta device, where `Pipeline` makes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from executor import Pipeline
from profiler import trace
from tests.executor.conftest import _plan as plan_for
from tests.executor.trials_of_models import M, check


class Scaled(nn.Module):
    """With a buffer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Tensor
        self.register_buffer("factor", torch.empty(1, dtype=torch.float64))
        self.gain = nn.Parameter(torch.empty(1, dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Twice what it is given."""
        nn.init.constant_(self.factor, 2.0)
        nn.init.ones_(self.gain)

    def forward(self, original: Tensor) -> Tensor:
        return original * self.factor * self.gain

    def right_inverse(self, value: Tensor) -> Tensor:
        """Of the factor alone."""
        return value / 2.0


class InParts(nn.Module):
    """Of two originals."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Unequal parts."""
        return value * 0.25, value * 0.75


class Bounded(nn.Module):
    """Without an inverse."""

    def forward(self, original: Tensor) -> Tensor:
        return torch.tanh(original)


class Counting(nn.Module):
    """Moves its buffer each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Tensor
        self.register_buffer("number", torch.empty(1, dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """From the beginning."""
        nn.init.zeros_(self.number)

    def forward(self, original: Tensor) -> Tensor:
        with torch.no_grad():
            self.number.add_(1.0)
        return original * (1 + 0.01 * self.number)

    def right_inverse(self, value: Tensor) -> Tensor:
        """As if it had not been asked."""
        return value


HOW: Mapping[str, Callable[[nn.Module, str], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm by the last dimension": lambda module, name: parametrizations.weight_norm(module, name, dim=-1),
    "scaled": lambda module, name: register_parametrization(module, name, Scaled()),
    "in parts": lambda module, name: register_parametrization(module, name, InParts()),
    "bounded": lambda module, name: register_parametrization(module, name, Bounded()),
    "counting": lambda module, name: register_parametrization(module, name, Counting()),
    "orthogonal": parametrizations.orthogonal,  # looks at values
    "spectral_norm": parametrizations.spectral_norm,  # has buffers without an initializer
}
ON_META = [name for name in HOW if name not in ("orthogonal", "spectral_norm")]
AS_BEFORE = ("weight_norm", "weight_norm by the last dimension", "scaled", "in parts")  # the weight is what it was

MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
}


class Model(nn.Module):
    """Modules one after the other, some of which are parametrized."""

    def __init__(self, kinds: list[str], how: Mapping[int, str], device: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        with torch.device(device):
            self.layers = nn.ModuleList(MODULES[kind]().double() for kind in kinds)
            for position, name in how.items():
                HOW[name](self.layers[position], _weight(kinds[position]))
            self.leave = nn.Linear(4, 2).double()
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "conv":
                x = torch.tanh(layer(x.transpose(1, 2)).transpose(1, 2))
            else:
                x = layer(x)[0] if kind == "gru" else torch.tanh(layer(x)) + x
        return self.leave(x.mean(1))


def _weight(kind: str) -> str:
    return "weight_hh_l0" if kind == "gru" else "weight"


def trained(seed: int, *, on_meta: bool) -> None:
    chance = random.Random(seed)
    kinds = [chance.choice([*MODULES]) for _ in range(3)]
    how: dict[int, str] = {}
    for position in chance.sample(range(3), 2):
        known = [name for name in (ON_META if on_meta else HOW) if kinds[position] != "gru" or name in AS_BEFORE]
        how[position] = chance.choice(known)  # a recurrent network asks for its weight more than once in a call
    x = torch.cos(torch.arange(6 * 3 * 4, dtype=torch.float64) * 1.7).reshape(6, 3, 4)
    y = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    if not on_meta:
        check(lambda: Model(kinds, how, "cpu"), x, y, chance, within=1e-9)
        return

    def plain() -> nn.Module:
        """With the values that a pipeline makes, which are those of the same modules without parametrizations."""
        made = [values_of(Model(kinds, parts, "meta"), x) for parts in (how, {})]
        model = Model(kinds, how, "cpu")
        model.load_state_dict(made[0])
        for position, name in how.items():
            if name in AS_BEFORE and kinds[position] != "gru":  # which fills its weights in the order that it has
                own = f"layers.{position}.{_weight(kinds[position])}"
                torch.testing.assert_close(
                    model.get_submodule(f"layers.{position}").weight, made[1][own], rtol=1e-9, atol=0.0
                )
        model.load_state_dict(made[0])  # a look at a weight may count
        return model

    check(lambda: Model(kinds, how, "meta"), x, y, chance, within=1e-9, plain=plain)


def values_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    sequence = trace(model, x, progress=False)
    plan = plan_for(sequence, [], batch_size=len(x), micro_batches=M)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    return {name: value.clone() for name, value in pipe.state_dict().items()}


@pytest.mark.parametrize("how", [*HOW])
def test_each_trains_on_after_it_was_evaluated(how: str) -> None:
    """What a layer passes on may be a parameter as it is: nothing of ours may stay on it from step to step."""
    model = Model(["linear", "linear"], {1: how}, "cpu")
    x, y = torch.ones(6, 3, 4, dtype=torch.float64), torch.ones(6, 2, dtype=torch.float64)
    sequence = trace(model, x, progress=False)
    plan = plan_for(sequence, [1], batch_size=len(x), micro_batches=M)
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    for _ in range(2):
        pipe.step(x, target=y)
        pipe.evaluate(x, target=y)
    assert [name for name, held in model.named_parameters() if held._backward_hooks] == []


@pytest.mark.parametrize(("seed", "on_meta"), [(100, False), (101, True)])
def test_some(seed: int, *, on_meta: bool) -> None:
    trained(seed, on_meta=on_meta)


@pytest.mark.slow
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_more(seed: int, *, on_meta: bool) -> None:
    trained(seed, on_meta=on_meta)
