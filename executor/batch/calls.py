"""What a call's arguments mean: the shapes that they have, their micro-batches, and the programs that carry them out.

    arguments --understood--> Batch --part--> what one process reads of it --cut--> Call: that process's micro-batches

Shapes may be others than planned where the model takes them; the layers are then traced anew, once for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor, nn

from executor.layout import Layout
from executor.run.micro_batch import (
    check_target,
    samples_of_replicas,
    sizes_for,
    some_samples,
    split_input,
    split_target,
    target_of,
)
from executor.run.program import Program, compiled_program
from executor.run.stage_runner import MicroBatch, StageLayers
from executor.state.placement import Placement
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from profiler.errors import ArgumentError, NotTraceableError
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.text import counted
from profiler.tracing.sample import (
    TRACED_BATCH_SIZE_AT_LEAST,
    batch_extent,
    of_other_shapes,
    tensor_leaves,
    without_arguments,
)
from profiler.tracing.sequence import LayerSequence
from profiler.tracing.tracing import trace_again, trace_evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The model's layers in one mode and for inputs of one kind.

    Attributes:
        sequence: all of them.
        layers: those of this process, by stage.
        programs: what it does with micro-batches of these sizes.
    """

    sequence: LayerSequence
    layers: dict[int, StageLayers]
    programs: dict[tuple[int, ...], Program] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, checked and cut.

    Attributes:
        training: whether it trains.
        version: the model's layers for them.
        own: micro-batches of each replica of this process.
        counts: how many micro-batches each replica of the plan has.
    """

    training: bool
    version: Version
    own: list[list[MicroBatch]]
    counts: tuple[int, ...]

    @property
    def sequence(self) -> LayerSequence:
        """All layers of the model."""
        return self.version.sequence


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What a batch looks like, which is all that a process has to know of it in addition to its part.

    Attributes:
        spec: of the arguments.
        batch_size: samples of all replicas.
        training: whether the call trains.
    """

    spec: SampleSpec
    batch_size: int
    training: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of a call, checked.

    Attributes:
        form: what they look like.
        inputs: the model's inputs by name, for the whole batch.
        target: likewise.
    """

    form: BatchForm
    inputs: dict[str, Tensor]
    target: Any


@dataclass(frozen=True, slots=True)
class Part:
    """What one process reads of a batch: samples of its own replicas.

    Attributes:
        inputs: by name, those that its stages read.
        target: None if it has no loss to compute.
    """

    inputs: dict[str, Tensor]
    target: Any


@dataclass(frozen=True, slots=True)
class WholeMicroBatch:
    """All that the model is called with for one micro-batch, whichever stage reads it.

    Attributes:
        sequence: the model's layers for it.
        size: samples.
        inputs: the model's inputs by name.
        target: what the loss is computed with.
    """

    sequence: LayerSequence
    size: int
    inputs: dict[str, Tensor]
    target: Any


@dataclass(frozen=True, slots=True)
class _Outline:
    """What follows from a batch's form.

    Attributes:
        form: of the batch.
        version: the model's layers for it.
        dims: by input the dimension that its samples lie along; None if every micro-batch gets it whole.
        sizes: of the micro-batches of each replica.
        counts: how many these are.
        parts: by process the inputs that it reads, in the model's order, whether it reads the target, and its samples.
        own: index, size and weight of each micro-batch, for each replica of this process.
    """

    form: BatchForm
    version: Version
    dims: dict[str, int | None]
    sizes: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    parts: tuple[tuple[tuple[str, ...], bool, range], ...]
    own: tuple[tuple[tuple[int, int, float], ...], ...]


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
        self._outlines: dict[bool, _Outline] = {}  # the last ones that trained and evaluated
        self._versions: dict[tuple[SampleSpec, bool], Version] = {}

    def understood(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool, may_lack: bool = False
    ) -> Batch:
        """The arguments of a call; `may_lack` says whether some may be left out that training has, such as labels.

        Raises:
            ArgumentError: they differ from what the model was traced with, or make up no micro-batches.
        """
        if args and kwargs:
            raise ArgumentError(
                f"{next(iter(kwargs))!r} is given by keyword and {counted(len(args), 'argument')} by position; pass "
                "the model's arguments all by position or all by keyword, as in the sample, and what loss_fn compares "
                "with as target="
            )
        spec, tensors = self._shaped(kwargs if kwargs else args, training=training, may_lack=may_lack)
        if training and not self._layout.alone and any(tensor.requires_grad for tensor in tensors):
            raise ArgumentError(
                "an input of the model requires a gradient, and each process would add up a part of it; pass it "
                "detached, or make what is to be trained a parameter of the model"
            )
        form = BatchForm(spec, batch_extent(tensors, spec), training)
        inputs = self._outline(form).version.sequence.inputs
        check_target(target, form.batch_size)
        return Batch(form, dict(zip(inputs, tensors, strict=True)), target)

    def batch_dims(self, form: BatchForm) -> dict[str, int | None]:
        """Of each input the dimension that its samples lie along; None if every micro-batch gets it whole."""
        return self._outline(form).dims

    def part(self, batch: Batch, process: int) -> Part:
        """What a process reads of a batch; views of it."""
        outline = self._outline(batch.form)
        names, reads_target, samples = outline.parts[process]
        inputs = {name: some_samples(batch.inputs[name], outline.dims[name], samples) for name in names}
        return Part(inputs, target_of(batch.target, samples) if reads_target else None)

    def cut(self, form: BatchForm, part: Part) -> Call:
        """The micro-batches of this process."""
        outline = self._outline(form)
        flat = [size for replica in outline.own for _, size, _ in replica]
        names = tuple(part.inputs)
        split = [split_input(tensor, outline.dims[name], flat) for name, tensor in part.inputs.items()]
        targets = iter(split_target(part.target, flat))
        inputs = zip(*split, strict=True) if split else repeat(())
        own = [
            [
                MicroBatch(index, size, weight, dict(zip(names, values, strict=True)), target)
                for (index, size, weight), values, target in zip(replica, inputs, targets, strict=False)
            ]
            for replica in outline.own
        ]
        return Call(form.training, outline.version, own, outline.counts)

    def first_micro_batch(self, batch: Batch) -> WholeMicroBatch:
        """The first of the first replica, with all that the model reads; views of the batch.

        One of a single sample gets a second: the model was traced for several, and what it does with one may differ
        (`reshape` copies, or does not).
        """
        outline = self._outline(batch.form)
        size = outline.sizes[0][0]
        if batch.form.spec.only_micro_batch_size is None:
            size = min(max(size, TRACED_BATCH_SIZE_AT_LEAST), batch.form.batch_size)
        samples = range(size)
        inputs = {name: some_samples(tensor, outline.dims[name], samples) for name, tensor in batch.inputs.items()}
        return WholeMicroBatch(outline.version.sequence, size, inputs, target_of(batch.target, samples))

    def _outline(self, form: BatchForm) -> _Outline:
        known = self._outlines.get(form.training)
        if known is None or known.form != form:
            known = self._outlines[form.training] = self._outlined(form)
        return known

    def _outlined(self, form: BatchForm) -> _Outline:
        plan, layout = self._plan, self._layout
        version = self._version(form.spec, training=form.training)
        sequence = version.sequence
        at_least = self._at_least if form.training else 1
        samples = samples_of_replicas(form.batch_size, plan.replicas)
        sizes = tuple(
            sizes_for(count, plan.micro_batch_sizes, form.spec.only_micro_batch_size, at_least=at_least)
            for count in samples
        )
        read = [
            inputs_read(sequence, *((stage.first_layer, stage.stop_layer) if form.training else (index, index + 1)))
            for index, stage in enumerate(plan.stages)
        ]
        bounds = list(accumulate(samples, initial=0))
        parts = []
        for process in range(layout.processes):
            stages, replicas = layout.stages_of(process), layout.replicas_of(process)
            names = tuple(name for name in sequence.inputs if any(name in read[stage] for stage in stages))
            parts.append((names, plan.K - 1 in stages, range(bounds[replicas[0]], bounds[replicas[-1] + 1])))
        leaves = (leaf for leaf in form.spec.leaves if isinstance(leaf, TensorLeaf))
        dims = {name: leaf.batch_dim for name, leaf in zip(sequence.inputs, leaves, strict=True)}
        counts = tuple(map(len, sizes))
        own = tuple(
            tuple((sum(counts[:replica]) + at, size, size / form.batch_size) for at, size in enumerate(sizes[replica]))
            for replica in layout.own_replicas
        )
        return _Outline(form, version, dims, sizes, counts, tuple(parts), own)

    def program(self, call: Call, batches: Sequence[MicroBatch]) -> Program:
        """What this process does with one replica's micro-batches; compiled when first needed."""
        sizes = tuple([batch.size for batch in batches])
        programs = call.version.programs
        known = programs.get(sizes)
        if known is None:
            known = programs[sizes] = compiled_program(
                self._plan,
                self._layout,
                call.version.layers,
                self._devices,
                sizes,
                training=call.training,
            )
        return known

    def _shaped(self, sample: Any, *, training: bool, may_lack: bool) -> tuple[SampleSpec, list[Tensor]]:
        """The tensors of a call, and what it is called with: as planned, or of other shapes that the model takes."""
        planned = self._sequence.sample
        try:
            return planned, tensor_leaves(sample, planned)
        except ArgumentError as problem:
            other = of_other_shapes(sample, planned) or (without_arguments(sample, planned) if may_lack else None)
            if other is None:
                raise
            tensors = tensor_leaves(sample, other)
            try:
                self._version(other, training=training)
            except ArgumentError as reason:  # the model cannot do without what is left out
                raise problem from reason
            except NotTraceableError as reason:
                how = "with these shapes" if other.tree == planned.tree else "without"
                raise ArgumentError(f"{problem}; {how}: {reason}") from reason
            return other, tensors

    def _version(self, spec: SampleSpec, *, training: bool) -> Version:
        """This process's layers as they train or evaluate on inputs of these shapes; traced when first needed."""
        key = (spec, training)
        if key not in self._versions:
            self._versions[key] = self._training_version(spec) if training else self._evaluation_version(spec)
        return self._versions[key]

    def _training_version(self, spec: SampleSpec) -> Version:
        planned = spec == self._sequence.sample
        sequence = self._sequence if planned else trace_again(self._model, self._sequence, spec)
        layers = {}
        for index in self._layout.stages:
            stage = self._plan.stages[index]
            here, own = sequence.on(self._devices[index]), self._placement.read_by[index]
            past = {name for skip in self._plan.skips if skip.passes_by(index) for name in skip.values}
            layers[index] = StageLayers(
                here,
                stage.first_layer,
                stage.stop_layer,
                stage.recompute,
                own,
                past=frozenset(past),
                splits=SCHEDULES[self._plan.schedule].splits_backward,
            )
        return Version(sequence, layers)

    def _evaluation_version(self, spec: SampleSpec) -> Version:
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
        return Version(sequence, layers)


def inputs_read(sequence: LayerSequence, first: int, stop: int) -> frozenset[str]:
    """Inputs of the model that layers `first` to `stop - 1` read, themselves or through what they compute of them."""
    read = {name for layer in sequence.layers[first:stop] for name in layer.values}
    if stop == len(sequence):  # the model may return an input as it is
        read |= {leaf for leaf in sequence.outputs if isinstance(leaf, str)}
    prelude = sequence.prelude_of(sorted(read & sequence.prelude_names))
    return frozenset(prelude.inputs) | (read & frozenset(sequence.inputs))
