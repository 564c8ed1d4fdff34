"""What a call's arguments mean: the shapes that they have, their micro-batches, and the programs that carry them out.

Shapes may be others than planned where the model takes them; the layers are then traced anew, once for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from executor.layout import Layout
from executor.micro_batch import check_target, samples_of_replicas, sizes_for, split_input, split_target
from executor.placement import Placement
from executor.program import Program, compiled
from executor.stage_runner import MicroBatch, StageLayers
from planner.plan import Plan
from profiler.errors import ArgumentError, NotTraceableError
from profiler.sample import batch_extent, of_other_shapes, tensor_leaves
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.sequence import LayerSequence
from profiler.tracing import trace_again, trace_evaluation


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, checked and cut.

    Attributes:
        spec: their shapes.
        training: whether it trains.
        sequence: the model's layers for these shapes.
        own: micro-batches of each replica of this process.
        counts: how many micro-batches each replica of the plan has.
    """

    spec: SampleSpec
    training: bool
    sequence: LayerSequence
    own: list[list[MicroBatch]]
    counts: list[int]


@dataclass(frozen=True)
class _Version:
    """The model's layers in one mode and for inputs of one kind, and this process's stages of them."""

    sequence: LayerSequence
    layers: dict[int, StageLayers]

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Inputs of the model that this process reads."""
        return frozenset(name for layers in self.layers.values() for name in layers.inputs)

    @property
    def has_loss(self) -> bool:
        """Whether this process computes the loss."""
        return any(layers.is_last for layers in self.layers.values())


class Calls:
    """Understands the calls of one process.

    Args:
        model: what is traced for other shapes.
        plan: the plan.
        layout: of this process.
        sequence: the model's layers as planned.
        devices: of this process's stages.
        placement: of the model's tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        layout: Layout,
        sequence: LayerSequence,
        devices: Mapping[int, torch.device],
        placement: Placement,
    ) -> None:
        self._model = model
        self._plan = plan
        self._layout = layout
        self._sequence = sequence
        self._devices = devices
        self._placement = placement
        # A batch normalization needs two samples, unless each of them holds more than one element for a channel.
        self._at_least = 2 if any(layer.statistics for layer in sequence.layers) else 1
        self._versions: dict[tuple[SampleSpec, bool], _Version] = {}
        self._programs: dict[tuple[SampleSpec, bool, tuple[int, ...]], Program] = {}

    def understood(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool) -> Call:
        """The arguments of a call.

        Raises:
            ArgumentError: they differ from what the model was traced with, or make up no micro-batches.
        """
        if args and kwargs:
            raise ArgumentError("pass the model's arguments all by position or all by keyword, as in the sample")
        spec, tensors = self._shaped(kwargs if kwargs else args, training=training)
        batch_size = batch_extent(tensors, spec)
        at_least = self._at_least if training else 1
        sizes = [
            sizes_for(samples, self._plan.micro_batch_sizes, spec.only_micro_batch_size, at_least=at_least)
            for samples in samples_of_replicas(batch_size, self._plan.replicas)
        ]
        flat = [size for own in sizes for size in own]
        version = self._version(spec, training=training)
        dims = [leaf.batch_dim for leaf in spec.leaves if isinstance(leaf, TensorLeaf)]
        inputs = {
            name: split_input(tensor, dim, flat)
            for name, tensor, dim in zip(self._sequence.inputs, tensors, dims, strict=True)
            if name in version.inputs
        }
        if version.has_loss:
            targets = split_target(target, flat)
        else:
            check_target(target, batch_size)
            targets = [None] * len(flat)
        batches = [
            MicroBatch(index, size, size / batch_size, {name: parts[index] for name, parts in inputs.items()}, part)
            for index, (size, part) in enumerate(zip(flat, targets, strict=True))
        ]
        counts = [len(own) for own in sizes]
        bounds = list(accumulate(counts, initial=0))
        own_replicas = [batches[bounds[replica] : bounds[replica + 1]] for replica in self._layout.own_replicas]
        return Call(spec, training, version.sequence, own_replicas, counts)

    def program(self, call: Call, batches: Sequence[MicroBatch]) -> Program:
        """What this process does with one replica's micro-batches; compiled when first needed."""
        sizes = tuple(batch.size for batch in batches)
        known = self._programs.get((call.spec, call.training, sizes))
        if known is None:
            version = self._version(call.spec, training=call.training)
            known = self._programs[call.spec, call.training, sizes] = compiled(
                self._plan,
                self._layout,
                version.layers,
                self._devices,
                sizes,
                training=call.training,
            )
        return known

    def _shaped(self, sample: Any, *, training: bool) -> tuple[SampleSpec, list[Tensor]]:
        """The tensors of a call, and what it is called with: as planned, or of other shapes that the model takes."""
        planned = self._sequence.sample
        try:
            return planned, tensor_leaves(sample, planned)
        except ArgumentError as problem:
            other = of_other_shapes(sample, planned)
            if other is None:
                raise
            tensors = tensor_leaves(sample, other)
            try:
                self._version(other, training=training)
            except NotTraceableError as reason:
                raise ArgumentError(f"{problem}; with these shapes: {reason}") from reason
            return other, tensors

    def _version(self, spec: SampleSpec, *, training: bool) -> _Version:
        """This process's layers as they train or evaluate on inputs of these shapes; traced when first needed."""
        key = (spec, training)
        if key not in self._versions:
            self._versions[key] = self._training_version(spec) if training else self._evaluation_version(spec)
        return self._versions[key]

    def _training_version(self, spec: SampleSpec) -> _Version:
        planned = spec == self._sequence.sample
        sequence = self._sequence if planned else trace_again(self._model, self._sequence, spec)
        layers = {}
        for index in self._layout.stages:
            stage = self._plan.stages[index]
            here, own = sequence.on(self._devices[index]), self._placement.read_by[index]
            past = {name for skip in self._plan.skips if skip.passes_by(index) for name in skip.values}
            layers[index] = StageLayers(
                here, stage.first_layer, stage.stop_layer, stage.recompute, own, past=frozenset(past)
            )
        return _Version(sequence, layers)

    def _evaluation_version(self, spec: SampleSpec) -> _Version:
        """Each stage is one layer then."""
        planned = [range(stage.first_layer, stage.stop_layer) for stage in self._plan.stages]
        sequence = trace_evaluation(self._model, self._sequence, spec, planned)
        layers = {}
        for index in self._layout.stages:
            device = self._devices[index]
            own = {(index, name): tensor for (_, name), tensor in self._placement.read_by[index].items()}
            constants = {
                name: tensor.to(device) for name, tensor in sequence.buffers.items() if name not in sequence.aliases
            }
            layers[index] = StageLayers(sequence.on(device), index, index + 1, (), own, constants)
        return _Version(sequence, layers)
