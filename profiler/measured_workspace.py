"""The memory of layers with what kernels really allocated, in place of a table that counts from above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from profiler.memory.in_stage import LayerMemory
from profiler.timing.sweeps import LayerTiming

LSTM_SCRATCH_BYTES = 3 * 4096
"""oneDNN's LSTM also computes in three parts, each in proportion to the samples and rounded up to a page [measured,
torch 2.13; as in its src/cpu/rnn/rnn_utils.cpp]: at a size between two they lie above the line by less than this."""


def with_measured_workspace(
    memory: Mapping[int, Sequence[LayerMemory]], timings: Mapping[int, Sequence[LayerTiming]]
) -> dict[int, list[LayerMemory]]:
    """The memory of all layers by micro-batch size.

    Args:
        memory: by size, with the table's workspaces.
        timings: by size, of the same layers; those whose memory nobody watched keep the table's.
    """
    return {
        size: [_with(entry, timing.workspace_bytes) for entry, timing in zip(memory[size], of_layers, strict=True)]
        for size, of_layers in timings.items()
    }


def _with(entry: LayerMemory, workspace_bytes: int | None) -> LayerMemory:
    if workspace_bytes is None:
        return entry
    stage = entry.in_stage
    if stage.workspaces:
        workspace_bytes += LSTM_SCRATCH_BYTES
    forward = stage.forward_bytes + sum(size for _, size in (*stage.waiting_bytes, *stage.prelude_bytes))
    backward = max(stage.backward_bytes, stage.last_backward_bytes) + sum(size for _, size in stage.copied_bytes)
    return replace(
        entry,
        transient_bytes=max(max(forward, backward) + workspace_bytes, stage.prelude_peak_bytes),
        in_stage=stage.model_copy(update={"workspace_bytes": workspace_bytes}),
    )
