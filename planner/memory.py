"""Memory of a stage under GPipe, for every stage [i, j) at once.

All micro-batches are in flight when the forward phase ends, so a stage keeps for each of them its inputs and, unless
it recomputes, what its layers save for the backward pass. A stage that recomputes holds the saved values of one
micro-batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from planner.costs import CostModel, Floats, LayerArrays, ParameterRanges, range_sums
from planner.micro_batches import MicroBatches
from planner.plan import StageMemory
from profiler.device import Device
from profiler.record import OptimizerCost


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """Bytes by class of a stage of layers [i, j), at [i, j] of matrices of shape (L + 1, L + 1).

    The fields are those of `StageMemory`; entries with j <= i mean nothing.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    transient: Floats
    receive_buffers: Floats
    reserve: Floats

    @property
    def total(self) -> Floats:
        """Sum of all classes."""
        total: Floats = sum(getattr(self, field.name) for field in fields(self))
        return total

    def stage(self, first: int, stop: int) -> StageMemory:
        """The bytes of one stage."""
        return StageMemory(**{field.name: int(getattr(self, field.name)[first, stop]) for field in fields(self)})


def memory_table(
    costs: CostModel,
    parameters: ParameterRanges,
    device: Device,
    micro_batches: MicroBatches,
    optimizer: OptimizerCost,
    *,
    recompute: bool,
) -> MemoryTable:
    """Bytes of every possible stage on a device.

    Args:
        costs: costs of the layers.
        parameters: bytes of the parameters of every range.
        device: its kind selects the costs.
        micro_batches: how the mini-batch is cut.
        optimizer: what the optimizer keeps.
        recompute: whether the whole stage is recomputed.
    """
    profile = costs.profile
    large = costs.layers(device.kind, micro_batches.largest)
    small = costs.layers(device.kind, micro_batches.smallest)
    number_large = micro_batches.number_largest
    number_small = micro_batches.count - number_large

    inputs = _behind_boundary(number_large * large.output_bytes + number_small * small.output_bytes)
    kept_large, kept_small = large.in_stage.kept(), small.in_stage.kept()
    kept_by_all = number_large * kept_large + number_small * kept_small
    most_large, most_small = large.in_stage.most(kept_large), small.in_stage.most(kept_small)
    temporary = np.maximum(most_large - kept_large, most_small - kept_small)
    held_by_all = range_sums(number_large * large.in_stage.held_bytes + number_small * small.in_stage.held_bytes)
    held_throughout = inputs[:, None] + micro_batches.batch_size * profile.input_bytes
    shape = parameters.unique.shape
    return MemoryTable(
        parameters=parameters.unique + parameters.buffers,
        gradients=parameters.gradients,
        optimizer=np.ceil(optimizer.state_bytes_per_byte * parameters.trainable),
        activations=held_throughout + (held_by_all if recompute else kept_by_all),
        transient=np.maximum(most_large, most_small) if recompute else temporary,
        receive_buffers=_receive_buffers(large, small),
        reserve=np.full(shape, float(profile.reserve_bytes)),
    )


def _receive_buffers(large: LayerArrays, small: LayerArrays) -> Floats:
    """Two messages in each direction: outputs and their gradients behind the stage, gradients of its inputs before."""
    outputs = _behind_boundary(np.maximum(large.output_bytes, small.output_bytes))
    gradients = _behind_boundary(np.maximum(large.output_gradient_bytes, small.output_gradient_bytes))
    return 2 * (gradients + outputs)[None, :] + 2 * gradients[:, None]


def _behind_boundary(layer_bytes: Floats) -> Floats:
    """Bytes at boundary i, between layers i - 1 and i, shape (L + 1,); 0 at both ends of the model."""
    at_boundary = np.zeros(len(layer_bytes) + 1)
    at_boundary[1:-1] = layer_bytes[:-1]
    return at_boundary
