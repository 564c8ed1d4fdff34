"""Buffers and running statistics at the end of a step: moved once per mini-batch, over all replicas.

Batch normalization normalizes by micro-batch; its running statistics move to those of the mini-batch (GPipe, section
2.2), which here is what all replicas saw together: R replicas of M micro-batches leave what one of R * M does. Other
buffers that layers write form a chain over micro-batches, which replicas cannot share: as in
`DistributedDataParallel`, those of replica 0 count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.stage_runner import MicroBatch, StageRunner
from profiler.moments import combined
from profiler.run.stage_function import Moved


class BufferMover:
    """Moves the buffers of this process's stages.

    Args:
        layout: of this process.
        group: of the processes with the same stages; None where there is one replica, or one process.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None) -> None:
        self._layout = layout
        self._group = group

    def move(self, runner: StageRunner, own: Sequence[Sequence[MicroBatch]], counts: Sequence[int]) -> None:
        """Write buffers and running statistics of one stage as the step leaves them.

        Args:
            runner: of the stage.
            own: micro-batches of each replica that this process runs.
            counts: number of micro-batches of each replica.
        """
        written = runner.written_buffers(own[0][-1].index)
        rows = [runner.statistics(batch.index) for batches in own for batch in batches]
        if not written and not rows[0]:
            return
        with torch.no_grad():
            for name, value in written.items():
                runner.buffers[name].copy_(value)
                if self._group is not None:
                    dist.broadcast(runner.buffers[name], src=self._layout.peers[0], group=self._group)
            if rows[0]:
                for column in zip(*self._of_all_replicas(rows, counts), strict=True):
                    _move_statistics(runner, column)

    def _of_all_replicas(self, rows: Sequence[Sequence[Moved]], counts: Sequence[int]) -> list[list[Moved]]:
        """The statistics of all replicas' micro-batches, a row for each."""
        if self._group is None:
            return [list(row) for row in rows]
        like = rows[0]
        device = like[0][1].device
        packed = torch.stack([_packed(row) for row in rows]).to(device)
        padded = torch.zeros(max(counts), packed.shape[1], dtype=packed.dtype, device=device)
        padded[: len(rows)] = packed
        gathered = torch.empty(len(counts), *padded.shape, dtype=padded.dtype, device=device)
        dist.all_gather(list(gathered), padded, group=self._group)
        return [_unpacked(line, like) for block, count in zip(gathered, counts, strict=True) for line in block[:count]]


def _packed(row: Sequence[Moved]) -> Tensor:
    """A micro-batch's statistics as one vector; float64 holds all of them exactly."""
    parts = [part.reshape(-1).to(device=row[0][1].device, dtype=torch.float64) for moment in row for part in moment[1:]]
    return torch.cat(parts)


def _unpacked(line: Tensor, like: Sequence[Moved]) -> list[Moved]:
    row: list[Moved] = []
    begin = 0
    for moment in like:
        found = []
        for part in moment[1:]:
            found.append(line[begin : begin + part.numel()].view(part.shape).to(device=part.device, dtype=part.dtype))
            begin += part.numel()
        mean, variance, count = found
        row.append((moment[0], mean, variance, count))
    return row


def _move_statistics(runner: StageRunner, column: Sequence[Moved]) -> None:
    entry = column[0][0]
    mean, variance = combined([c[1] for c in column], [c[2] for c in column], [c[3] for c in column])
    runner.buffers[entry.running_mean].lerp_(mean, entry.momentum)
    runner.buffers[entry.running_var].lerp_(variance, entry.momentum)
    if entry.num_batches_tracked is not None:
        runner.buffers[entry.num_batches_tracked].add_(1)
