"""A stage as an ordinary `nn.Module` of tensors, for engines that run modules one after the other.

    inputs ---> StageModule 0 ---> tensors ---> StageModule 1 ---> tensors ---> ... ---> leaves of the model's output

What one returns is what the next one takes: the values that cross the boundary, and those inputs of the model that a
later stage reads. Values that a stage does not read pass through it, so neighbours alone exchange tensors, whatever
skips the model has. Its parameters are the model's own, under their original names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.plan.stage import Stage
from profiler.errors import ArgumentError, InfeasibleError
from profiler.machine.backend import device_of_first
from profiler.run.stage_function import StageFunction
from profiler.sample_spec import TensorLeaf
from profiler.text import counted
from profiler.tracing.sample import torch_dtype
from profiler.tracing.sequence import BoundaryValue, LayerSequence


def crossing(sequence: LayerSequence, position: int) -> tuple[str, ...]:
    """Names of the tensors between two stages, in the order in which they are handed on.

    Args:
        sequence: the layers.
        position: of the boundary; at 0 all inputs of the model, at the end the tensors of its output, each once.
    """
    if position == 0:
        return sequence.inputs
    outputs = tuple(dict.fromkeys(leaf for leaf in sequence.outputs if isinstance(leaf, str)))
    if position == len(sequence):
        return outputs
    read = dict.fromkeys(name for layer in sequence.layers[position:] for name in layer.values)
    read.update(dict.fromkeys(outputs))
    prelude = sequence.prelude_of([name for name in read if name in sequence.prelude_names])
    needed = {*prelude.inputs, *read}
    return (
        *(value.name for value in sequence.boundaries[position]),
        *(name for name in sequence.inputs if name in needed),
    )


class ContiguousGradient(torch.autograd.Function):
    """The value as it is; its gradient in one piece, without which torch's engine refuses to send it back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """A view, for autograd to have a node."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """A copy where it is in no piece."""
        return gradient.contiguous()


def _with_contiguous_gradient(value: Tensor) -> Tensor:
    if not value.requires_grad:
        return value
    found: Tensor = ContiguousGradient.apply(value)  # type: ignore[no-untyped-call]
    return found


class _OneNode(torch.autograd.Function):
    """Copies, which are one node of autograd's graph together.

    Where torch's engine splits the backward pass, it finds a parameter's gradient by a node that what the stage takes
    leads to as well: without this one a parameter that leads to another result alone would get none.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _in_one_node(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of all values, those with gradients by `_OneNode`."""
    differentiable = [value for value in values if value.requires_grad]
    copies: tuple[Tensor, ...] = _OneNode.apply(*differentiable)  # type: ignore[no-untyped-call]
    left = iter(copies)
    return tuple(next(left) if value.requires_grad else value.clone() for value in values)


class StageModule(nn.Module):
    """The layers of one stage; `forward(*tensors)` returns a tuple of tensors.

    Recomputed segments are recomputed by `torch.utils.checkpoint`. Random numbers are those of torch's global
    generators, as in the model itself. It is always in the mode, training or evaluation, in which the model was traced.

    Args:
        sequence: the layers of the model.
        stage: which of them, and what is recomputed.
        splits_backward: whether torch's engine splits its backward pass. Then it detaches results in place, which it
            can do neither with views nor with what an operation of the stage has saved, too, so results are copies.
    """

    def __init__(self, sequence: LayerSequence, stage: Stage, *, splits_backward: bool = False) -> None:
        super().__init__()
        self._splits_backward = splits_backward
        self._sequence = sequence
        self._first, self._stop = stage.first_layer, stage.stop_layer
        self._segments = frozenset((segment.first, segment.stop) for segment in stage.recompute)
        self._takes = crossing(sequence, self._first)
        self._returns = crossing(sequence, self._stop)
        self._read: dict[str, str] = {}
        """Name in the graph of each parameter and buffer -> its path in this module."""
        layers = range(self._first, self._stop)
        parameters = {name for index in layers for name in sequence.layers[index].parameters}
        for name in sorted(parameters | _buffers(sequence, layers)):
            self._hold(name)
        self._functions: tuple[StageFunction, ...] = ()
        self._made_for: tuple[object, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the layers on a micro-batch."""
        if len(tensors) != len(self._takes):
            raise ArgumentError(
                f"layers {self._first} to {self._stop - 1} take {counted(len(self._takes), 'tensor')} "
                f"({', '.join(self._takes)}), and {len(tensors)} came"
            )
        if self._splits_backward:
            tensors = tuple(_with_contiguous_gradient(tensor) for tensor in tensors)
        values = dict(zip(self._takes, tensors, strict=True))
        inputs = {name: tensor for name, tensor in values.items() if name in self._sequence.inputs}
        held = {name: self._at(path) for name, path in self._read.items()}
        for function, span in zip(self._on(held, tensors), self._spans(), strict=True):
            values |= self._run(function, values, inputs, held, recomputed=span in self._segments)
        given = {id(tensor) for tensor in tensors}
        leaving = [values[name].contiguous() for name in self._returns]
        if self._stop == len(self._sequence):  # engines join what micro-batches return
            leaving = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in leaving]
        if self._splits_backward:
            return _in_one_node(leaving)
        # A tensor that only passes through leaves as a view, since engines detach or differentiate what leaves.
        return tuple(tensor.view_as(tensor) if id(tensor) in given else tensor for tensor in leaving)

    def train(self, mode: bool = True) -> StageModule:
        """Refuse another mode than the model was traced in: its layers would not follow.

        Raises:
            ArgumentError: it is another one.
        """
        if not mode:
            raise ArgumentError(
                "a stage holds the layers of the model as it trains, dropout included, and cannot be switched to "
                "evaluation; evaluate with the model itself, whose parameters these are"
            )
        return super().train(mode)

    def _spans(self) -> list[tuple[int, int]]:
        """The stage in parts, of which each is recomputed as a whole or not at all."""
        ends = {end for segment in self._segments for end in segment}
        return list(pairwise(sorted({self._first, self._stop, *ends})))

    def _hold(self, name: str) -> None:
        """Register a parameter or buffer of the model, or a constant of the graph, under its original name."""
        sequence = self._sequence
        path = sequence.aliases.get(name, (name,))[0]
        *folders, last = path.split(".")
        owner: nn.Module = self
        for folder in folders:
            inner = owner._modules.get(folder)
            if inner is None:
                inner = nn.Module()
                owner.add_module(folder, inner)
            owner = inner
        if name in sequence.parameters:
            owner.register_parameter(last, sequence.parameters[name])
        else:
            owner.register_buffer(last, sequence.buffers[name])
        self._read[name] = path

    def _at(self, path: str) -> Tensor:
        owner, _, last = path.rpartition(".")
        module = self.get_submodule(owner)
        found = module._parameters.get(last)
        return found if found is not None else module._buffers[last]  # type: ignore[return-value]

    def _on(self, held: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[StageFunction, ...]:
        """The layers' functions with these parameters, which `Module.to` may have replaced."""
        sequence = self._sequence
        device = device_of_first(held.values()) if held else device_of_first(tensors)
        made_for = (device, *(id(held[name]) for name in held if name in sequence.parameters))
        if made_for != self._made_for:
            there = sequence.on(device)
            layers = there.layers[self._first : self._stop]
            parameters = {(layer.index, name): held[name] for layer in layers for name in layer.parameters}
            self._functions = tuple(
                StageFunction(there, first, stop, parameters, device=device) for first, stop in self._spans()
            )
            self._made_for = made_for
        return self._functions

    def _run(
        self,
        function: StageFunction,
        values: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        recomputed: bool,
    ) -> dict[str, Tensor]:
        entering = [value.name for value in function.entering]

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = function.forward(dict(zip(entering, tensors, strict=True)), inputs, buffers)
            return tuple(results.values[name] for name in function.leaving)

        tensors = [values[name] for name in entering]
        if recomputed and torch.is_grad_enabled():
            left = checkpoint(run, *tensors, use_reentrant=False)
        else:
            left = run(*tensors)
        return dict(zip(function.leaving, left, strict=True))


def output_values(sequence: LayerSequence, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The values of the model's output by name, from what the last stage returned for a micro-batch."""
    names = crossing(sequence, len(sequence))
    return {
        name: tensor.reshape(()) if sequence.output_shapes[name] == () else tensor
        for name, tensor in zip(names, tensors, strict=True)
    }


def check_outputs(sequence: LayerSequence) -> None:
    """Refuse a model that returns a number, which no stage can hand on.

    Raises:
        InfeasibleError: it does.
    """
    for name in crossing(sequence, len(sequence)):
        if sequence.output_shapes[name] is None:
            raise InfeasibleError(
                f"the model returns the number {name!r}, and stages exchange tensors; let it return a tensor, or not "
                "return it"
            )


def _buffers(sequence: LayerSequence, layers: range) -> set[str]:
    """Buffers and constants that these layers read, or what a stage computes before them."""
    chosen = sequence.layers[layers.start : layers.stop]
    read = {name for layer in chosen for name in layer.values}
    if layers.stop == len(sequence):
        read |= {leaf for leaf in sequence.outputs if isinstance(leaf, str)}
    prelude = sequence.prelude_of([name for name in sorted(read) if name in sequence.prelude_names])
    return {*prelude.buffers, *(name for layer in chosen for name in layer.buffers)}


def examples(sequence: LayerSequence, position: int, micro_batch_size: int) -> tuple[Tensor, ...]:
    """Tensors without data, shaped like those that cross a boundary for a micro-batch of that size.

    At the end of the model there is one that stands for all, since nobody receives them.
    """
    if position == len(sequence):
        return (torch.empty(0, device="meta"),)
    inputs = _input_examples(sequence, micro_batch_size)
    if position == 0:
        return tuple(inputs.values())
    sent = {value.name: value for value in sequence.boundaries[position]}
    return tuple(
        inputs[name] if name in inputs else _example(sent[name], micro_batch_size)
        for name in crossing(sequence, position)
    )


def _example(value: BoundaryValue, micro_batch_size: int) -> Tensor:
    shape = value.shape_at(micro_batch_size)
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def _input_examples(sequence: LayerSequence, micro_batch_size: int) -> dict[str, Tensor]:
    leaves = (leaf for leaf in sequence.sample.leaves if isinstance(leaf, TensorLeaf))
    return {
        name: torch.empty(
            [micro_batch_size if dim == leaf.batch_dim else extent for dim, extent in enumerate(leaf.shape)],
            dtype=torch_dtype(leaf.dtype),
            device="meta",
        )
        for name, leaf in zip(sequence.inputs, leaves, strict=True)
    }
