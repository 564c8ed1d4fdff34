"""Observes layers, of which equal ones are run once.

Two layers are equal here if they do the same operations on tensors of the same shapes and layouts, of which the same
ones share storages, and if the same ones of their values live on. What the first one showed holds for the others under
their own names. Only where shapes do not depend on values, which only a run can tell.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profiler.memory.one_layer import (
    ObservedBackward,
    ObservedForward,
    doubled,
    observe_backward,
    observe_forward,
    returning,
)
from profiler.observe.storage_watch import Peaks, StorageWatch
from profiler.run.layer_runner import LayerRunner
from profiler.torch_private import storage_of
from profiler.tracing.sequence import Layer, LayerSequence


@dataclass(frozen=True, slots=True)
class _Caught:
    """A gradient that a layer handed on.

    Attributes:
        name: of the value.
        shape: of the gradient; so `strides`, `offset`, `dtype` and `device`.
        storage: number of its storage.
        storage_bytes: size of its storage.
        given: name of a gradient that came to the layer and lies on the same storage.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int
    storage_bytes: int
    given: str | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a layer showed.

    Attributes:
        names: what it reads and computes, in order; what it showed is in these names.
        forward: of its forward pass.
        computed: copies of what leaves it.
    """

    names: tuple[str, ...]
    forward: ObservedForward
    computed: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _SeenBackward:
    """What a layer showed in its backward pass; `inner` is in addition to all gradients that were there before."""

    names: tuple[str, ...]
    inner: Peaks
    last: Peaks
    relaid: tuple[tuple[str, int], ...]
    copied: tuple[tuple[str, int], ...]
    caught: tuple[_Caught, ...]


class LayerObserver:
    """Observes the layers of a sequence, forward in their order and then backward.

    Args:
        sequence: the layers.
        runner: with a micro-batch.
        share: whether equal layers are run once; no shape depends on values.
    """

    def __init__(self, sequence: LayerSequence, runner: LayerRunner, *, share: bool) -> None:
        self._sequence = sequence
        self._runner = runner
        self._share = share
        self._watch = StorageWatch()
        self._seen: dict[Hashable, _Seen] = {}
        self._seen_backward: dict[Hashable, _SeenBackward] = {}
        self._keys: dict[int, Hashable] = {}
        self._makers: dict[int, int] = {}

    def forward(self, layer: Layer, values: Mapping[str, Tensor]) -> tuple[ObservedForward, dict[str, Tensor]]:
        """See `observe_forward`."""
        names = (*layer.values, *layer.outputs)
        key = self._keys[layer.index] = self._forward_key(layer, values)
        seen = self._seen.get(key) if self._share else None
        after = {value.name for value in self._sequence.boundaries[layer.index + 1]}
        if seen is None:
            self._runner.hold(range(layer.index, layer.index + 1))
            observed, following = observe_forward(self._sequence, self._runner, layer, values, self._watch)
            made = {name: value for name, value in following.items() if name in layer.outputs}
            self._seen[key] = _Seen(names, observed, made)
            return observed, following
        called = dict(zip(seen.names, names, strict=True))
        following = {name: value for name, value in values.items() if name in after}
        following.update({called[name]: value.clone() for name, value in seen.computed.items()})
        return _renamed(seen.forward, called), following

    def backward(self, layer: Layer, values: Mapping[str, Tensor], gradients: dict[str, Tensor]) -> ObservedBackward:
        """See `observe_backward`."""
        names = (*layer.values, *layer.outputs)
        touched = [name for name in dict.fromkeys(names) if name in gradients]
        key = (self._keys[layer.index], _sharing(gradients, touched))
        seen = self._seen_backward.get(key) if self._share else None
        if seen is None:
            self._runner.hold(range(layer.index, layer.index + 1))
            before = self._watch.live_bytes
            given = {self._watch.number_of(gradients[name]): name for name in reversed(touched)}
            observed = observe_backward(
                self._sequence, self._runner, layer, values, gradients, self._watch, self._makers
            )
            self._note_makers(layer, gradients)
            self._seen_backward[key] = _SeenBackward(
                names,
                (observed.inner[0] - before, observed.inner[1] - before),
                observed.last,
                observed.relaid,
                tuple(entry for entry in observed.copied if entry[0] in names),
                tuple(
                    self._caught(name, gradients[name], given)
                    for name in dict.fromkeys(layer.values)
                    if name in gradients
                ),
            )
            return observed
        called = dict(zip(seen.names, names, strict=True))
        copied_bytes = {**doubled(layer, gradients), **{called[name]: size for name, size in seen.copied}}
        observed = ObservedBackward(
            inner=(seen.inner[0] + self._watch.live_bytes, seen.inner[1] + self._watch.live_bytes),
            last=seen.last,
            **returning(layer, gradients, self._watch, self._makers),
            relaid=tuple((called[name], size) for name, size in seen.relaid),
            copied=tuple(sorted(copied_bytes.items())),
        )
        self._hand_on(seen.caught, called, {name: gradients.pop(name) for name in touched}, gradients)
        self._note_makers(layer, gradients)
        return observed

    def _note_makers(self, layer: Layer, gradients: Mapping[str, Tensor]) -> None:
        for gradient in gradients.values():
            number = self._watch.number_of(gradient)
            if number is not None:
                self._makers.setdefault(number, layer.index)

    def _caught(self, name: str, gradient: Tensor, given: Mapping[int | None, str]) -> _Caught:
        number = self._watch.number_of(gradient)
        return _Caught(
            name,
            tuple(gradient.shape),
            gradient.stride(),
            int(gradient.storage_offset()),
            gradient.dtype,
            gradient.device,
            -1 if number is None else number,
            gradient.untyped_storage().nbytes(),
            None if number is None else given.get(number),
        )

    def _hand_on(
        self,
        caught: Sequence[_Caught],
        called: Mapping[str, str],
        given: Mapping[str, Tensor],
        gradients: dict[str, Tensor],
    ) -> None:
        """Make gradients like those that the equal layer handed on, with the same storages in common."""
        storages: dict[int, Tensor] = {}
        with self._watch:
            for entry in caught:
                if entry.given is not None:
                    storages[entry.storage] = given[called[entry.given]]
                elif entry.storage not in storages:
                    elements = entry.storage_bytes // entry.dtype.itemsize
                    storages[entry.storage] = torch.empty(elements, dtype=entry.dtype, device=entry.device)
                gradients[called[entry.name]] = storages[entry.storage].as_strided(
                    entry.shape, entry.strides, entry.offset
                )

    def _forward_key(self, layer: Layer, values: Mapping[str, Tensor]) -> Hashable:
        """Equal for layers that need not be run twice."""
        after = {value.name for value in self._sequence.boundaries[layer.index + 1]}
        trained = {value.name: value.requires_grad for value in self._sequence.boundaries[layer.index]}
        read = [
            (name in values, trained.get(name), name in after, name if name not in values else None)
            for name in layer.values
        ]
        names = [name for name in dict.fromkeys(layer.values) if name in values]
        left = [name in after for name in layer.outputs]
        last = layer.index == len(self._sequence) - 1
        return layer.signature, last, tuple(read), tuple(left), _sharing(values, names)


def _sharing(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Hashable:
    """Shapes, layouts and common storages of these tensors, and whether others lie there too."""
    numbers: dict[int, int] = {}
    inside = {storage_of(tensors[name]): 0 for name in names}
    outside = {storage_of(tensor) for name, tensor in tensors.items() if name not in set(names)}
    return tuple(
        (
            position,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            numbers.setdefault(storage_of(tensor), len(numbers)),
            tensor.untyped_storage().nbytes(),
            storage_of(tensor) in outside & inside.keys(),
        )
        for position, tensor in enumerate(tensors[name] for name in names)
    )


def _renamed(observed: ObservedForward, called: Mapping[str, str]) -> ObservedForward:
    return replace(
        observed,
        created=tuple(replace(entry, names=tuple(called[name] for name in entry.names)) for entry in observed.created),
        aliases=tuple((called[name], called[source]) for name, source in observed.aliases),
        saved=tuple(called[name] for name in observed.saved),
    )
