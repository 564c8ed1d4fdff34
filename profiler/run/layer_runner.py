"""Layers one at a time, as a stage runs them in a row: what is timed, and whose memory is watched.

Each layer gets an autograd graph of its own. The gradient of an entering value is caught as it leaves that graph; a
leaf would copy it where it is shared with another value, which happens in no stage but at its first layer.

    entering value ---> gate ---> layer ---> leaving value
                         |                      |
    caught gradient <----+---- backward pass <--+--- gradient caught at the next layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from profiler.errors import ArgumentError, PlanError, UserFunctionError
from profiler.left_out_sizes import NOT_FAKEABLE, in_one_line, is_out_of_memory
from profiler.machine.backend import device_of_first
from profiler.run.layouts import layout_hook
from profiler.run.loss import LOSS, LossFunction, copy_of, loss_of, model_output, versions_of
from profiler.run.parameter_pool import ParameterPool
from profiler.run.separable import deferrable, deferred_parameters, split_function
from profiler.run.split_backward import DeferredWeights, deferring
from profiler.run.stage_function import StageFunction
from profiler.torch_private import storage_of
from profiler.tracing.export import autocasting
from profiler.tracing.sequence import LayerSequence


class _Gate(torch.autograd.Function):
    """The identity; its backward pass puts the gradient into a dict and stops."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, caught: dict[str, Tensor], name: str) -> Tensor:
        ctx.caught, ctx.name = caught, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.name] = gradients[0]
        return None, None, None


def _gate(value: Tensor, caught: dict[str, Tensor], name: str) -> Tensor:
    """The value behind a gate that puts its gradient into `caught[name]`."""
    result: Tensor = _Gate.apply(value, caught, name)  # type: ignore[no-untyped-call]
    return result


@dataclass(slots=True)
class Entered:
    """A layer about to run.

    Attributes:
        values: everything alive at the boundary before it, by name, behind gates or as leaves.
        caught: gradients of entering values, filled by the backward pass; without gates none.
        leaves: of the layer's autograd graph, by name.
    """

    values: dict[str, Tensor]
    caught: dict[str, Tensor]
    leaves: dict[str, Tensor]


@dataclass(slots=True)
class Kept:
    """A layer between its forward and its backward pass.

    Attributes:
        roots: where the gradients of leaving values enter, by name.
        caught: gradients of entering values, filled by the backward pass.
        layout_hooks: by name of what the layer computes; a stage has them, and kernels compute by what they bring.
    """

    roots: dict[str, GradientEdge]
    caught: dict[str, Tensor]
    layout_hooks: dict[str, Callable[[Tensor], Tensor | None]]


@dataclass(frozen=True, slots=True)
class Uncut:
    """Several layers in one autograd graph.

    Attributes:
        function: runs them.
        is_last: whether the last layer is among them.
    """

    function: StageFunction
    is_last: bool


class LayerRunner:
    """Runs any layer of a sequence on one micro-batch.

    Args:
        sequence: the layers.
        parameters: by (layer index, name), on the device or in a pool that brings them there; `.grad` is what the
            backward pass adds to.
        buffers: by name, on the device.
        inputs: the micro-batch's inputs by name, on the device.
        loss_fn: computes the loss from the model's output and the target.
        target: of the micro-batch.
        has_loss: whether the last layer ends with a loss, of `loss_fn` or the model's own.
    """

    def __init__(
        self,
        sequence: LayerSequence,
        parameters: Mapping[tuple[int, str], Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        *,
        loss_fn: LossFunction | None,
        target: Any,
        has_loss: bool,
    ) -> None:
        self._sequence = sequence
        self._parameters = parameters
        self._buffers = buffers
        self._inputs = inputs
        self._loss_fn = loss_fn
        self._target, self._own_target = target, copy_of(target)
        self._has_loss = has_loss
        read = dict.fromkeys(name for layer in sequence.layers for name in layer.values)
        read.update(dict.fromkeys(leaf for leaf in sequence.outputs if isinstance(leaf, str)))
        self._prelude_function = sequence.prelude_of([name for name in read if name in sequence.prelude_names])
        self._prelude: dict[str, Tensor] = {}
        self._device = device_of_first(inputs.values())
        self._split: dict[int, Callable[..., Any]] = {}

    def on_part(self, inputs: Mapping[str, Tensor], target: Any) -> LayerRunner:
        """A runner with the same parameters and buffers on another micro-batch."""
        part = copy(self)
        part._inputs, part._prelude = inputs, {}
        part._target, part._own_target = target, copy_of(target)
        return part

    def run_prelude(self) -> None:
        """Compute what every stage computes for itself; it comes before the first layer."""
        prelude = self._prelude_function
        sources = [self._buffers[name] for name in prelude.buffers] + [self._inputs[name] for name in prelude.inputs]
        with self._autocasting():
            self._prelude = dict(zip(prelude.names, prelude.function(*sources), strict=True))

    @property
    def device(self) -> torch.device:
        """Where the layers run."""
        return self._device

    def hold(self, layers: range) -> None:
        """Have the parameters of these layers on the device before they are run."""
        if isinstance(self._parameters, ParameterPool):
            self._parameters.hold(layers)

    @property
    def sources(self) -> dict[str, Tensor]:
        """What every stage has: the model's inputs and the prelude's values."""
        return {**self._inputs, **self._prelude}

    def enter(self, index: int, values: Mapping[str, Tensor], *, gated: bool = True) -> Entered:
        """Prepare a layer.

        What it writes in place is copied; a stage writes what it created itself.

        Args:
            index: of the layer.
            values: alive at the boundary before it, detached.
            gated: put a gate before each value with a gradient; otherwise they are leaves, as in a stage.
        """
        layer = self._sequence.layers[index]
        entered = Entered(self.sources, {}, {})
        for value in self._sequence.boundaries[index]:
            detached = values[value.name].detach()
            if value.requires_grad:
                leaf = entered.leaves[value.name] = detached.requires_grad_()
                detached = _gate(leaf, entered.caught, value.name) if gated else leaf
            entered.values[value.name] = detached
        for name in layer.in_place:
            entered.values[name] = entered.values[name].clone()
        return entered

    def deferred(self, index: int) -> tuple[bool, ...]:
        """Which of a layer's parameters get their gradients in a pass of their own, if the backward pass is split."""
        layer = self._sequence.layers[index]
        read = [self._sequence.parameters[name] for name in layer.parameters]
        able = deferrable(layer.function, len(read))
        return tuple(one and parameter.requires_grad for one, parameter in zip(able, read, strict=True))

    def store(self, index: int, *, watching: bool) -> DeferredWeights:
        """For a layer's gradients that can wait; if it watches, what lives without them is none of what they keep."""
        parameters = [self._parameters[index, name] for name in self._sequence.layers[index].parameters]
        held = [*self.sources.values(), *parameters]
        return DeferredWeights(watching, frozenset(storage_of(value) for value in held if isinstance(value, Tensor)))

    def forward(self, index: int, entered: Entered, *, store: DeferredWeights | None = None) -> dict[str, Tensor]:
        """The layer's forward pass; after the last layer the loss if there is one.

        Args:
            index: of the layer.
            entered: it, prepared.
            store: takes the gradients that can wait for a pass of their own, if the backward pass is split.

        Returns:
            What the layer computes and what of that is read later.
        """
        layer = self._sequence.layers[index]
        function = layer.function
        if store is not None:
            if index not in self._split:
                self._split[index] = split_function(function, self.deferred(index))
            function = self._split[index]
        with self._autocasting(), deferring(store):
            outputs = function(
                *[self._parameters[index, name] for name in layer.parameters],
                *[self._buffers[name] for name in layer.buffers],
                *[entered.values[name] for name in layer.values],
            )
            computed = dict(zip(layer.outputs, outputs, strict=True))
            if index == len(self._sequence) - 1 and self._has_loss:
                output = model_output(self._sequence, {**entered.values, **computed})
                computed[LOSS] = self._loss(output)
        return computed

    def leaving(self, index: int, entered: Entered, computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is alive after a layer, by name, attached to its graph."""
        if index < len(self._sequence) - 1:
            names = [value.name for value in self._sequence.boundaries[index + 1]]
        elif self._has_loss:
            names = [LOSS]
        else:
            names = [leaf for leaf in self._sequence.outputs if isinstance(leaf, str)]
        return {name: computed[name] if name in computed else entered.values[name] for name in names}

    def run_all(self) -> Any:
        """The model's output: all layers in one autograd graph, from inputs that may be overwritten."""
        self.run_prelude()
        alive: dict[str, Tensor] = {}
        computed: dict[str, Tensor] = {}
        for layer in self._sequence.layers:
            entered = Entered({**self.sources, **alive}, {}, {})
            computed = self.forward(layer.index, entered)
            alive = {**alive, **computed}
        return model_output(self._sequence, {**self.sources, **alive})

    def uncut(self, first: int, stop: int, *, splits: bool = False) -> Uncut:
        """Layers `first` to `stop - 1` as one function for `run_uncut`, in whose backward pass weights can wait."""
        parameters = {
            (layer.index, name): self._parameters[layer.index, name]
            for layer in self._sequence.layers[first:stop]
            for name in layer.parameters
        }
        deferred = deferred_parameters(self._sequence.layers[first:stop], parameters) if splits else frozenset()
        function = StageFunction(self._sequence, first, stop, parameters, device=self._device, deferred=deferred)
        return Uncut(function, stop == len(self._sequence))

    def run_uncut(
        self, uncut: Uncut, leaves: dict[str, Tensor], *, store: DeferredWeights | None = None
    ) -> dict[str, Tensor]:
        """The forward pass of several layers at once; returns what leaves them, attached to their graph.

        Args:
            uncut: the layers.
            leaves: the values that enter.
            store: takes what can wait of their backward pass.
        """
        values = uncut.function.forward(leaves, self._inputs, self._buffers, store=store).values
        if not (uncut.is_last and self._has_loss):
            return values
        with self._autocasting():
            return {LOSS: self._loss(model_output(self._sequence, values))}

    def _loss(self, output: Any) -> Tensor:
        """The loss; what the user's function raises is told as the user's, unless the memory ran out.

        Each call finds the target as it was given, and the user's own stays as it is.
        """
        versions = versions_of(self._own_target)
        try:
            loss = loss_of(output, self._own_target, self._loss_fn)
        except PlanError:
            raise
        except Exception as problem:
            if self._loss_fn is None or is_out_of_memory(problem):
                raise
            raise UserFunctionError(_about_loss(problem)) from problem
        if versions_of(self._own_target) != versions:
            self._own_target = copy_of(self._target)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ArgumentError(
                "the loss depends on no trainable parameter, so there is nothing to train; check loss_fn for detach() "
                "or integers, and the model for requires_grad"
            )
        return loss

    def _autocasting(self) -> AbstractContextManager[object]:
        return autocasting(self._sequence.sample, self._device)

    def by_products(self, index: int, computed: Mapping[str, Tensor]) -> list[Tensor]:
        """What a stage holds of each micro-batch until the end of the step: statistics and new values of buffers."""
        layer = self._sequence.layers[index]
        names = [name for _, name in layer.written_buffers]
        for entry in layer.statistics:
            names.extend((entry.mean, entry.variance, entry.count))
        return [computed[name] for name in names]


def _about_loss(problem: Exception) -> str:
    if isinstance(problem, NOT_FAKEABLE):
        return (
            f"loss_fn depends on values ({in_one_line(problem)}), which are not there where devices are planned for "
            "from data sheets; pass one without .item() and without selecting by a mask, such as cross_entropy(..., "
            "ignore_index=...), or profile on a device at hand"
        )
    return (
        f"loss_fn(output, target) raised {in_one_line(problem)}; check it on the model's own output and the target, "
        "which has the batch as dimension 0"
    )


def keep(entered: Entered, leaving: Mapping[str, Tensor]) -> Kept:
    """What the backward pass needs; unlike the values it keeps no memory alive that autograd does not."""
    trained = {name: value for name, value in leaving.items() if value.requires_grad}
    hooks = {name: layout_hook(value) for name, value in trained.items() if name not in entered.values}
    return Kept({name: get_gradient_edge(value) for name, value in trained.items()}, entered.caught, hooks)


def backward(kept: Kept, gradients: Mapping[str, Tensor]) -> Callable[[], None]:
    """The backward pass of a layer, ready to be called."""
    names = [name for name in kept.roots if name in gradients]
    roots, starts = [kept.roots[name] for name in names], [gradients[name] for name in names]
    hooks = [kept.layout_hooks.get(name) for name in names]
    kept.roots = {}
    if not roots:
        return lambda: None
    return lambda: torch.autograd.backward(roots, [*map(_laid_out, starts, hooks)])


def _laid_out(gradient: Tensor, hook: Callable[[Tensor], Tensor | None] | None) -> Tensor:
    brought = hook(gradient) if hook else None
    return gradient if brought is None else brought
