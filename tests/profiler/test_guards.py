"""Random models that branch on values, and batches of every size of number: the model's own result, or an error."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from profiler import trace
from profiler.errors import ExecutionError
from tests.coverage.fidelity import difference, eager, run
from tests.coverage.model_list import Case

SAMPLE = torch.linspace(-1, 1, 16).reshape(4, 4)
TARGET = torch.tensor([0, 1, 0, 1])

CONDITIONS: dict[str, Callable[[Tensor, float], object]] = {
    "any": lambda x, limit: (x > limit).any(),
    "all": lambda x, limit: (x.abs() < limit).all(),
    "max": lambda x, limit: x.max() > limit,
    "item": lambda x, limit: x.max().item() > limit,
    "sums": lambda x, limit: x[:, :2].sum() > x[:, 2:].sum() + limit,
    "count": lambda x, limit: (x.abs() > limit).sum().item() > 0,
    "equal": lambda x, limit: torch.equal(x.clamp(-limit, limit), x),
    "several": lambda x, limit: x.min() < -limit or x.max() > limit,
}
BRANCHES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "nothing": lambda linear, x: x,
    "a layer": lambda linear, x: linear(x),
    "an operation": lambda linear, x: x * 2,
    "a slice": lambda linear, x: functional.pad(x[:, :2], (0, 2)),
}
Statement = tuple[str, float, str, str]  # condition, limit, and what is done if it holds and if not

STATEMENTS = st.tuples(
    st.sampled_from(sorted(CONDITIONS)),
    st.sampled_from([0.5, 3.0, 50.0]),
    st.sampled_from(sorted(BRANCHES)),
    st.sampled_from([*sorted(BRANCHES), "an error"]),
)


class Drawn(nn.Module):
    """Branches in a row, each after a layer."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in statements)
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in statements)
        self.statements = statements

    def forward(self, x: Tensor) -> Tensor:
        for (condition, limit, yes, no), layer, other in zip(self.statements, self.layers, self.others, strict=True):
            x = layer(x)
            holds = bool(CONDITIONS[condition](x, limit))
            if not holds and no == "an error":
                raise ValueError("refused by the model itself")
            assert isinstance(other, nn.Linear)
            x = BRANCHES[yes if holds else no](other, x)
        return x


def path_of(model: Drawn, x: Tensor) -> tuple[tuple[bool, bool], ...] | None:
    """Which ways the model goes; None where it raises an error."""
    taken = []
    with torch.no_grad():
        for (condition, limit, yes, no), layer, other in zip(model.statements, model.layers, model.others, strict=True):
            x = layer(x)
            goes = bool(CONDITIONS[condition](x, limit))
            taken.append((goes, condition == "several" and bool(x.min() < -limit)))  # each question of a condition
            if not goes and no == "an error":
                return None
            assert isinstance(other, nn.Linear)
            x = BRANCHES[yes if goes else no](other, x)
    return tuple(taken)


@settings(max_examples=8, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=3), st.integers(0, 3))
@example([("several", 0.5, "a layer", "a layer")], 0)
def test_a_result_is_the_models_or_an_error(statements: list[Statement], seed: int) -> None:
    """A batch that goes another way than the sample ends with an error and leaves no gradient."""
    torch.manual_seed(seed)
    model = Drawn(statements)
    way = path_of(model, SAMPLE)
    halves = {path_of(model, part) for part in SAMPLE.split(2)}
    if way is None or halves != {way}:
        return  # of such a sample there is no way for all micro-batches
    sequence = trace(model, SAMPLE)
    assert not sequence.sample.called_as_is
    for scale in (1.0, -0.3, 30.0, -30.0, 1e4):
        of = Case(model, SAMPLE * scale, functional.cross_entropy, TARGET)
        if path_of(model, of.sample) == way:
            assert difference(run(sequence, of), eager(sequence, of)) <= 1e-5
        else:
            with pytest.raises(ExecutionError, match=r"test_guards\.py:\d+ .* in this micro-batch and was "):
                run(sequence, of)
            assert all(parameter.grad is None for parameter in model.parameters())
