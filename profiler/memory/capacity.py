"""What measuring takes of a device's memory, so that a size for which there is none is refused before it is run.

A model is measured twice. To see its memory, it runs forward layer by layer and then backward, and the values at all
boundaries wait; to time it, it runs in windows of layers, and the values at one boundary do. In addition to both there
are the pool of parameters and the inputs of the largest micro-batch, of which smaller ones are parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profiler.machine.backend import backend_of
from profiler.memory.in_stage import LayerMemory
from profiler.run.inputs import input_bytes
from profiler.run.parameter_pool import ParameterPool
from profiler.run.sampled_layers import swept_layers
from profiler.workload import Workload

SWEEP_SHARE = 0.4  # of the memory, for what a window of layers keeps and its parameters


class Room:
    """The memory of one device.

    Args:
        workload: what is measured.
        pool: holds the parameters.
        place: the device.
        memory_bytes: what it has.
    """

    def __init__(self, workload: Workload, pool: ParameterPool, place: torch.device, memory_bytes: int) -> None:
        self._workload = workload
        self._pool = pool
        self._place = place
        self._memory_bytes = memory_bytes
        self._boundaries = workload.sequence.boundaries

    def holds_run(self, size: int, layers: Sequence[LayerMemory]) -> bool:
        """Whether the whole model can be run layer by layer on a micro-batch of that size."""
        values = {value.name: value.size_bytes(size) for boundary in self._boundaries for value in boundary}
        most = max(self._layer_bytes(size, index, entry) for index, entry in enumerate(layers))
        return self._always_bytes(size) + sum(values.values()) + most <= self._memory_bytes

    def sweep_bytes(self, size: int, layers: Sequence[LayerMemory]) -> list[int]:
        """What each layer needs to be timed in a window of its own."""
        always = self._always_bytes(size) + self._remembered_bytes(size, layers)
        return [always + self._layer_bytes(size, index, entry) for index, entry in enumerate(layers)]

    def window_bytes(self, size: int, layers: Sequence[LayerMemory]) -> int:
        """What a window of several layers may keep, their parameters included."""
        left = self._memory_bytes - max(self.sweep_bytes(size, layers))
        return min(int(SWEEP_SHARE * self._memory_bytes), left)

    def _always_bytes(self, size: int) -> int:
        """The pool, and inputs, target and buffers where they are not the user's own."""
        spec = self._workload.sequence.sample
        is_users = self._workload.sample is not None and backend_of(self._place).is_host and size <= spec.batch_size
        inputs = 0 if is_users else size * input_bytes(spec, self._workload.target)
        buffers = self._workload.sequence.buffers.values()
        return self._pool.capacity_bytes + inputs + sum(b.nbytes for b in buffers if b.device != self._place)

    def _remembered_bytes(self, size: int, layers: Sequence[LayerMemory]) -> int:
        """Outputs of layers that stand in for those of equal layers, see `profiler.run.sampled_layers`."""
        signatures = [layer.signature for layer in self._workload.sequence.layers]
        touched = [self._pool.bytes_of(index) + entry.kept_bytes for index, entry in enumerate(layers)]
        left_out = set(range(len(layers))).difference(swept_layers(signatures, touched))
        return sum(
            sum(value.size_bytes(size) for value in self._boundaries[index + 1] if value.producer == index)
            for index in {signatures[index]: index for index in left_out}.values()
        )

    def _layer_bytes(self, size: int, index: int, entry: LayerMemory) -> int:
        """The values around a layer, and all that it keeps and needs in passing."""
        entering, leaving = (
            sum(value.size_bytes(size) for value in self._boundaries[position]) for position in (index, index + 1)
        )
        stage = entry.in_stage
        prelude, copied = (
            sum(size_bytes for _, size_bytes in pairs) for pairs in (stage.prelude_bytes, stage.copied_bytes)
        )
        passing = max(
            stage.forward_bytes + prelude,
            stage.prelude_peak_bytes,
            leaving + max(stage.backward_bytes, stage.last_backward_bytes) + copied,
        )
        return entering + entry.kept_bytes + passing + stage.workspace_bytes
