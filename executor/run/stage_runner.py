"""One stage on its device: forward, recompute and backward passes of the micro-batches of a step.

A stage is cut into parts at the borders of its recomputed segments. The forward pass keeps of a recomputed part only
what enters it; B walks the parts backward and recomputes each of these just before its own backward pass:

    part        kept     segment 0      kept    segment 1
    F         |======| |-----------| |======| |-----------|
    R                                         |===========|     before the gradient arrives
    B         |<=====| |====|<=====| |<=====| |<==========|     one segment's saved values exist at a time

Where the schedule splits it, B is I, which leaves gradients of parameters to a later W, see
`profiler.run.split_backward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor.run.accumulators import Accumulators
from executor.run.micro_batch import mean_over_samples
from executor.run.parameter_hooks import ParameterHooks
from executor.run.randomness import OF_THE_LOSS, BackwardDraws, Keyed
from planner.plan.stage import Segment
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST, backend_of
from profiler.moments import Moments
from profiler.observe.drawn_from import drawn_from, is_torchs_own
from profiler.observe.random_states import generators_of, next_seed, seeded
from profiler.opaque.keeping_nothing import keeping_nothing
from profiler.run.loss import LOSS, LossFunction, copy_of, loss_of, model_output, refuse_trained_beside, versions_of
from profiler.run.separable import deferred_parameters
from profiler.run.split_backward import DeferredWeights
from profiler.run.stage_function import (
    KeptPass,
    Moved,
    Results,
    StageFunction,
    leaves_of,
    roots_of,
    run_backward,
)
from profiler.torch_private import storage_of
from profiler.tracing.batch_norm import BatchStatistics
from profiler.tracing.sequence import LayerSequence


@dataclass(slots=True, eq=False)
class MicroBatch:
    """What a stage needs of one micro-batch in addition to what the stage before sends; nobody changes it.

    Each step makes M of them, and a frozen one takes three times as long.

    Attributes:
        index: position in the mini-batch of all replicas, which keys random numbers.
        size: samples.
        weight: share of the mini-batch, samples / all samples.
        inputs: the model's inputs by name.
        target: what the loss is computed with.
    """

    index: int
    size: int
    weight: float
    inputs: Mapping[str, Tensor]
    target: Any


@dataclass(frozen=True, slots=True)
class StagePart:
    """A run of layers of a stage that is recomputed as a whole, or not at all."""

    function: StageFunction
    is_recomputed: bool


class StageLayers:
    """The layers of one stage, ready to run: one version of them, for training or evaluation and one kind of input.

    Args:
        sequence: the layers of the model on the stage's device.
        first: index of the stage's first layer.
        stop: index after its last layer.
        segments: that are recomputed.
        parameters: by (layer, name), see `StageFunction`.
        constants: of the graph by name, where they are others than those that the stage's buffers hold.
        past: names of values that skip the stage.
        splits: whether the backward pass leaves gradients of parameters to a pass of their own.

    Attributes:
        entering: what the stage receives, from whichever stage.
        leaving: what it sends.
        parameters: those of the layers.
    """

    def __init__(
        self,
        sequence: LayerSequence,
        first: int,
        stop: int,
        segments: Sequence[Segment],
        parameters: Mapping[tuple[int, str], Tensor],
        constants: Mapping[str, Tensor] | None = None,
        past: frozenset[str] = frozenset(),
        *,
        splits: bool = False,
    ) -> None:
        self.sequence = sequence
        self.splits = splits
        self.leaving = tuple(value for value in sequence.boundaries[stop] if value.name not in past)
        self.constants = constants or {}
        self.is_last = stop == len(sequence)
        recomputed = {segment.first for segment in segments}
        borders = sorted({first, stop, *recomputed, *(segment.stop for segment in segments)})
        deferred = deferred_parameters(sequence.layers[first:stop], parameters) if splits else frozenset()
        self.parts = tuple(
            StagePart(
                StageFunction(sequence, begin, end, parameters, past=past, deferred=deferred), begin in recomputed
            )
            for begin, end in pairwise(borders)
        )
        self.entering = self.parts[0].function.entering
        self.last_recomputed = max((index for index, part in enumerate(self.parts) if part.is_recomputed), default=-1)
        self.inputs = tuple(dict.fromkeys(name for part in self.parts for name in part.function.inputs))
        own = [(layer.index, name) for layer in sequence.layers[first:stop] for name in layer.parameters]
        self.parameters = {place: parameters[place] for place in own}


@dataclass(slots=True)
class _StepState:
    """What a stage holds during one step, by micro-batch index; of parts by (micro-batch, part).

    Of one replica at a time there are `accumulators`, by part. `shares` are gradients of losses, by weight.
    """

    number: int
    loss_scale: Tensor | None = None
    accumulators: list[Accumulators] = field(default_factory=list)
    entering: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    kept: dict[tuple[int, int], KeptPass] = field(default_factory=dict)
    deferred: dict[tuple[int, int], DeferredWeights] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    statistics: dict[int, Moments] = field(default_factory=dict)
    normalizations: tuple[BatchStatistics, ...] = ()
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, dict[str, Any]] | None = None
    shares: dict[float, Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs the layers of one stage.

    Args:
        device: where it runs.
        buffers: the stage's buffers by name, on its device.
        loss_fn: of the last stage.
        seed: of all random numbers.
        alone: whether this process runs all stages of all replicas.
    """

    def __init__(
        self, device: torch.device, buffers: dict[str, Tensor], loss_fn: LossFunction | None, seed: int, *, alone: bool
    ) -> None:
        self.device = device
        self.buffers = buffers
        self._loss_fn = loss_fn
        self.seed = seed
        self._asks_loss = not alone and loss_fn is not None  # once a step, whether it trains more than the model
        self._loss_is_known = False
        self._loss_writes = False  # its target
        self._generators = generators_of(device)
        self._backward_draws = BackwardDraws()
        self._hooks = ParameterHooks()
        self._loss_draws = None if loss_fn is None or is_torchs_own(loss_fn) else drawn_from(loss_fn)
        if self._loss_draws and self._loss_draws.of_the_system:
            raise ArgumentError(
                f"loss_fn names {self._loss_draws.of_the_system!r}, by which it may draw random numbers of the system, "
                "which nobody can draw again; draw from torch's generator (torch.rand)"
            )
        self._state = _StepState(0)

    def begin(self, step: int, loss_scale: Tensor | None = None, *, keep_outputs: bool = False) -> None:
        """Forget the step before.

        Args:
            step: keys the random numbers.
            loss_scale: times as large are the gradients.
            keep_outputs: whether `evaluate` keeps what the model returns, in place of its loss.
        """
        self._state = _StepState(step, loss_scale, outputs={} if keep_outputs else None)
        self._loss_is_known = not self._asks_loss

    def forward(
        self, layers: StageLayers, batch: MicroBatch, received: Mapping[str, Tensor], before: int | None, *, keep: bool
    ) -> dict[str, Tensor]:
        """The forward pass of one micro-batch.

        Args:
            layers: the stage's layers.
            batch: the micro-batch.
            received: the entering values.
            before: index of the micro-batch that came before in this replica, whose written buffers it goes on from.
            keep: whether to keep what the last recomputed segment saves; otherwise `recompute` must come first.

        Returns:
            The leaving values, detached; empty after the last stage.
        """
        state = self._state
        index = batch.index
        carried = state.buffers[index] = {} if before is None else state.buffers[before]
        if before is None:
            state.accumulators = [Accumulators(part.function.parameters) for part in layers.parts]
            self._hooks.seed(layers.parameters)
        written: dict[str, Tensor] = {}
        moments: list[Moved] = []
        values: Mapping[str, Tensor] = received
        for position, part in enumerate(layers.parts):
            place = (index, position)
            leaves = state.entering[place] = leaves_of(values, part.function.entering)
            if not part.is_recomputed or (keep and position == layers.last_recomputed):
                values, results = self._run(layers, position, batch, carried, keep=True)
                state.kept[place] = KeptPass(leaves, roots_of(values))
            else:
                with keeping_nothing():
                    values, results = self._run(layers, position, batch, carried)
            written.update(results.buffers)
            moments.extend(results.statistics)
        if written:
            state.buffers[index] = {**carried, **written}
        if before is not None and layers.last_recomputed < 0:
            del state.buffers[before]  # nobody else reads them
        if moments:
            state.normalizations, seen = _seen(moments)
            earlier = None if before is None else state.statistics.pop(before)
            state.statistics[index] = seen if earlier is None else earlier.then(seen)
        if layers.is_last:
            state.losses[index] = values[LOSS].detach()
            return {}
        return {name: value.detach() for name, value in values.items()}

    def recompute(self, layers: StageLayers, batch: MicroBatch, before: int | None) -> None:
        """Recompute the last segment and keep what its backward pass needs."""
        self._recompute(layers, layers.last_recomputed, batch, before)

    def _recompute(self, layers: StageLayers, position: int, batch: MicroBatch, before: int | None) -> None:
        place = (batch.index, position)
        buffers = self._state.buffers[before] if before is not None else {}
        values, _ = self._run(layers, position, batch, buffers, keep=True)
        self._state.kept[place] = KeptPass(self._state.entering[place], roots_of(values))

    def backward(
        self, layers: StageLayers, batch: MicroBatch, gradients: Mapping[str, Tensor], before: int | None
    ) -> dict[str, Tensor]:
        """The backward pass of one micro-batch, with the recompute of all segments but the last.

        Of a stage that splits it, gradients of parameters are left to `weights`.

        Args:
            layers: the stage's layers.
            batch: the micro-batch.
            gradients: of the leaving values; of the last stage's loss when empty.
            before: as in `forward`.

        Returns:
            Gradients of the entering values that have one.
        """
        state = self._state
        if layers.is_last:
            gradients = {LOSS: self._share(state.losses[batch.index], batch.weight)}
        keyed = self._keyed(batch.index)
        for position in reversed(range(len(layers.parts))):
            place = (batch.index, position)
            if place not in state.kept:
                self._recompute(layers, position, batch, before)
            del state.entering[place]
            with self._backward_draws:
                self._hooks.keyed = keyed
                if self._loss_draws and LOSS in gradients:
                    keyed.in_backward(OF_THE_LOSS, 0, self._loss_draws.generators)
                entering = run_backward(state.kept.pop(place), gradients)
            state.accumulators[position].own()
            gradients = {name: gradient for name, gradient in entering.items() if gradient is not None}
        if before is not None:
            state.buffers.pop(before, None)  # which this micro-batch alone may have been recomputed from
        return dict(gradients)

    def _share(self, loss: Tensor, weight: float) -> Tensor:
        """The gradient of the mini-batch's loss by that of a micro-batch; one tensor for equal ones of a step."""
        known = self._state.shares.get(weight)
        if known is not None and known._version == 0 and known.dtype == loss.dtype:  # nobody has written it
            return known
        share = torch.full_like(loss, weight)
        if self._state.loss_scale is not None:
            share = share * self._state.loss_scale.to(share)
        self._state.shares[weight] = share
        return share

    def weights(self, batch: MicroBatch) -> None:
        """The gradients of parameters that `backward` has left, in its order."""
        state = self._state
        self._hooks.keyed = self._keyed(batch.index)
        for place in sorted((place for place in state.deferred if place[0] == batch.index), reverse=True):
            with self._backward_draws:
                state.deferred.pop(place).run()
            state.accumulators[place[1]].own()

    def evaluate(self, layers: StageLayers, batch: MicroBatch, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The forward pass without gradient; what was received may be gone when it is through."""
        with torch.no_grad():
            values: Mapping[str, Tensor] = received
            buffers = {**self.buffers, **layers.constants}
            keyed = self._keyed(batch.index)
            for part in layers.parts:
                entering = self._inputs(batch, part)
                values = part.function.forward(dict(values), entering, buffers, seed=keyed).values
            if layers.is_last and self._state.outputs is not None:
                self._state.outputs[batch.index] = pytree.tree_map_only(Tensor, partial(_own, received), dict(values))
                return {}
            if layers.is_last:
                keyed(OF_THE_LOSS)
                loss = self._loss(layers, batch, values, layers.parts[-1].function)
                self._state.losses[batch.index] = _own(received, loss)
                return {}
        return dict(values)

    def loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The mean loss in float64, weighted by the given micro-batches' shares of the mini-batch."""
        return mean_over_samples([self._state.losses[batch.index] for batch in batches], [b.weight for b in batches])

    def loss_of(self, batch: MicroBatch) -> Tensor | None:
        """The loss of a micro-batch that the last stage has run, a scalar; None where the output is kept instead."""
        return self._state.losses.get(batch.index)

    def take_output(self, batch: MicroBatch) -> dict[str, Any]:
        """The named values of which the model's output for a micro-batch consists; the stage forgets them."""
        assert self._state.outputs is not None, "begin was told to keep them"
        return self._state.outputs.pop(batch.index)

    def written_buffers(self, index: int) -> Mapping[str, Tensor]:
        """The written buffers as micro-batch `index` left them."""
        return self._state.buffers[index]

    def statistics(self, index: int) -> Moments | None:
        """What the batch normalizations have seen of a replica's micro-batches, of which `index` is the last so far."""
        return self._state.statistics.get(index)

    @property
    def normalizations(self) -> Sequence[BatchStatistics]:
        """The batch normalizations, in the order of their moments."""
        return self._state.normalizations

    def _run(
        self,
        layers: StageLayers,
        position: int,
        batch: MicroBatch,
        buffers: Mapping[str, Tensor],
        *,
        keep: bool = False,
    ) -> tuple[dict[str, Tensor], Results]:
        """A forward pass of one part; `buffers` are those that earlier micro-batches have written."""
        part = layers.parts[position]
        keyed = self._keyed(batch.index)
        store = None
        if keep and layers.splits:
            store = self._state.deferred[batch.index, position] = DeferredWeights()
        results = part.function.forward(
            self._state.entering[batch.index, position],
            self._inputs(batch, part),
            {**self.buffers, **buffers} if buffers else self.buffers,
            seed=keyed,
            store=store,
        )
        if not layers.is_last or position != len(layers.parts) - 1:
            return results.values, results
        keyed(OF_THE_LOSS)  # the loss may draw random numbers too
        loss = self._loss(layers, batch, results.values, part.function, once=keep)
        if not loss.requires_grad:
            raise ArgumentError(
                "the loss depends on no trainable parameter, so there is nothing to train; check loss_fn for detach() "
                "or integers, and the model for requires_grad"
            )
        if not self._loss_is_known:
            refuse_trained_beside(loss, results.values.values())
            self._loss_is_known = True
        return {LOSS: loss}, results

    def _loss(
        self,
        layers: StageLayers,
        batch: MicroBatch,
        values: Mapping[str, Tensor],
        function: StageFunction,
        *,
        once: bool = True,
    ) -> Tensor:
        """The loss; its function may write the target.

        It finds it unwritten where it is called again, and writes no memory that another micro-batch's graph may keep.
        """
        target = self._target(batch)
        if self._loss_writes or not once:
            target = copy_of(target)
        unwritten = versions_of(target)
        others = self._loss_draws.generators if self._loss_draws else ()
        with function.autocasting(), seeded(others, next_seed() or 0) if others else contextlib.nullcontext():
            loss = loss_of(model_output(layers.sequence, values), target, self._loss_fn)
        self._loss_writes |= versions_of(target) != unwritten
        return loss

    def _inputs(self, batch: MicroBatch, part: StagePart) -> dict[str, Tensor]:
        """The model's inputs that the part reads, on its device."""
        return {name: self._here(batch.inputs[name]) for name in part.function.inputs}

    def _target(self, batch: MicroBatch) -> Any:
        if isinstance(batch.target, Tensor):
            return self._here(batch.target)
        return pytree.tree_map_only(Tensor, self._here, batch.target)

    def _here(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        if tensor.device == HOST:
            return backend_of(self.device).from_host(tensor, self.device)
        return tensor.to(self.device, non_blocking=True)

    def _keyed(self, micro_batch: int) -> Keyed:
        return Keyed(self._generators, self.seed, self._state.number, micro_batch, self._backward_draws)


def _seen(moved: Sequence[Moved]) -> tuple[tuple[BatchStatistics, ...], Moments]:
    """Batch normalizations, and what they have seen of a micro-batch."""
    entries, means, variances, counts = zip(*moved, strict=True)
    return entries, Moments.of(means, variances, [float(count) for count in counts])


def _own(received: Mapping[str, Tensor], value: Tensor) -> Tensor:
    """A value that stays as it is when what was received is gone."""
    if value.layout is torch.strided and storage_of(value) in map(storage_of, received.values()):
        return value.clone()
    return value.detach()
