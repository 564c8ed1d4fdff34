"""Equal layers are run once, and all shows as if each had been run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from profiler import trace
from profiler.memory import equal_layers
from profiler.memory.in_stage import layer_memory
from profiler.memory.one_layer import observe_forward
from profiler.run.inputs import fake_runner, micro_batch
from tests.models.amoebanet import AmoebaNet
from tests.models.transformer import Translator
from tests.models.unet import UNet
from tests.profiler.conftest import Gpt


def _translator() -> tuple[nn.Module, Any]:
    tokens = torch.randint(3, 32, (3, 10))
    return Translator(32, width=16, heads=2, layers=1, dropout=0.1, longest=16), (tokens, tokens)


def _decoder() -> tuple[nn.Module, Any]:
    """Of three equal blocks."""
    return Gpt(), torch.randint(0, 40, (3, 12))


def _net() -> tuple[nn.Module, Any]:
    return UNet(depth=2, channels=4), torch.randn(3, 3, 16, 16)


@pytest.mark.parametrize("make", [_translator, _decoder, _net])
def test_sharing_changes_nothing(make: Callable[[], tuple[nn.Module, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = make()
    sequence = trace(model, sample)
    inputs = micro_batch(sequence, sample, 3, torch.device("cpu"))
    settings: dict[str, Any] = {"loss_fn": None, "target": None, "has_loss": False, "device": torch.device("cpu")}
    runs: list[object] = []

    def counted(*args: Any) -> Any:
        runs.append(args)
        return observe_forward(*args)

    monkeypatch.setattr(equal_layers, "observe_forward", counted)
    with fake_runner(sequence, inputs, **settings) as runner:
        expected = layer_memory(sequence, runner)
        assert len(runs) == len(sequence)
        runs.clear()
        assert layer_memory(sequence, runner, share=True) == expected
        assert len(runs) < len(sequence) or len({layer.signature for layer in sequence.layers}) == len(sequence)


def test_equal_layers_hand_on_equal_values() -> None:
    """The last cell's concatenation is not read two cells later: what a timed sweep handed on for it had its place."""
    with torch.device("meta"):
        sequence = trace(AmoebaNet(9, 8, 10), torch.randn(2, 3, 64, 64))
    handed_on: dict[str, list[list[int | None]]] = {}
    for layer in sequence.layers:
        sizes = {value.name: value.size_bytes(1) for value in sequence.boundaries[layer.index + 1]}
        handed_on.setdefault(layer.signature, []).append([sizes.get(name) for name in layer.outputs])
    assert len(handed_on) < len(sequence), "some are equal"
    assert all(found == alike[0] for alike in handed_on.values() for found in alike)
