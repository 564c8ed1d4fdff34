"""Layers that are written out as one function: the same results, and no value lives longer."""

from itertools import accumulate
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from profiler import LayerSequence, trace
from profiler.run import stage_function
from profiler.run.stage_function import KeptPass, Results, StageFunction, roots_of, run_backward
from profiler.torch_private import allocations_in
from tests.coverage.fidelity import ByNumber

WIDTH = 4


class Steps(nn.Module):
    """Operations of many kinds, one after the other; each takes and returns a tensor of one shape."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)
        self.norm = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in names)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.linear[0](x)
        for number, name in enumerate(self.names):
            x = KINDS[name](self, number, x, first)
        return x


KINDS: dict[str, Any] = {
    "linear": lambda model, number, x, _: model.linear[number](x),
    "tanh": lambda model, number, x, _: torch.tanh(x),
    "in place": lambda model, number, x, _: torch.nn.functional.relu(x * 2, inplace=True),
    "buffer": lambda model, number, x, _: x * model.scale,
    "skip": lambda model, number, x, first: x + 0.5 * first,
    "chunks": lambda model, number, x, _: torch.cat([part.sin() for part in reversed(x.chunk(2, -1))], dim=-1),
    "slices": lambda model, number, x, _: torch.stack([x[:, 1], x[:, 0], x[:, 3], x[:, 2]], 1) + x[:, -1:],
    "turned": lambda model, number, x, _: (x.reshape(-1, 2, 2).transpose(1, 2) * 1.5).reshape(-1, WIDTH),
    "mask": lambda model, number, x, _: torch.where(x > x.mean(-1, keepdim=True, dtype=torch.float64), x, -0.1 * x),
    "largest": lambda model, number, x, _: x * (1 + x.argmax(-1, keepdim=True) % 2),
    "dropout": lambda model, number, x, _: nn.functional.dropout(x, 0.3, model.training),
    "normalized": lambda model, number, x, _: model.norm[number](x),
    "unused": lambda model, number, x, _: x.max(-1, keepdim=True)[0] + x,
}


def apart(way: Any) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(len(way._steps))]


class Stage:
    """All layers of a model as one stage, with gradients of its own."""

    def __init__(self, sequence: LayerSequence) -> None:
        self.sequence = sequence
        self.parameters = {name: own.detach().requires_grad_() for name, own in self.sequence.parameters.items()}
        self.function = StageFunction(
            self.sequence,
            0,
            len(self.sequence),
            {(layer.index, name): self.parameters[name] for layer in self.sequence.layers for name in layer.parameters},
        )

    def forward(self, x: Tensor) -> Results:
        inputs, buffers = {self.function.inputs[0]: x}, dict(self.sequence.buffers)
        return self.function.forward({}, inputs, buffers, seed=ByNumber())

    def train(self, x: Tensor) -> list[Tensor | None]:
        """Outputs and gradients of a pass."""
        results = self.forward(x)
        kept = KeptPass({}, roots_of(results.values))
        run_backward(kept, {name: value.cos() for name, value in results.values.items()})
        gradients = [None if own.grad is None else own.grad.clone() for own in self.parameters.values()]
        return [*results.values.values(), *results.buffers.values(), *gradients]

    @property
    def longest(self) -> int:
        """How many layers are carried out at once."""
        return max(stop - first for way in self.function._ways.values() for first, stop in way._runs())


def longest_alike(names: list[str]) -> int:
    """Four passes are the same in every bit; the most layers at once."""
    torch.manual_seed(1)
    model, x = Steps(names), torch.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH).sin()
    sequence = trace(model, x)
    together, one_by_one = Stage(sequence), Stage(sequence)
    for size in (6, 6, 3, 6):
        found = together.train(x[:size])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_function._Way, "_runs", apart)
            expected = one_by_one.train(x[:size])
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
    return together.longest


def test_layers_of_all_kinds_do_the_same_written_out() -> None:
    plain = [name for name in KINDS if name not in {"dropout", "normalized"}]
    assert longest_alike([*plain, "dropout", "normalized", *plain[:4]]) > 8


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=10))
def test_any_layers_do_the_same_written_out(names: list[str]) -> None:
    longest_alike(names)


@pytest.mark.parametrize("before", ["", "dropout"])
def test_no_value_lives_longer_written_out(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most bytes at a time where nothing is kept for a backward pass, as one by one.

    What a layer by itself made lived until the end of those that are written out after it.
    """
    x = torch.ones(4096, WIDTH)
    names = [before] * bool(before) + ["tanh", "linear", "skip", "slices", "tanh", "buffer"] * 3
    stage = Stage(trace(Steps(names), x))
    stage.train(x)
    assert stage.longest > 8
    most = []
    for _ in range(2):
        with torch.no_grad():
            stage.forward(x)
            _, changes = allocations_in(lambda: stage.forward(x))
        most.append(max(accumulate(changes)))
        monkeypatch.setattr(stage_function._Way, "_runs", apart)
        stage.function._ways.clear()
    written_out, one_by_one = most
    assert written_out <= one_by_one
