"""A contiguous run of layers as one differentiable function of a micro-batch.

Profiler and executor run layers through this one class, so what is measured is what trains.

    entering values ---> leaves ---> layer ---> layer ---> layer ---> leaving values
                           |                                             |
    entering gradients <---+------------- one backward pass <------------+--- leaving gradients

Entering values become leaves of the autograd graph. A value that only passes by enters and leaves as the same leaf.
Leaving gradients are roots of the backward pass, so a value's gradients are always summed from its last reader to
its first, wherever the model is cut. And a gradient that comes to a value between layers is brought into the value's
own memory layout, as autograd does where it comes to a leaf: kernels may add up in another order for another layout.
So results do not depend on the cut, not even in the last bit.

Which layout a gradient comes in follows from the graph and its shapes: a value whose gradient came in the right one is
not watched any more, since a hook in Python costs 10 us at each pass [measured]. Layers after each other that have no
such value are then carried out as one function (`profiler.run.straight`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from profiler.machine.backend import device_of_first
from profiler.observe.draws import Seeder, draws_seeded_by
from profiler.run.layouts import Watched
from profiler.run.separable import split_function
from profiler.run.split_backward import DeferredWeights, deferring
from profiler.run.straight import Part, Run, graph_of, written_out
from profiler.torch_private import run_engine
from profiler.tracing.batch_norm import BatchStatistics
from profiler.tracing.export import autocasting
from profiler.tracing.sequence import BoundaryValue, Layer, LayerSequence

Moved: TypeAlias = tuple[BatchStatistics, Tensor, Tensor, Tensor]  # entry, mean, variance and count of a micro-batch


@dataclass(slots=True)
class KeptPass:
    """What a forward pass keeps for its backward pass.

    Attributes:
        leaves: entering values by name.
        roots: where the gradients of leaving values enter, by name; empty if nothing was kept.
    """

    leaves: dict[str, Tensor]
    roots: dict[str, GradientEdge]


@dataclass(slots=True)
class Results:
    """What a forward pass yields.

    Attributes:
        values: leaving values by name, still attached to the autograd graph; after the last layer the values that
            the model returns.
        buffers: new values of written buffers.
        statistics: batch-normalization statistics of the micro-batch: (entry, mean, variance, count).
    """

    values: dict[str, Tensor]
    buffers: dict[str, Tensor]
    statistics: list[Moved]


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer, its parameters, and what nothing needs after it; the rest is the layer's, one lookup nearer."""

    layer: Layer
    function: Callable[..., tuple[Any, ...]]
    parameters: tuple[Tensor, ...]
    buffers: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]
    forget: tuple[str, ...]
    draws_random: bool
    writes: bool
    is_plain: bool


class StageFunction:
    """Layers `first` to `stop - 1` of a sequence.

    Args:
        sequence: the layers.
        first: index of the first layer.
        stop: index after the last layer.
        parameters: by (layer index, name): the tensor that this layer reads and whose `.grad` it adds to.
        device: where the layers run; by default where the first of the parameters is.
        past: names of values alive at both ends that do not come here; none of the layers reads them.
        deferred: numbers (`id`) of parameters whose gradients can be left to a pass of their own, see
            `profiler.run.split_backward`.
    """

    def __init__(
        self,
        sequence: LayerSequence,
        first: int,
        stop: int,
        parameters: Mapping[tuple[int, str], Tensor],
        *,
        device: torch.device | None = None,
        past: frozenset[str] = frozenset(),
        deferred: frozenset[int] = frozenset(),
    ) -> None:
        layers = sequence.layers[first:stop]
        entering, leaving = (
            tuple(value for value in sequence.boundaries[position] if value.name not in past)
            for position in (first, stop)
        )
        self.entering: tuple[BoundaryValue, ...] = entering
        self.leaving: tuple[str, ...] = tuple(value.name for value in leaving)
        if stop == len(sequence):
            self.leaving = tuple(dict.fromkeys(leaf for leaf in sequence.outputs if isinstance(leaf, str)))
        read = dict.fromkeys(name for layer in layers for name in (*layer.values, *self.leaving))
        self.prelude = sequence.prelude_of([name for name in read if name in sequence.prelude_names])
        self.inputs: tuple[str, ...] = tuple(
            dict.fromkeys((*self.prelude.inputs, *(name for name in read if name in sequence.inputs)))
        )
        self.buffers: tuple[str, ...] = tuple(
            dict.fromkeys((*self.prelude.buffers, *(name for layer in layers for name in layer.buffers)))
        )
        self._sample = sequence.sample
        self._device = device or device_of_first(parameters.values())
        self.draws_random = any(layer.draws for layer in layers)
        self._written: dict[tuple[int, int], Run] = {}
        self._ways: dict[tuple[Any, ...], _Way] = {}  # by shapes that enter, and what requires gradients
        self._copied = _written(layers)
        self._steps = _steps(layers, parameters, frozenset(self.leaving), deferred)
        self.parameters: tuple[Tensor, ...] = tuple(tensor for step in self._steps for tensor in step.parameters)

    def forward(
        self,
        leaves: dict[str, Tensor],
        inputs: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        seed: Seeder | None = None,
        store: DeferredWeights | None = None,
    ) -> Results:
        """Run the layers on one micro-batch.

        Args:
            leaves: the entering values, see `leaves_of`; they are not changed.
            inputs: the model's inputs by name, at least those of `self.inputs`.
            buffers: current buffers by name, at least those of `self.buffers`; they are not changed.
            seed: seeds the random generators before each operation that draws from them.
            store: takes the gradients of the deferred parameters, for a later pass; without, the backward pass makes
                all gradients.
        """
        if store is None and self._sample.autocast is None and not self.draws_random:
            return self._forward(leaves, inputs, buffers, seed)  # the contexts take as long as a small layer
        try:
            with self.autocasting(), deferring(store) if store is not None else contextlib.nullcontext():
                return self._forward(leaves, inputs, buffers, seed)
        finally:
            draws_seeded_by(None, 0)

    def _way_at(self, values: Mapping[str, Any]) -> _Way:
        """How to go through the layers with values of these shapes."""
        key = (
            tuple([(value.shape, value.requires_grad) for value in values.values()]),
            tuple([parameter.requires_grad for parameter in self.parameters]),
        )
        known = self._ways.get(key)
        if known is None:
            known = self._ways[key] = _Way(self._steps, self._written)
        return known

    def autocasting(self) -> contextlib.AbstractContextManager[object]:
        """The autocast region that the model was traced in; the loss belongs into it too."""
        return autocasting(self._sample, self._device)

    def _forward(
        self,
        leaves: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        seed: Seeder | None,
    ) -> Results:
        current = dict(buffers)
        values: dict[str, Any] = {name: inputs[name] for name in self.inputs}
        values.update(leaves)
        way = self._way_at(values)
        if self._copied:
            for name in self._copied & values.keys():
                values[name] = values[name].clone()
        if self.prelude.names:
            sources = [current[name] for name in self.prelude.buffers] + [values[name] for name in self.prelude.inputs]
            values.update(zip(self.prelude.names, self.prelude.function(*sources), strict=True))
        statistics: list[Moved] = []
        written: dict[str, Tensor] = {}
        buffer_of, value_of = current.__getitem__, values.__getitem__
        for step, watched, run in way.pieces():
            if run is not None:
                run(values, current)
                continue
            if step.draws_random:
                draws_seeded_by(seed, step.layer.earlier_draws)
            outputs = step.function(*step.parameters, *map(buffer_of, step.buffers), *map(value_of, step.values))
            values.update(zip(step.outputs, outputs, strict=True))
            if watched.positions:
                watched.watch(outputs)
            del outputs  # else it holds its memory while the next layers run
            if step.writes:
                _take_writes(step.layer, values, current, written, statistics)
            for name in step.forget:
                del values[name]
        return Results({name: values[name] for name in self.leaving}, written, statistics)


_Piece: TypeAlias = "tuple[_Step, Watched, Run | None]"


class _Way:
    """How a stage goes through its layers: one by one, and runs of those whose gradients' layouts are known.

    Args:
        steps: the layers.
        written: runs of them that are known already, by their first layer and the one after the last.
    """

    def __init__(self, steps: Sequence[_Step], written: dict[tuple[int, int], Run]) -> None:
        self._steps = [(step, Watched(set(range(len(step.outputs))), self._forget)) for step in steps]
        self._pieces: list[_Piece] | None = None
        self._written = written

    def _forget(self) -> None:
        """Another layer is watched, or one is not any more."""
        self._pieces = None

    def pieces(self) -> list[_Piece]:
        """Each layer with those of its outputs whose gradients' layouts are watched, or a run with its first layer."""
        if self._pieces is None:
            self._pieces = [self._piece(first, stop) for first, stop in self._runs()]
        return self._pieces

    def _runs(self) -> list[tuple[int, int]]:
        """Layers that can be written out together, and each other layer for itself."""
        runs: list[tuple[int, int]] = []
        is_open = False
        for place, (step, watched) in enumerate(self._steps):
            plain = step.is_plain and not watched.positions
            if plain and is_open:
                runs[-1] = runs[-1][0], place + 1
            else:
                runs.append((place, place + 1))
            is_open = plain
        return runs

    def _piece(self, first: int, stop: int) -> _Piece:
        step, watched = self._steps[first]
        if stop == first + 1:  # its code may be that of others, too
            return step, watched, None
        if (first, stop) not in self._written:
            parts = [Part(step.layer, step.parameters, step.forget) for step, _ in self._steps[first:stop]]
            self._written[first, stop] = written_out(parts)
        return step, watched, self._written[first, stop]


def _written(layers: Sequence[Layer]) -> frozenset[str]:
    """Names of values that these layers write, also through a view that another of them made before."""
    written: set[str] = set()
    for layer in reversed(layers):
        written.update(layer.in_place, (source for output, source in layer.views if output in written))
    return frozenset(written)


def _take_writes(
    layer: Layer,
    values: dict[str, Any],
    current: dict[str, Tensor],
    written: dict[str, Tensor],
    statistics: list[Moved],
) -> None:
    """What a layer wrote into buffers, and its batch normalizations' statistics, leave the values."""
    for buffer, name in layer.written_buffers:
        current[buffer] = written[buffer] = values.pop(name).detach()
    for entry in layer.statistics:
        statistics.append((entry, values.pop(entry.mean), values.pop(entry.variance), values.pop(entry.count)))


def _steps(
    layers: Sequence[Layer],
    parameters: Mapping[tuple[int, str], Tensor],
    leaving: frozenset[str],
    deferred: frozenset[int],
) -> tuple[_Step, ...]:
    """Each layer with its parameters, and the values that nothing needs after it."""
    needed = set(leaving)
    steps = []
    for layer in reversed(layers):
        own = {name for _, name in layer.written_buffers}
        own.update(name for entry in layer.statistics for name in (entry.mean, entry.variance, entry.count))
        touched = dict.fromkeys((*layer.values, *layer.outputs))
        read = tuple(parameters[layer.index, name] for name in layer.parameters)
        function = split_function(layer.function, tuple(id(parameter) in deferred for parameter in read))
        steps.append(
            _Step(
                layer=layer,
                function=function,
                parameters=read,
                buffers=layer.buffers,
                values=layer.values,
                outputs=layer.outputs,
                forget=tuple(name for name in touched if name not in needed and name not in own),
                draws_random=layer.draws > 0,
                writes=bool(own),
                is_plain=not (layer.draws or own or function is not layer.function) and graph_of(layer) is not None,
            )
        )
        needed.update(layer.values)
    return tuple(reversed(steps))


def leaves_of(values: Mapping[str, Tensor], described: Sequence[BoundaryValue]) -> dict[str, Tensor]:
    """Entering values as leaves of a new autograd graph, sharing memory with `values`."""
    return {value.name: values[value.name].detach().requires_grad_(value.requires_grad) for value in described}


def roots_of(values: Mapping[str, Tensor]) -> dict[str, GradientEdge]:
    """Where gradients of leaving values enter the graph; unlike the values, this keeps no memory alive."""
    return {name: get_gradient_edge(value) for name, value in values.items() if value.requires_grad}


def run_backward(kept: KeptPass, gradients: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The backward pass: adds to the parameters' `.grad` and returns the gradients of the entering values.

    Args:
        kept: of the forward pass; it is used up.
        gradients: of leaving values; those without one do not influence the loss.
    """
    names = [name for name in kept.roots if gradients.get(name) is not None]
    if names:
        run_engine(
            tuple(kept.roots[name] for name in names),
            tuple(gradients[name] for name in names),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    result = {name: leaf.grad for name, leaf in kept.leaves.items() if leaf.requires_grad}
    kept.roots.clear()
    kept.leaves.clear()
    return result
