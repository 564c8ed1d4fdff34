"""Twenty models that branch on values, each with a sample, and a batch that makes it take the other branch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Body = Callable[["Branching", Tensor], Tensor]


class Branching(nn.Module):
    """Linear layers around a statement that reads values.

    Args:
        body: that statement.
    """

    scale: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.tensor([2.0]))
        self._body = body

    def forward(self, x: Tensor) -> Tensor:
        """From 4 features to 3."""
        return self.last(torch.tanh(self._body(self, self.first(x))))


def truth(model: Branching, x: Tensor) -> Tensor:
    if (x.abs() > 100).any():
        return x * 2
    return x


def comparison(model: Branching, x: Tensor) -> Tensor:
    return model.middle(x) if x.abs().max() < 100 else x


def item(model: Branching, x: Tensor) -> Tensor:
    return model.middle(x) if x.abs().max().item() < 100 else x


def several_items(model: Branching, x: Tensor) -> Tensor:
    low, high = x.min().item(), x.max().item()
    return x / 2 if high - low > 100 else x


def whole_number(model: Branching, x: Tensor) -> Tensor:
    return x[:, :2].repeat(1, 2) if int((x.abs() > 100).sum()) else x


def item_as_a_number(model: Branching, x: Tensor) -> Tensor:
    count = (x.abs() > 100).sum().item()
    return x + 1 if count == 0 else x


def number_as_an_extent(model: Branching, x: Tensor) -> Tensor:
    wide = int((x.abs().amax() > 100).long()) + 1
    return x + functional.pad(x[:, :wide], (0, 4 - wide))


def number_in_a_loop(model: Branching, x: Tensor) -> Tensor:
    for _ in range(int((x.abs().amax() > 100).long()) + 1):
        x = model.middle(x)
    return x


def assertion(model: Branching, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or x.abs().max() > 100:
        raise ValueError("not finite")
    return x


def python_assert(model: Branching, x: Tensor) -> Tensor:
    assert (x.abs() < 100).all(), "too large"
    return model.middle(x)


def comparison_of_tensors(model: Branching, x: Tensor) -> Tensor:
    return x if torch.equal(x.clamp(-100, 100), x) else x / 100


def closeness(model: Branching, x: Tensor) -> Tensor:
    return x if torch.allclose(x.clamp(-100, 100), x) else x / 100


def list_of_numbers(model: Branching, x: Tensor) -> Tensor:
    kept = (x.abs().amax(0) < 100).long().tolist()
    return x * 2 if sum(kept) == 4 else x


def loop(model: Branching, x: Tensor) -> Tensor:
    while x.abs().max() > 100:
        x = x / 1000
    return x


def two_conditions(model: Branching, x: Tensor) -> Tensor:
    if x.min() < -100 or x.max() > 100:
        return x / 10
    return x


def without_gradient(model: Branching, x: Tensor) -> Tensor:
    with torch.no_grad():
        large = bool(x.abs().max() > 100)
    return x if large else model.middle(x)


def region(model: Branching, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = x.mean() if x.abs().max() > 100 else x.amin()
    return x + shift


def after_random_numbers(model: Branching, x: Tensor) -> Tensor:
    x = model.dropout(x)
    return x * 3 if x.abs().max() > 100 else model.middle(x)


def of_a_buffer(model: Branching, x: Tensor) -> Tensor:
    return x * 2 if (model.scale * x.abs().max() > 200).item() else x


def conjunction(model: Branching, x: Tensor) -> Tensor:
    return x if all(column.abs().max() < 100 for column in x.unbind(1)) else x.tanh()


BODIES: Mapping[str, Body] = {
    body.__name__: body
    for body in (
        truth,
        comparison,
        item,
        several_items,
        whole_number,
        item_as_a_number,
        number_as_an_extent,
        number_in_a_loop,
        assertion,
        python_assert,
        comparison_of_tensors,
        closeness,
        list_of_numbers,
        loop,
        two_conditions,
        without_gradient,
        region,
        after_random_numbers,
        of_a_buffer,
        conjunction,
    )
}


def branching(name: str) -> tuple[Branching, Tensor, Tensor, Tensor]:
    """A model, its sample with target, and a batch whose last micro-batch takes the other branch."""
    torch.manual_seed(0)
    model, x, target = Branching(BODIES[name]), torch.randn(8, 4), torch.randint(3, (8,))
    other = x.clone()
    other[-1] = 1e4
    return model, x, target, other


def gradients(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
