"""What part of each layer's backward pass can wait for a pass of its own, and what is kept until then.

    forward, I and W of one layer after the other, as `profiler.run.split_backward` runs them

W's part of both passes together is what is measured; seconds follow from it and from those of the whole backward pass,
which were measured where the layer stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from profiler.machine.stopwatches import Stopwatch
from profiler.run.layer_runner import LayerRunner, backward, keep
from profiler.run.split_backward import DeferredWeights
from profiler.torch_private import storage_of
from profiler.tracing.sequence import BoundaryValue, LayerSequence

ROUNDS = 3
"""Passes of each distinct layer, the first of which does not count."""


class WeightPass(NamedTuple):
    """What a layer leaves for W.

    Attributes:
        share: W's part of the backward pass, 0 where all gradients are made in I.
        kept_bytes: what lives from I until W.
    """

    share: float
    kept_bytes: int


NOTHING = WeightPass(0.0, 0)


def measured_weights(sequence: LayerSequence, runner: LayerRunner, size: int, watch: Stopwatch) -> list[WeightPass]:
    """By layer; equal layers are measured once, on values that are made up.

    Args:
        sequence: the layers.
        runner: with a micro-batch, on real tensors.
        size: of the micro-batch.
        watch: of their device.
    """
    known: dict[tuple[str, bool, tuple[bool, ...]], WeightPass] = {}
    found = []
    runner.run_prelude()
    for layer in sequence.layers:
        deferred = runner.deferred(layer.index)
        key = (layer.signature, layer.index == len(sequence) - 1, deferred)
        if any(deferred) and key not in known:
            runner.hold(range(layer.index, layer.index + 1))
            values = {value.name: _made_up(value, size, runner.device) for value in sequence.boundaries[layer.index]}
            known[key] = _measured(runner, layer.index, values, watch)
        found.append(known.get(key, NOTHING))
    return found


def _made_up(value: BoundaryValue, size: int, device: torch.device) -> Tensor:
    """A value of a boundary as it comes from the stage before."""
    shape = value.shape_at(size)
    memory = torch.empty([shape[dim] for dim in value.dim_order], dtype=value.dtype, device=device)
    memory = memory.normal_() if memory.is_floating_point() or memory.is_complex() else memory.zero_()
    return memory.permute([value.dim_order.index(dim) for dim in range(len(shape))])


def _measured(runner: LayerRunner, index: int, values: Mapping[str, Tensor], watch: Stopwatch) -> WeightPass:
    shares = []
    kept_bytes = 0
    for number in range(ROUNDS):
        store, backward_pass = gone_forward(runner, index, values, None, watching=not number)
        watch.lap(backward_pass)
        kept_bytes = kept_bytes or store.kept_bytes()
        watch.lap(store.run)
        rest_s, weight_s = watch.take()
        shares.append(weight_s / (rest_s + weight_s) if weight_s else 0.0)
    return WeightPass(median(shares[1:]), kept_bytes)


def gone_forward(
    runner: LayerRunner, index: int, values: Mapping[str, Tensor], trained: Set[str] | None, *, watching: bool
) -> tuple[DeferredWeights, Callable[[], None]]:
    """A layer after its forward pass: what takes gradients for W, and I, ready to be called.

    Args:
        runner: of the layer.
        index: of the layer.
        values: alive at the boundary before it.
        trained: names of what is alive after it and gets a gradient; None for all that can have one.
        watching: whether what is kept for W is noted.
    """
    entered = runner.enter(index, values)
    sources = frozenset(storage_of(value) for value in runner.sources.values() if isinstance(value, Tensor))
    store = DeferredWeights(watching, sources)
    leaving = runner.leaving(index, entered, runner.forward(index, entered, store=store))
    gradients = {
        name: torch.ones_like(value)
        for name, value in leaving.items()
        if value.requires_grad and (trained is None or name in trained)
    }
    return store, backward(keep(entered, leaving), gradients)
