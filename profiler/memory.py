"""Bytes that layers keep and bytes that they need in passing, exactly, without running anything.

Two passes over the layers on fake tensors, which have shapes, storages and autograd history but no data:

1. Uncut: all layers in one autograd graph. Every storage that autograd saves is charged once, to the layer that
   created it, or to the last one that wrote it in place. Parameters, buffers and inputs are charged to none; a
   prelude value, which every stage computes for itself, to every layer that saves it.
2. One layer at a time, forward and backward, watching what is alive beside the charged storages. At the start of its
   backward pass a layer here still has what leaves it, the caller holds the gradients of that throughout, and entering
   values are leaves as at the start of a stage, so this is never less than what a stage needs. What kernels allocate
   inside themselves is added from a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.layer_runner import Entered, LayerRunner, backward, keep
from profiler.sequence import LayerSequence
from profiler.workspace import workspace_bytes

PRELUDE = -1  # marks what was created before the first layer


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of one layer for one micro-batch.

    Attributes:
        kept_bytes: created by the layer and kept until the backward pass, by autograd or, for statistics and new
            values of buffers, by who runs the layer.
        transient_bytes: the largest sum of bytes that exist beside the kept ones during forward or backward.
    """

    kept_bytes: int
    transient_bytes: int


class StorageWatch(TorchDispatchMode):
    """Counts the bytes of storages that operations create, for as long as they live.

    Attributes:
        live_bytes: of the storages alive now.
        peak_bytes: largest sum of `live_bytes` and a kernel's workspace since it was last set.
        mark: given to storages created from now on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.mark = PRELUDE
        self._known: dict[int, tuple[int, int]] = {}  # storage -> (mark, bytes)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        storages = {_storage(item) for item in arguments}
        out = func(*args, **(kwargs or {}))
        results = [item for item in pytree.tree_leaves(out) if isinstance(item, Tensor)]
        for item in results:
            if _storage(item) not in self._known and _storage(item) not in storages:
                self._add(item.untyped_storage())
        workspace = workspace_bytes(func._schema.name, (*arguments, *results))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace)
        return out

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor that no operation made, such as `torch.tensor(1)`."""
        if _storage(tensor) not in self._known:
            self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        self._known[identity] = (self.mark, size)
        weakref.finalize(storage, self._forget, identity)
        self.live_bytes += size

    def _forget(self, identity: int) -> None:
        self.live_bytes -= self._known.pop(identity)[1]

    def mark_and_bytes(self, tensor: Tensor) -> tuple[int, int] | None:
        """Mark and bytes of the storage behind a tensor; None if no operation under this watch created it."""
        return self._known.get(_storage(tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def layer_memory(sequence: LayerSequence, runner: LayerRunner) -> list[LayerMemory]:
    """The memory of every layer.

    Args:
        sequence: the layers.
        runner: with a micro-batch of the wanted size; on fake tensors, inside their mode, or on real ones. Parameters
            that are trained have a `.grad`, as they do from the second micro-batch on.
    """
    kept, charged = _kept(sequence, runner)
    transient = _transient(sequence, runner, charged, kept)
    return [LayerMemory(*pair) for pair in zip(kept, transient, strict=True)]


class _Saved:
    """What autograd saves while layers run under `StorageWatch`."""

    def __init__(self, watch: StorageWatch) -> None:
        self.tensors: dict[int, Tensor] = {}  # storage -> a tensor on it, which keeps it alive
        self.of_prelude: dict[tuple[int, int], int] = {}  # (storage, mark of the layer that saves it) -> bytes
        self._watch = watch

    def add(self, tensor: Tensor) -> Tensor:
        found = self._watch.mark_and_bytes(tensor)
        if found is not None and found[0] == PRELUDE:
            self.of_prelude[_storage(tensor), self._watch.mark] = found[1]
        elif found is not None:
            self.tensors[_storage(tensor)] = tensor
        return tensor


def _kept(sequence: LayerSequence, runner: LayerRunner) -> tuple[list[int], list[frozenset[str]]]:
    """Per layer the bytes charged to it, and the entering values whose storage is charged to an earlier layer."""
    writer: dict[int, int] = {}
    entering: list[dict[str, int]] = []
    with StorageWatch() as watch, torch.enable_grad():
        saved = _Saved(watch)
        runner.run_prelude()
        sources, alive = runner.sources, dict[str, Tensor]()
        for layer in sequence.layers:
            watch.mark = layer.index
            entering.append({name: _storage(value) for name, value in alive.items()})
            sources.update({name: sources[name].clone() for name in layer.in_place & sources.keys()})
            entered = Entered({**sources, **alive}, {})
            writer.update({_storage(entered.values[name]): layer.index for name in layer.in_place})
            with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
                computed = runner.forward(layer.index, entered)
            alive = runner.leaving(layer.index, entered, computed)
            for tensor in runner.by_products(layer.index, computed):
                watch.follow(tensor)
                saved.add(tensor)
        owners = _owners(saved.tensors, writer, watch)
    kept = [0] * len(sequence)
    for owner, size in owners.values():
        kept[owner] += size
    for (_, mark), size in saved.of_prelude.items():
        kept[mark] += size
    charged = [
        frozenset(name for name, storage in names.items() if storage in owners and owners[storage][0] < index)
        for index, names in enumerate(entering)
    ]
    return kept, charged


def _owners(saved: Mapping[int, Tensor], writer: Mapping[int, int], watch: StorageWatch) -> dict[int, tuple[int, int]]:
    """Saved storage -> the layer that it is charged to, and its bytes."""
    owners = {}
    for storage, tensor in saved.items():
        found = watch.mark_and_bytes(tensor)
        assert found is not None, "only storages under watch are saved"
        owners[storage] = (max(found[0], writer.get(storage, 0)), found[1])
    return owners


def _transient(
    sequence: LayerSequence, runner: LayerRunner, charged: Sequence[frozenset[str]], kept: Sequence[int]
) -> list[int]:
    """Per layer the largest bytes beside what is charged, its own forward and backward pass run alone."""
    transient = []
    with StorageWatch() as watch, torch.enable_grad():
        runner.run_prelude()
        values: dict[str, Tensor] = {}
        for layer in sequence.layers:
            elsewhere = {_storage(values[name]): values[name] for name in charged[layer.index]}
            before = sum((watch.mark_and_bytes(value) or (0, 0))[1] for value in elsewhere.values())
            del elsewhere
            watch.peak_bytes = watch.live_bytes
            values = _pass(layer.index, runner, values, watch)
            transient.append(max(0, watch.peak_bytes - before - kept[layer.index]))
    return transient


def _pass(index: int, runner: LayerRunner, values: Mapping[str, Tensor], watch: StorageWatch) -> dict[str, Tensor]:
    """Forward and backward pass of one layer; returns what leaves it, detached."""
    entered = runner.enter(index, values, gated=False)
    computed = runner.forward(index, entered)
    leaving = runner.leaving(index, entered, computed)
    held = runner.by_products(index, computed)
    for tensor in held:
        watch.follow(tensor)
    kept = keep(entered, leaving)
    del entered, computed
    gradients = {name: torch.ones_like(leaving[name]) for name in kept.roots}
    leaving = {name: value.detach() for name, value in leaving.items()}
    backward(kept, gradients)()
    return leaving
