"""Buffers and running statistics at the end of a step: moved once per mini-batch, over all replicas.

Batch normalization normalizes by micro-batch; its running statistics move to those of the mini-batch (GPipe, section
2.2), which here is what all replicas saw together: R replicas of M micro-batches leave what one of R * M does. Other
buffers that layers write form a chain over micro-batches, which replicas cannot share: as in
`DistributedDataParallel`, those of replica 0 count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.stage_runner import MicroBatch, StageRunner
from profiler.moments import combined
from profiler.run.stage_function import Moved
from profiler.torch_private import add_all, lerp_all
from profiler.tracing.batch_norm import BatchStatistics


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
                _move_statistics(runner.buffers, self._of_all_replicas(rows, counts))

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


def _move_statistics(buffers: Mapping[str, Tensor], rows: Sequence[Sequence[Moved]]) -> None:
    """By those of all micro-batches, a row for each."""
    _, means, variances, counts = zip(*(zip(*row, strict=True) for row in rows), strict=True)
    mean, variance = combined(means, variances, [[float(count) for count in of_batch] for of_batch in counts])
    entries = [moment[0] for moment in rows[0]]
    for positions in _rounds(entries):
        momentum = entries[positions[0]].momentum
        for name, moments in (("running_mean", mean), ("running_var", variance)):
            moved = [buffers[getattr(entries[position], name)] for position in positions]
            lerp_all(moved, [moments[position] for position in positions], momentum)
        counters = [entries[position].num_batches_tracked for position in positions]
        counted = [buffers[name] for name in counters if name is not None]
        if counted:
            add_all(counted, 1)


def _rounds(entries: Sequence[BatchStatistics]) -> Iterator[list[int]]:
    """Positions of those that move by one momentum; a buffer that several move is moved in their order."""
    times: Counter[str] = Counter()
    found: dict[tuple[int, float], list[int]] = {}
    for position, entry in enumerate(entries):
        times[entry.running_mean] += 1
        found.setdefault((times[entry.running_mean], entry.momentum), []).append(position)
    for key in sorted(found):
        yield found[key]
