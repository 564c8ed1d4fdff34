"""Bytes of stages from bytes of layers: against loops that say what is meant, and against real runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

from planner.cost.stage_bytes import StageBytes
from profiler import trace
from profiler.memory.in_stage import layer_memory
from profiler.record import InStage, LayerCost
from profiler.run.inputs import fake_runner, micro_batch
from profiler.run.loss import LossFunction
from tests.models.densenet import DenseNet
from tests.models.tracked import CPU, run_stages, stage_bytes
from tests.models.transformer import Translator
from tests.models.unet import UNet

LAYERS = 4


@st.composite
def costs(draw: st.DrawFn) -> list[LayerCost]:
    """Layers with every kind of entry."""
    number = st.integers(0, 9)

    def towards(layers: range) -> tuple[tuple[int, int], ...]:
        return tuple((layer, draw(number)) for layer in layers if draw(st.booleans()))

    found = []
    for layer in range(LAYERS):
        carried, repeated = towards(range(layer + 1, LAYERS)), towards(range(layer))
        passing = towards(range(layer + 1, LAYERS + 1))
        held = draw(number)
        own = held + draw(number) + sum(b for _, b in repeated)
        in_stage = InStage(
            carried_bytes=carried,
            repeated_bytes=repeated,
            held_bytes=held,
            forward_bytes=draw(number),
            waiting_bytes=towards(range(LAYERS)),  # of a later layer where it writes in place
            prelude_bytes=towards(range(layer, LAYERS)),
            prelude_peak_bytes=draw(number),
            passing_bytes=passing,
            backward_bytes=draw(number) + sum(b for _, b in passing),
            last_backward_bytes=draw(number),
            returning_bytes=towards(range(layer + 1, LAYERS + 1)),
            made_bytes=towards(range(layer + 1, LAYERS + 1)),
            leaf_bytes=tuple(
                (earlier, later, later + 1, size)
                for earlier, size in towards(range(layer))
                for later, _ in towards(range(layer + 1, LAYERS))
            ),
            copied_bytes=towards(range(layer)),
            workspace_bytes=draw(number),
        )
        found.append(
            LayerCost(
                layer=layer,
                micro_batch_size=1,
                device_kind="a",
                forward_s=0.0,
                recompute_s=0.0,
                backward_s=0.0,
                spread=0.0,
                kept_bytes=own + sum(b for _, b in carried),
                transient_bytes=0,
                in_stage=in_stage,
                output_bytes=0,
                output_gradient_bytes=0,
            )
        )
    return found


def _entry(cost: LayerCost) -> InStage:
    assert cost.in_stage is not None
    return cost.in_stage


def _kept(layers: list[LayerCost], first: int, stop: int) -> int:
    total = 0
    for layer in range(first, stop):
        entry = _entry(layers[layer])
        total += layers[layer].kept_bytes - sum(b for later, b in entry.carried_bytes if later >= stop)
        total -= sum(b for earlier, b in entry.repeated_bytes if earlier >= first)
    return total


def _most(layers: list[LayerCost], first: int, stop: int) -> int:
    held = sum(_entry(layers[layer]).held_bytes for layer in range(first, stop))
    passing = sum(b for reader, b in _entry(layers[first - 1]).returning_bytes if reader >= stop) if first else 0
    most = 0
    for layer in range(first, stop):
        entry = _entry(layers[layer])
        there = _kept(layers, first, layer + 1) + entry.workspace_bytes
        there += held - sum(_entry(layers[before]).held_bytes for before in range(first, layer + 1))
        forward = entry.forward_bytes + sum(b for creator, b in entry.waiting_bytes if creator >= first)
        forward += sum(b for reader, b in entry.prelude_bytes if reader < stop)
        received = entry.last_backward_bytes + sum(b for maker, b in entry.made_bytes if maker < stop)
        outside = sum(b for maker, b in entry.passing_bytes if maker >= stop)
        backward = min(entry.backward_bytes - outside, received) + passing
        backward += sum(b for earlier, later, maker, b in entry.leaf_bytes if earlier < first and later < stop <= maker)
        backward += sum(b for creator, b in entry.copied_bytes if creator < first)
        most = max(most, there + max(forward, backward), entry.prelude_peak_bytes)
    return most


@given(costs())
@settings(max_examples=40)
def test_ranges_are_what_loops_say(layers: list[LayerCost]) -> None:
    found = StageBytes.of(layers)
    kept = found.kept()
    most = found.most(kept)
    for first in range(LAYERS):
        for stop in range(first + 1, LAYERS + 1):
            assert kept[first, stop] == _kept(layers, first, stop)
            assert most[first, stop] == _most(layers, first, stop)


def test_without_more_detail_layers_add_up() -> None:
    layers = [
        LayerCost(
            layer=index,
            micro_batch_size=1,
            device_kind="a",
            forward_s=0.0,
            recompute_s=0.0,
            backward_s=0.0,
            spread=0.0,
            kept_bytes=kept,
            transient_bytes=transient,
            output_bytes=0,
            output_gradient_bytes=0,
        )
        for index, (kept, transient) in enumerate([(5, 9), (7, 1)])
    ]
    found = StageBytes.of(layers)
    assert found.kept()[0].tolist() == [0, 5, 12]
    assert found.most(found.kept())[0].tolist() == [0, 14, 14]


def _translator() -> tuple[nn.Module, Any, LossFunction, Any]:
    tokens = torch.randint(3, 32, (3, 10))
    model = Translator(32, width=16, heads=2, layers=1, dropout=0.1, longest=16)
    return (
        model,
        (tokens, tokens),
        lambda logits, target: functional.cross_entropy(logits.flatten(0, 1), target),
        (tokens.flatten()),
    )


def _images(model: nn.Module, target: Any) -> tuple[nn.Module, Any, LossFunction, Any]:
    return model, torch.randn(3, 3, 16, 16), functional.cross_entropy, target


@pytest.mark.parametrize(
    "make",
    [
        _translator,
        lambda: _images(UNet(depth=2, channels=4), torch.randint(2, (3, 16, 16))),
        lambda: _images(DenseNet(growth=4, blocks=(2, 2), num_classes=5), torch.randint(5, (3,))),
    ],
    ids=["translator", "U-Net", "DenseNet"],
)
def test_no_stage_holds_more_than_predicted(make: Callable[[], tuple[nn.Module, Any, LossFunction, Any]]) -> None:
    """Exactly what is kept; and at most what is predicted, for stages of every length."""
    torch.manual_seed(0)
    model, sample, loss_fn, target = make()
    sequence = trace(model, sample)
    inputs = micro_batch(sequence, sample, 3, CPU)
    with fake_runner(sequence, inputs, loss_fn=loss_fn, target=target, has_loss=True, device=CPU) as runner:
        predicted = stage_bytes(layer_memory(sequence, runner))
    predicted = replace(predicted, workspace_bytes=0 * predicted.workspace_bytes)
    kept = predicted.kept()
    most = predicted.most(kept)
    layers = len(sequence)
    over = []
    for step in (2, 5, layers):
        bounds = [*range(0, layers, step), layers]
        found = run_stages(sequence, bounds, inputs, loss_fn, target, has_loss=True)
        for first, stop, (kept_bytes, most_bytes) in zip(bounds[:-1], bounds[1:], found, strict=True):
            unseen = 16 * (stop - first)  # batch counters: no operation makes them
            assert 0 <= kept[first, stop] - kept_bytes <= unseen, (first, stop)
            assert most[first, stop] >= most_bytes, (first, stop)
            over.append((most[first, stop] - most_bytes) / max(most_bytes, 1))
    assert np.median(over) < 0.02


def test_gradients_that_lie_on_received_ones_take_nothing() -> None:
    """A concatenation at the end of a stage hands back parts of the gradient that the stage has received."""
    model, sample, loss_fn, target = _images(UNet(depth=2, channels=4), torch.randint(2, (3, 16, 16)))
    sequence = trace(model, sample)
    inputs = micro_batch(sequence, sample, 3, CPU)
    with fake_runner(sequence, inputs, loss_fn=loss_fn, target=target, has_loss=True, device=CPU) as runner:
        predicted = stage_bytes(layer_memory(sequence, runner))
    predicted = replace(predicted, workspace_bytes=0 * predicted.workspace_bytes)
    most = predicted.most(predicted.kept())
    ends = [layer.index + 1 for layer in sequence.layers if layer.name == "cat"]
    assert len(ends) == 2
    for stop in ends:
        bounds = [0, 3, stop, len(sequence)]
        _, (_, most_bytes), _ = run_stages(sequence, bounds, inputs, loss_fn, target, has_loss=True)
        assert most_bytes <= most[3, stop] <= 1.005 * most_bytes


class Shared(nn.Module):
    """A gradient comes to two values at once: to the leaf of the one it is copied, where a stage begins with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        other = self.second(one)
        return (one + torch.relu(other)).square().sum(-1)


def test_gradients_are_copied_at_leaves() -> None:
    model, x = Shared(), torch.randn(32, 64)
    sequence = trace(model, x)
    inputs = micro_batch(sequence, x, 32, CPU)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=CPU) as runner:
        predicted = stage_bytes(layer_memory(sequence, runner))
    predicted = replace(predicted, workspace_bytes=0 * predicted.workspace_bytes)
    most = predicted.most(predicted.kept())
    for first in range(1, len(sequence)):
        found = run_stages(sequence, [0, first, len(sequence)], inputs, None, None, has_loss=False)
        assert most[first, len(sequence)] >= found[1][1], first
