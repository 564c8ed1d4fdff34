"""Buffers and running statistics at the end of a step: moved once per mini-batch, over all replicas.

Batch normalization normalizes by micro-batch; its running statistics move to those of the mini-batch (GPipe, section
2.2), which here is what all replicas saw together: R replicas of M micro-batches leave what one of R * M does. Other
buffers that layers write form a chain over micro-batches, which replicas cannot share: as in
`DistributedDataParallel`, those of replica 0 count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.run.stage_runner import MicroBatch, StageRunner
from profiler.moments import Moments
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

    def move(self, runner: StageRunner, own: Sequence[Sequence[MicroBatch]]) -> None:
        """Write buffers and running statistics of one stage as the step leaves them.

        Args:
            runner: of the stage.
            own: micro-batches of each replica that this process runs.
        """
        written, seen = runner.written_buffers(own[0][-1].index), [runner.statistics(one[-1].index) for one in own]
        with torch.no_grad():
            for name, value in written.items():
                runner.buffers[name].copy_(value)
                if self._group is not None:
                    dist.broadcast(runner.buffers[name], src=self._layout.peers[0], group=self._group)
            moments = [moments for moments in seen if moments is not None]
            if moments:
                whole = reduce(Moments.then, self._of_all_replicas(moments))
                _move_statistics(runner.buffers, runner.normalizations, whole)

    def _of_all_replicas(self, own: Sequence[Moments]) -> Sequence[Moments]:
        """What the normalizations of each replica have seen."""
        if self._group is None:
            return own
        (moments,) = own
        packed = moments.packed()
        gathered = [torch.empty_like(packed) for _ in self._layout.peers]
        dist.all_gather(gathered, packed, group=self._group)
        return [moments.unpacked(vector) for vector in gathered]


def _move_statistics(buffers: Mapping[str, Tensor], entries: Sequence[BatchStatistics], seen: Moments) -> None:
    """By those of all micro-batches."""
    mean, variance = seen.each()
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
