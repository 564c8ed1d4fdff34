"""Gradients' memory layouts: brought into those of their values, and watched no longer than it takes to know them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler import LayerSequence, trace
from profiler.run.stage_function import KeptPass, StageFunction, roots_of, run_backward


class Transposed(nn.Module):
    """The gradient of the first layer's output comes transposed, other gradients as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(2, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.relu(self.first(x)).transpose(1, 2)
        out: Tensor = self.third(torch.tanh(self.second(turned)))
        return out


def stage_of(model: nn.Module, sequence: LayerSequence) -> StageFunction:
    named = dict(model.named_parameters())
    return StageFunction(
        sequence,
        0,
        len(sequence),
        {(layer.index, name): named[name] for layer in sequence.layers for name in layer.parameters},
    )


def train(stage: StageFunction, x: Tensor) -> None:
    values = stage.forward({}, {stage.inputs[0]: x}, {}).values
    run_backward(KeptPass({}, roots_of(values)), {name: torch.ones_like(value) for name, value in values.items()})


@pytest.mark.parametrize(
    ("model", "astray"), [(Transposed(), True), (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), False)]
)
def test_known_layouts_are_not_watched(model: nn.Module, astray: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 2, 4)
    stage = stage_of(model, trace(model, x))
    watched: list[Tensor] = []
    register = Tensor.register_hook

    def noted(value: Tensor, hook: Any) -> Any:
        watched.append(value)
        return register(value, hook)

    monkeypatch.setattr(Tensor, "register_hook", noted)
    counts, gradients = [], []
    for size in (3, 3, 3, 2, 3):
        watched.clear()
        model.zero_grad()
        train(stage, x[:size])
        counts.append(len(watched))
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    first, second, third, smaller, again = counts
    assert first > second == third == again, "a second pass watches only what came astray in the first"
    assert (second > 0) == astray
    assert smaller == first, "another shape is watched anew"
    for others in gradients[1:3] + gradients[4:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))
