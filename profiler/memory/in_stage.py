"""Bytes that layers keep and bytes that they need in passing, as part of any stage, without running anything.

`lone_layer` sees what each layer needs by itself; here it is put together. A storage is charged to the layer that
creates it or, where that is written in place, to the last one that writes it; it is kept from the first layer on that
saves it for its backward pass. Of a stage of layers [i, j) each micro-batch keeps the storages that a layer of the
stage creates and a layer of the stage saves; what enters the stage is counted as its input. Values of the prelude,
which a stage computes once for all its layers, are kept once by every stage in which a layer saves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profiler.memory.equal_layers import LayerObserver
from profiler.memory.one_layer import ObservedBackward, ObservedForward
from profiler.observe.storage_watch import Peaks, StorageWatch
from profiler.record import InStage, LayerBytes, LeafBytes
from profiler.run.layer_runner import LayerRunner
from profiler.torch_private import storage_of
from profiler.tracing.sequence import BoundaryValue, LayerSequence


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of one layer for one micro-batch; see the fields of `profiler.record.LayerCost`."""

    kept_bytes: int
    transient_bytes: int
    in_stage: InStage


def layer_memory(sequence: LayerSequence, runner: LayerRunner, *, share: bool = False) -> list[LayerMemory]:
    """The memory of every layer.

    Args:
        sequence: the layers.
        runner: with a micro-batch of the wanted size; on fake tensors, inside their mode, or on real ones. Parameters
            that are trained have a `.grad`, as they do from the second micro-batch on.
        share: run equal layers once; no shape depends on values.
    """
    with torch.enable_grad():
        prelude = _prelude(runner)
        observer = LayerObserver(sequence, runner, share=share)
        values: list[dict[str, Tensor]] = [{}]
        forward = []
        for layer in sequence.layers:
            observed, alive = observer.forward(layer, values[-1])
            forward.append(observed)
            values.append(alive)
        gradients: dict[str, Tensor] = {}
        backward = []
        for layer in reversed(sequence.layers):
            values.pop()
            backward.append(observer.backward(layer, values[-1], gradients))
    return _StageAssembly(sequence, forward, backward[::-1], prelude).memory()


@dataclass(frozen=True, slots=True)
class _PreludeBytes:
    """What the prelude's values occupy.

    Attributes:
        storages: name -> number of its storage.
        sizes_bytes: by number.
        peaks: largest bytes alive while it is computed.
    """

    storages: Mapping[str, int]
    sizes_bytes: Mapping[int, int]
    peaks: Peaks


def _prelude(runner: LayerRunner) -> _PreludeBytes:
    with StorageWatch() as watch:
        runner.run_prelude()
        storages, sizes = {}, {}
        for name, value in runner.sources.items():
            size = watch.bytes_of(value) if isinstance(value, Tensor) else None
            if size is not None:
                storages[name] = storage_of(value)
                sizes[storages[name]] = size
        return _PreludeBytes(storages, sizes, watch.peaks_above(0))


@dataclass(slots=True)
class _Storage:
    """A storage that crosses boundaries.

    Attributes:
        layer: that creates it, or writes it last.
        size_bytes: its size.
        is_counted: whether `ObservedForward.own_bytes` of that layer holds it.
        saved_by: the first layer that saves it.
    """

    layer: int
    size_bytes: int
    is_counted: bool
    saved_by: int | None

    def waits_at(self, index: int) -> bool:
        """Whether it is there when that layer runs forward, but kept by neither that layer nor an earlier one."""
        return self.saved_by is None or self.saved_by > index


class _StageAssembly:
    """All layers' forward, put together."""

    def __init__(
        self,
        sequence: LayerSequence,
        forward: Sequence[ObservedForward],
        backward: Sequence[ObservedBackward],
        prelude: _PreludeBytes,
    ) -> None:
        self._sequence = sequence
        self._forward = forward
        self._backward = backward
        self._prelude = prelude
        self._on = _storages(sequence, forward)
        self._readers: dict[str, list[int]] = {}
        for layer in sequence.layers:
            for name in layer.values:
                self._readers.setdefault(name, []).append(layer.index)

    def memory(self) -> list[LayerMemory]:
        """The memory of every layer as part of any stage."""
        carried: list[dict[int, int]] = [{} for _ in self._forward]
        uncounted = [0] * len(self._forward)
        for storage in {id(found): found for found in self._on.values()}.values():
            if storage.saved_by is not None and not storage.is_counted:
                if storage.saved_by > storage.layer:
                    _add(carried[storage.layer], storage.saved_by, storage.size_bytes)
                uncounted[storage.layer] += storage.size_bytes
        of_prelude, repeated = self._prelude_bytes()
        return [
            self._layer(index, uncounted[index] + of_prelude[index], carried[index], repeated[index])
            for index in range(len(self._forward))
        ]

    def _prelude_bytes(self) -> tuple[list[int], list[dict[int, int]]]:
        """Per layer the bytes of prelude values that it saves, and the part that an earlier layer saves too."""
        sizes = [0] * len(self._forward)
        repeated: list[dict[int, int]] = [{} for _ in self._forward]
        last: dict[int, int] = {}
        for index, observed in enumerate(self._forward):
            for storage in {self._prelude.storages[name] for name in observed.saved if name in self._prelude.storages}:
                sizes[index] += self._prelude.sizes_bytes[storage]
                if storage in last:
                    _add(repeated[index], last[storage], self._prelude.sizes_bytes[storage])
                last[storage] = index
        return sizes, repeated

    def _layer(self, index: int, uncounted: int, carried: dict[int, int], repeated: dict[int, int]) -> LayerMemory:
        observed, observed_backward = self._forward[index], self._backward[index]
        waiting, copied = self._waiting(index), self._copied(index)
        own, prelude = observed.own_bytes, self._waiting_prelude(index)
        reads_prelude = any(name in self._prelude.storages for name in self._sequence.layers[index].values)
        tensors, with_workspace = (
            tuple(max(0, peak - own) for peak in peaks)
            for peaks in zip(observed.peaks, observed_backward.inner, observed_backward.last, strict=True)
        )
        return LayerMemory(
            kept_bytes=own + uncounted,
            transient_bytes=max(
                with_workspace[0] + sum(waiting.values()) + sum(prelude.values()),
                self._prelude.peaks[1] if reads_prelude else 0,
                with_workspace[1] + sum(copied.values()),
                with_workspace[2] + sum(copied.values()),
            ),
            in_stage=InStage(
                carried_bytes=_pairs(carried),
                repeated_bytes=_pairs(repeated),
                held_bytes=observed.held_bytes,
                forward_bytes=tensors[0],
                waiting_bytes=_pairs(waiting),
                prelude_bytes=_pairs(prelude),
                prelude_peak_bytes=self._prelude.peaks[1] if reads_prelude else 0,
                backward_bytes=tensors[1],
                last_backward_bytes=tensors[2],
                returning_bytes=_pairs(self._by_next_reader(index, dict(observed_backward.returning))),
                made_bytes=_pairs(self._made(index)),
                leaf_bytes=self._at_leaves(index),
                passing_bytes=_pairs(_sums(observed_backward.passing)),
                copied_bytes=_pairs(copied),
                workspace_bytes=max(most - alone for alone, most in zip(tensors, with_workspace, strict=True)),
                workspaces=observed.workspaces,
            ),
        )

    def _waiting(self, index: int) -> dict[int, int]:
        """Bytes of earlier layers' values that are there while the layer runs forward but not kept; by creator."""
        storages = {id(self._on[value.name]): self._on[value.name] for value in self._crossing(index)}
        waiting: dict[int, int] = {}
        for storage in storages.values():
            if storage.waits_at(index):
                _add(waiting, storage.layer, storage.size_bytes)
        return waiting

    def _by_next_reader(self, index: int, sizes: Mapping[str, int]) -> dict[int, int]:
        """Bytes that belong to values alive after the layer, by the next layer that reads the value."""
        sums: dict[int, int] = {}
        for value in self._sequence.boundaries[index + 1]:
            if value.name in sizes:
                _add(sums, self._next_reader(value, index), sizes[value.name])
        return sums

    def _next_reader(self, value: BoundaryValue, index: int) -> int:
        """The next layer after `index` that reads the value; the last one, for the loss, what the model returns."""
        return min(next(reader for reader in value.consumers if reader > index), len(self._forward) - 1)

    def _at_leaves(self, index: int) -> LeafBytes:
        """See `InStage.leaf_bytes`."""
        lying = {name: (maker, size_bytes) for name, maker, size_bytes in self._backward[index].makers}
        found: dict[tuple[int, int, int], int] = {}
        for value in self._sequence.boundaries[index + 1]:
            maker, size_bytes = lying.get(value.name, (-1, 0))
            reader = self._next_reader(value, index)
            if maker > reader and value.producer < index:
                key = (value.producer, reader, maker)
                found[key] = found.get(key, 0) + size_bytes
        return tuple((*key, size_bytes) for key, size_bytes in sorted(found.items()))

    def _made(self, index: int) -> dict[int, int]:
        """Bytes of gradients of what is alive after the layer, and of copies in another layout; by who makes them."""
        made = _sums(self._backward[index].made)
        for reader, size_bytes in self._by_next_reader(index, dict(self._backward[index].relaid)).items():
            _add(made, reader, size_bytes)
        return made

    def _copied(self, index: int) -> dict[int, int]:
        """Bytes of gradients that are copied where their values enter a stage, by the layer that creates the value."""
        sizes = dict(self._backward[index].copied)
        copied: dict[int, int] = {}
        for value in self._sequence.boundaries[index]:
            if value.name in sizes:
                _add(copied, value.producer, sizes[value.name])
        return copied

    def _crossing(self, boundary: int) -> list[BoundaryValue]:
        return [value for value in self._sequence.boundaries[boundary] if value.name in self._on]

    def _waiting_prelude(self, index: int) -> dict[int, int]:
        """Bytes of the prelude's values that wait for this layer or a later one, by that layer.

        A value that this layer keeps does not wait.
        """
        kept = {self._prelude.storages[name] for name in self._forward[index].saved if name in self._prelude.storages}
        readers: dict[int, int] = {}
        for name, storage in self._prelude.storages.items():
            later = [reader for reader in self._readers.get(name, ()) if reader >= index]
            if later and storage not in kept:
                readers[storage] = min(later[0], readers.get(storage, later[0]))
        waiting: dict[int, int] = {}
        for storage, reader in readers.items():
            _add(waiting, reader, self._prelude.sizes_bytes[storage])
        return waiting


def _storages(sequence: LayerSequence, forward: Sequence[ObservedForward]) -> dict[str, _Storage]:
    """The storage of every value that crosses a boundary."""
    on: dict[str, _Storage] = {}
    for index, (layer, observed) in enumerate(zip(sequence.layers, forward, strict=True)):
        for name in layer.in_place & on.keys():
            on[name].layer = index
        for name in observed.saved:
            if name in on and on[name].saved_by is None:
                on[name].saved_by = index
        for created in observed.created:
            storage = _Storage(index, created.size_bytes, created.is_saved, index if created.is_saved else None)
            on.update(dict.fromkeys(created.names, storage))
        on.update({name: on[source] for name, source in observed.aliases if source in on})
    return on


def _add(sums: dict[int, int], key: int, size_bytes: int) -> None:
    sums[key] = sums.get(key, 0) + size_bytes


def _sums(entries: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for key, size_bytes in entries:
        _add(sums, key, size_bytes)
    return sums


def _pairs(sums: Mapping[int, int]) -> LayerBytes:
    return tuple(sorted(sums.items()))
