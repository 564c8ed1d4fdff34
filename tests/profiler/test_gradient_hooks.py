"""Hooks at views of what was written: torch's own way to register one ends the process."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planner import Cluster, autoplan
from profiler.run.layouts import hook_gradient

VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "view": lambda t, d: t.view(-1, *((2, t.shape[-1] // 2) if t.dim() == 2 else (t[0].numel(),))),
    "select": lambda t, d: t.select(d % t.dim(), -1),
    "narrow": lambda t, d: t.narrow(d % t.dim(), 0, (t.shape[d % t.dim()] + 1) // 2),
    "transpose": lambda t, d: t.transpose(0, d % t.dim()),
    "unsqueeze": lambda t, d: t.unsqueeze(d % (t.dim() + 1)),
    "chunk": lambda t, d: t.chunk(2, d % t.dim())[-1],
    "unbind": lambda t, d: t.unbind(d % t.dim())[0],
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul_": lambda t, p: t.mul_(1.5),
    "add_": lambda t, p: t.add_(p),
    "copy_": lambda t, p: t.copy_((p * 2).expand(t.shape)),
    "row_": lambda t, p: t[0].add_(t[-1].clone()),
    "fill_": lambda t, p: t.fill_(0.5),
}
Line = tuple[str, int, int]
LINES = st.tuples(st.sampled_from([*VIEWS, *WRITES, "hook", "hook"]), st.integers(0, 30), st.integers(0, 3))


def run(lines: list[Line], trained: bool, hooked: bool) -> list[Tensor | None]:
    """Gradients of a chain of views and writes; each line's number picks the value from all that there are."""
    base = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8).requires_grad_(trained)
    factor = torch.full((1,), 0.7, dtype=torch.float64, requires_grad=True)
    values = [base.clone()]
    for name, number, dim in lines:
        value = values[-1 - number % len(values)]
        if value.dim() == 0 or 0 in value.shape:
            continue
        if name in VIEWS:
            if name != "view" or (value.is_contiguous() and value.dim() > 1 and value.shape[-1] % 2 == 0):
                values.append(VIEWS[name](value, dim))
        elif name in WRITES:
            WRITES[name](value, factor)
        elif hooked and value.requires_grad:
            hook_gradient(value, torch.clone)
    if hooked:
        for value in values:
            if value.requires_grad:
                hook_gradient(value, torch.clone)
    loss = torch.stack([(value * (1 + number)).sin().sum() for number, value in enumerate(values)]).sum()
    if not loss.requires_grad:
        return []
    loss.backward()
    return [base.grad, factor.grad]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(LINES, min_size=2, max_size=14), st.booleans())
def test_hooks_at_written_views(lines: list[Line], trained: bool) -> None:
    """A hook can be registered at any value at any time, and changes no gradient."""
    try:
        without = run(lines, trained, False)
    except RuntimeError:
        return  # torch refuses the chain itself, such as a write into one of several views that an operation returns
    for plain, hooked in zip(without, run(lines, trained, True), strict=True):
        assert (plain is None) == (hooked is None)
        if plain is not None and hooked is not None:
            torch.testing.assert_close(hooked, plain)


class Scan(nn.Module):
    """A parallel scan's writes into views of views, with the views and what they are of read behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.whole, self.pairs = nn.Linear(4, 32), nn.Linear(32, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        v = y.view(-1, 8, 2, 2)
        v[..., 1].add_(v[..., 0])
        w = v[..., 1]
        w[:, :, 1].add_(w[:, :, 0])
        out: Tensor = self.whole(torch.tanh(y)) + self.pairs(v).mean((1, 2)) + self.pairs(w).mean(1)
        return out


class OneOfTwo(nn.Module):
    """An operation with two results, one of which only an output that the loss does not use is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.first(x).view(-1, 2, 4).unbind(1)
        return self.last(left), self.last(torch.tanh(right))


@pytest.mark.parametrize("model", [Scan(), OneOfTwo()])
def test_planning_looks_at_written_views(model: nn.Module) -> None:
    """Planning such a model ended the process: the computation of its memory registered a hook in torch's way."""
    plan = autoplan(
        model,
        torch.randn(8, 4),
        devices=Cluster.of("T4"),
        batch_size=8,
        loss_fn=lambda output, target: ((output[0] if isinstance(output, tuple) else output) - target).pow(2).mean(),
        target=torch.zeros(8, 1),
        cache=False,
    )
    assert plan.K == 1
