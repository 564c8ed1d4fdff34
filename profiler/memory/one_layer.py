"""What one layer needs, seen by running it by itself on fake tensors, which have shapes and history but no data.

A watch counts what the layer creates; what comes from outside is the business of who created it:

    entering value ---> gate ---> layer ---> leaving value
                         |                      |
    caught gradient <----+---- backward pass <--+--- source

Backward passes go from the last layer to the first. The source gives the gradients that later gates have caught into
the backward pass and lets go of them, so that they live as long as in a stage; even storages that two gradients share
are shared. As the last layer of a stage, a layer gets gradients from its caller, who keeps them: so the backward pass
runs once as each. And as the first layer of a stage it reads leaves of the autograd graph instead of values behind
gates; a third run shows which gradients are copied there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from profiler.observe.storage_watch import Peaks, StorageWatch, storage_bytes
from profiler.record import Workspace
from profiler.run.layer_runner import Entered, LayerRunner
from profiler.run.layouts import hook_gradient, layout_hook
from profiler.torch_private import storage_of
from profiler.tracing.sequence import Layer, LayerSequence


@dataclass(frozen=True, slots=True)
class Created:
    """A storage that a layer creates and that leaves it.

    Attributes:
        names: of the leaving values on it.
        size_bytes: of the whole storage.
        is_saved: whether the layer saves it.
    """

    names: tuple[str, ...]
    size_bytes: int
    is_saved: bool


@dataclass(frozen=True, slots=True)
class ObservedForward:
    """What a layer's forward pass shows; bytes are those of storages that it creates.

    Attributes:
        own_bytes: kept until the backward pass, `held_bytes` included.
        held_bytes: kept until the end of the step.
        created: storages of leaving values.
        aliases: leaving values that lie on the storage of a value from outside: (leaving, from outside).
        saved: names of the values from outside whose storages it saves.
        peaks: largest bytes alive.
        workspaces: of LSTMs.
    """

    own_bytes: int
    held_bytes: int
    created: tuple[Created, ...]
    aliases: tuple[tuple[str, str], ...]
    saved: tuple[str, ...]
    peaks: Peaks
    workspaces: tuple[Workspace, ...]


@dataclass(frozen=True, slots=True)
class ObservedBackward:
    """What a layer's backward pass shows; `ObservedForward.own_bytes` are alive when it begins and counted.

    Attributes:
        inner: largest bytes alive together with all gradients of what is alive after the layer.
        last: the same where these gradients are the caller's, and not counted.
        returning: (value, bytes): what is alive after the layer, and bytes of its gradient.
        made: (later layer, bytes): the layer whose backward pass made a storage of these gradients, and its size.
        relaid: (value, bytes): values that the layer computes and whose gradient comes in another memory layout, and
            bytes of the copy in theirs.
        makers: (value, later layer, bytes): the layer whose backward pass made the storage, and bytes of the gradient.
        passing: the part of `made` that belongs to values which the layer neither reads nor computes.
        copied: (value, bytes): values whose gradient is copied where they enter a stage, and is there twice while
            the layer runs: autograd copies what comes to a leaf if it is shared or has another memory layout.
    """

    inner: Peaks
    last: Peaks
    returning: tuple[tuple[str, int], ...]
    made: tuple[tuple[int, int], ...]
    makers: tuple[tuple[str, int, int], ...]
    passing: tuple[tuple[int, int], ...]
    relaid: tuple[tuple[str, int], ...]
    copied: tuple[tuple[str, int], ...]


def observe_forward(
    sequence: LayerSequence, runner: LayerRunner, layer: Layer, values: Mapping[str, Tensor], watch: StorageWatch
) -> tuple[ObservedForward, dict[str, Tensor]]:
    """Run one layer forward.

    Args:
        sequence: the layers.
        runner: with a micro-batch.
        layer: to be run.
        values: alive at the boundary before it, on storages that `watch` does not know.
        watch: knows nothing.

    Returns:
        What there was to see, and what is alive after the layer, likewise.
    """
    run = _Run(sequence, runner, layer, values, watch)
    return run.observed(), run.following(values)


def observe_backward(
    sequence: LayerSequence,
    runner: LayerRunner,
    layer: Layer,
    values: Mapping[str, Tensor],
    gradients: dict[str, Tensor],
    watch: StorageWatch,
    makers: Mapping[int, int],
) -> ObservedBackward:
    """Run one layer forward and backward, as inner and as last layer of a stage.

    Args:
        sequence: the layers.
        runner: with a micro-batch.
        layer: to be run.
        values: as for `observe_forward`.
        gradients: of what is alive after the layer, by name, on storages that `watch` knows; turned into those of what
            is alive before it.
        watch: knows nothing but `gradients`.
        makers: number of a storage -> layer whose backward pass made it.
    """
    coming_back = returning(layer, gradients, watch, makers)
    copied = doubled(layer, gradients)
    copied.update(_Run(sequence, runner, layer, values, watch, gated=False).copied_at_leaves())
    last, caught = _Run(sequence, runner, layer, values, watch).backward_as_last()
    copied.update(_copied(caught, values, watch))
    del caught
    run = _Run(sequence, runner, layer, values, watch)
    relaid = run.relaid(layer, gradients)
    inner, caught = run.backward_as_inner(gradients)
    copied.update(_copied(caught, values, watch))
    gradients.update(caught)
    return ObservedBackward(inner, last, **coming_back, relaid=relaid, copied=tuple(sorted(copied.items())))


class _Run:
    """A forward pass of one layer under watch, to be followed by at most one backward pass."""

    def __init__(
        self,
        sequence: LayerSequence,
        runner: LayerRunner,
        layer: Layer,
        values: Mapping[str, Tensor],
        watch: StorageWatch,
        *,
        gated: bool = True,
    ) -> None:
        self._watch = watch
        self._before = watch.live_bytes
        self._after = {value.name for value in sequence.boundaries[layer.index + 1]}
        entered = runner.enter(layer.index, values, gated=gated)
        self._leaves = {} if gated else entered.leaves
        self._caught = entered.caught
        self._outside = _storages_outside(sequence, layer, entered)
        self._saved: dict[int, Tensor] = {}
        with watch:
            watch.restart()
            with torch.autograd.graph.saved_tensors_hooks(partial(_note, self._saved), lambda tensor: tensor):
                computed = runner.forward(layer.index, entered)
            leaving = runner.leaving(layer.index, entered, computed)
            self._leaving = {name: value for name, value in leaving.items() if name in computed or name in layer.values}
            self._held = runner.by_products(layer.index, computed)
            for tensor in self._held:
                watch.follow(tensor)
            self._peaks = watch.peaks_above(self._before)
            self._workspaces = watch.workspaces
        for value in self._leaving.values():
            if value.requires_grad:
                hook_gradient(value, layout_hook(value))

    def observed(self) -> ObservedForward:
        """What the forward pass showed."""
        own = [tensor for key, tensor in self._saved.items() if key not in self._outside]
        saved, held = self._sizes(own), self._sizes(self._held)
        names: dict[int, list[str]] = {}
        aliases = []
        for name, value in self._leaving.items():
            if storage_of(value) in self._outside:
                aliases.append((name, self._outside[storage_of(value)]))
            else:
                names.setdefault(storage_of(value), []).append(name)
        sizes = self._sizes(self._leaving.values())
        numbers = {self._watch.number_of(tensor) for tensor in own}
        return ObservedForward(
            own_bytes=sum({**saved, **held}.values()),
            held_bytes=sum(held.values()),
            created=tuple(Created(tuple(on), sizes[key], key in saved) for key, on in names.items() if key in sizes),
            aliases=tuple(aliases),
            saved=tuple(self._outside[key] for key in self._saved if key in self._outside),
            peaks=self._peaks,
            workspaces=tuple(
                workspace.model_copy(update={"is_kept": number in numbers}) for number, workspace in self._workspaces
            ),
        )

    def _sizes(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Storage -> bytes of those that the watch knows."""
        return {storage_of(tensor): size for tensor in tensors if (size := self._watch.bytes_of(tensor)) is not None}

    def following(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of what is alive after the layer, unwatched; of the model's output none."""
        alive = dict(values)
        alive.update({name: value.detach().clone() for name, value in self._leaving.items() if name not in alive})
        return {name: value for name, value in alive.items() if name in self._after}

    def relaid(self, layer: Layer, gradients: Mapping[str, Tensor]) -> tuple[tuple[str, int], ...]:
        """See `ObservedBackward`."""
        return tuple(
            (name, gradients[name].nbytes)
            for name, value in self._leaving.items()
            if name in layer.outputs and name in gradients and gradients[name].stride() != value.stride()
        )

    def backward_as_inner(self, gradients: dict[str, Tensor]) -> tuple[Peaks, dict[str, Tensor]]:
        """The largest bytes and the gradients caught; `gradients` of leaving values are taken out and used up."""
        trained = {name: value for name, value in self._leaving.items() if value.requires_grad}
        if self._after:
            trained = {name: value for name, value in trained.items() if name in gradients}
            given = [gradients.pop(name) for name in trained]
        else:
            given = [torch.ones_like(value) for value in trained.values()]
        if not trained:
            return self._backward([], [], before=0)
        start = _GradientSource.apply(given, *trained.values())  # type: ignore[no-untyped-call]
        root, one = get_gradient_edge(start), torch.ones_like(start)
        del trained, given, start
        return self._backward([root], [one], before=0)

    def backward_as_last(self) -> tuple[Peaks, dict[str, Tensor]]:
        """The largest bytes and the gradients caught, with gradients of leaving values that the caller keeps."""
        trained = [value for value in self._leaving.values() if value.requires_grad]
        gradients = [torch.ones_like(value) for value in trained]
        roots = [get_gradient_edge(value) for value in trained]
        del trained
        return self._backward(roots, gradients, before=self._before)

    def copied_at_leaves(self) -> dict[str, int]:
        """Value -> bytes of the copy that autograd makes of its gradient, which something else uses at that moment."""
        came: dict[str, int] = {}
        for name, leaf in self._leaves.items():
            hook_gradient(leaf, partial(_note_storage, came, name))
        self.backward_as_last()
        return {
            name: leaf.nbytes
            for name, leaf in self._leaves.items()
            if leaf.grad is not None and storage_of(leaf.grad) != came[name]
        }

    def _backward(
        self, roots: Sequence[Any], gradients: Sequence[Tensor], *, before: int
    ) -> tuple[Peaks, dict[str, Tensor]]:
        self._saved.clear()
        self._leaving.clear()
        with self._watch:
            self._watch.restart()
            if roots:
                torch.autograd.backward(roots, gradients)
            peaks = self._watch.peaks_above(before)
        self._held.clear()
        return peaks, self._caught


def _note(saved: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Note what autograd saves, without history: an output that holds its own is never let go of."""
    held = tensor if tensor.grad_fn is None else tensor.detach()
    saved[storage_of(held)] = held
    return held


def _note_storage(came: dict[str, int], name: str, gradient: Tensor) -> None:
    came[name] = storage_of(gradient)


class _GradientSource(torch.autograd.Function):
    """A number; its backward pass hands out the gradients that it was given, and keeps none."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *values: Tensor) -> Tensor:
        ctx.gradients = gradients
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients, ctx.gradients = [*ctx.gradients], None
        return (None, *gradients)


def _storages_outside(sequence: LayerSequence, layer: Layer, entered: Entered) -> dict[int, str]:
    """Storage -> name of a value on it, for what the layer reads of earlier layers and of the prelude."""
    outside: dict[int, str] = {}
    for name in layer.values:
        value = entered.values[name]
        if isinstance(value, Tensor) and name not in sequence.inputs:
            outside.setdefault(storage_of(value), name)
    return outside


def _copied(caught: Mapping[str, Tensor], values: Mapping[str, Tensor], watch: StorageWatch) -> dict[str, int]:
    """Value -> bytes of the copy that autograd makes of a gradient when it comes to a leaf."""
    storages = [storage_of(gradient) for gradient in caught.values()]
    return {
        name: values[name].nbytes
        for name, gradient in caught.items()
        if gradient.stride() != values[name].stride()
        or storages.count(storage_of(gradient)) > 1
        or watch.bytes_of(gradient) is None
    }


def returning(
    layer: Layer, gradients: Mapping[str, Tensor], watch: StorageWatch, makers: Mapping[int, int]
) -> dict[str, Any]:
    """The fields of `ObservedBackward` that follow from the gradients of what is alive after the layer."""
    on: dict[int, list[str]] = {}
    for name, gradient in gradients.items():
        number = watch.number_of(gradient)
        if number is not None:  # the caller's own otherwise
            on.setdefault(number, []).append(name)
    touched = {*layer.values, *layer.outputs}
    made = [(makers[number], storage_bytes(gradients[names[0]]), names) for number, names in on.items()]
    return {
        "returning": tuple((name, gradient.nbytes) for name, gradient in gradients.items()),
        "makers": tuple((name, maker, gradients[name].nbytes) for maker, _, names in made for name in names),
        "made": tuple((maker, size) for maker, size, _ in made),
        "passing": tuple((maker, size) for maker, size, names in made if touched.isdisjoint(names)),
    }


def doubled(layer: Layer, gradients: Mapping[str, Tensor]) -> dict[str, int]:
    """Value that passes the layer by -> bytes of its gradient, where it lies on a storage that the layer uses too."""
    touched = {*layer.values, *layer.outputs}
    used = {storage_of(gradient) for name, gradient in gradients.items() if name in touched}
    return {
        name: gradient.nbytes
        for name, gradient in gradients.items()
        if name not in touched and storage_of(gradient) in used
    }
